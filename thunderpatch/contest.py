"""A contest between a module's original and candidates, on the inputs that the model gives it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from . import registry
from .calls import Call
from .errors import ThunderPatchError
from .forward import PatchedForward
from .numerics import verify
from .patching import apply
from .plans import ORIGINAL, Choice, Trial
from .stopwatch import Repeated, in_turn, noise, quartiles, ratios

Candidates = Mapping[str, Mapping[str, Any]]  # options of thunderfx, by name


@dataclass
class _Side:
    """A candidate that compiled: what it is installed by, and how it was measured."""

    proxy: PatchedForward
    trial: Trial


class Contest:
    """One module, alone, with its inputs: what runs it fastest?"""

    def __init__(self, model: nn.Module, module: nn.Module, call: Call, backward: bool) -> None:
        self._model, self._module, self._call, self._backward = model, module, call, backward
        self._step = Repeated(module, call, backward)

    def choose(self, fqn: str, candidates: Candidates, min_run_time: float) -> Choice:
        trials: dict[str, Trial] = {}
        sides: dict[str, _Side] = {}
        for name, options in candidates.items():
            try:
                sides[name] = self._compile(name, options)
            except ThunderPatchError as error:
                trials[name] = Trial(name, refused=_first_line(error))
        original = self._measure(sides, min_run_time)
        trials |= {name: side.trial for name, side in sides.items()}
        chosen = ORIGINAL
        for trial in sorted((t for t in trials.values() if t.gains), key=lambda trial: trial.ratio):
            wrong = self._wrong(sides[trial.candidate].proxy)
            if not wrong:
                chosen = trial.candidate
                break
            trials[trial.candidate] = replace(trial, refused=wrong)
        ordered = [trials[name] for name in candidates]
        return Choice(fqn, type(self._module).__name__, chosen, _why(chosen, ordered), original, fqn, ordered)

    def _compile(self, name: str, options: Mapping[str, Any]) -> _Side:
        with apply(self._model, where=only(self._module), nested="all", **options):
            proxy = registry.proxy_of(self._module)
            record = registry.active(self._module)
            assert proxy is not None and record is not None
            first = self._step.once()
            ran_eager = record.compiled_calls == 0
        return _Side(proxy, Trial(name, first_call=first, refused="ran eager" if ran_eager else ""))

    def _measure(self, sides: Mapping[str, _Side], min_run_time: float) -> float:
        """Measure the original and all sides in turn; return the seconds of the original."""

        def run(proxy: PatchedForward) -> float:
            with self._patched(proxy):
                return self._step.seconds()

        self._step.calibrate(min(self._step.once() for _ in range(3)))
        running = [functools.partial(run, side.proxy) for side in sides.values()]
        original, *others = in_turn([self._step.seconds, *running], min_run_time)
        for side, samples in zip(sides.values(), others, strict=True):
            slower = ratios(original, samples)
            side.trial = replace(
                side.trial,
                seconds=quartiles(samples)[1],
                ratio=quartiles(slower)[1],
                noise=noise(slower),
            )
        return quartiles(original)[1]

    def _wrong(self, proxy: PatchedForward) -> str:
        """Say how the patched module differs from its original; nothing where it does not."""
        inputs = self._call.fresh()
        with self._patched(proxy), self._call.modes():
            found = verify(self._module, *inputs.args, grad=self._backward, **inputs.kwargs)
        return "" if found.ok else f"verify: {found.verdict}"

    @contextlib.contextmanager
    def _patched(self, proxy: PatchedForward) -> Iterator[None]:
        registry.install(self._module, proxy)
        try:
            yield
        finally:
            registry.uninstall(self._module)


def only(module: nn.Module) -> Callable[[nn.Module, str], bool]:
    return lambda candidate, fqn: candidate is module


def _why(chosen: str, trials: Sequence[Trial]) -> str:
    if chosen != ORIGINAL:
        ratio = next(trial.ratio for trial in trials if trial.candidate == chosen)
        return f"takes {ratio:.2f} times as long"
    measured = [trial for trial in trials if not trial.refused]
    if not measured:
        return "no candidate can be used"
    best = min(measured, key=lambda trial: trial.ratio)
    return f"the best candidate, {best.candidate!r}, takes {best.ratio:.2f} ±{best.noise:.2f} times as long"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
