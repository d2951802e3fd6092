"""tune: patch only what pays, with what pays most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import registry
from .calls import Call
from .capturing import capture_inputs
from .compat import load_thunder
from .copying import tensors_in
from .errors import AlreadyPatchedError, ArgumentError, ThunderPatchError
from .forward import PatchedForward
from .numerics import verify
from .patching import apply
from .plans import ORIGINAL, Choice, Plan, Trial, Tuned, check_fits, install, read_plan
from .preserving import preserved
from .progress import progress
from .selection import Nested, select
from .stopwatch import Repeated, in_turn, noise, quartiles, ratios

__all__ = ["apply_plan", "default_candidates", "tune"]

Candidates = Mapping[str, Mapping[str, Any]]


def default_candidates(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return what `tune` tries beside the original on a kind of device: options of thunderfx, by name.

    "thunderfx" is thunderfx as it is. On a CPU "torch_compile" has thunder's torch_compile executor in front
    of the default ones. On CUDA "nvfuser" has nvFuser there, where it is installed and not a default already,
    and "cuda graphs" thunder's CUDA graph transform.
    """
    thunder = load_thunder()
    defaults = [executor.name for executor in thunder.get_default_executors()]
    candidates: dict[str, dict[str, Any]] = {"thunderfx": {}}
    if device != "cuda":
        candidates["torch_compile"] = {"executors": ["torchcompile", *defaults]}
        return candidates
    if "nvfuser" not in defaults and thunder.extend.get_executor("nvfuser") is not None:
        candidates["nvfuser"] = {"executors": ["nvfuser", *defaults]}
    from thunder.transforms.cudagraph import CUDAGraphTransform

    candidates["cuda graphs"] = {"transforms": [CUDAGraphTransform()]}
    return candidates


def tune(
    model: nn.Module,
    *args: Any,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    backward: bool = False,
    candidates: Candidates | None = None,
    min_run_time: float = 0.2,
    thunderfx_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Patch each selected module with the candidate that runs it fastest, or leave it as it is.

    The selectors are those of `select`; with none given, the model itself is tuned. `candidates` are options
    of `apply` by name, `default_candidates(device)` if None; `thunderfx_options` are added to each. With
    `backward` a step is forward and backward, otherwise inference, with grad mode off.

    One eager run of `model(*args, **kwargs)` captures each module's inputs. Modules that run the same compiled
    graphs are equal, and one of them is measured for all: its original and the candidates in turn, as
    `benchmark` does. A candidate is chosen when it is faster than the original by more than the noise
    of the measurement and `verify` finds it equal to the original; otherwise the module stays unpatched.

    Returns a handle like `Patch`, with what was chosen and why; `save(path)` keeps it for `apply_plan`. Apart
    from the patches the model is as before. Raises what `select` raises, what the model raises unpatched, and
    `AlreadyPatchedError` when a selected module is patched.
    """
    modules = select(model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested)
    _none_patched(modules)
    with preserved(model), torch.set_grad_enabled(backward):
        calls = capture_inputs(model, modules, args, kwargs)
        device = _device(model, calls)
        given = default_candidates(device) if candidates is None else candidates
        options = {name: {**(thunderfx_options or {}), **more} for name, more in given.items()}
        if ORIGINAL in options or not options:
            raise ArgumentError(f"candidates: expected names of your own, not {ORIGINAL!r}; found {[*options]}")
        groups = _grouped(model, modules, calls, next(iter(options.values())), backward)
        choices = {fqn: _uncalled(fqn, module) for fqn, module in modules.items() if fqn not in calls}
        with progress("tuning", len(groups)) as advance:
            for group in groups:
                bench = _Bench(model, modules[group[0]], calls[group[0]], backward)
                choice = bench.choose(group[0], options, min_run_time)
                choices |= {fqn: replace(choice, fqn=fqn) for fqn in group}
                advance(group[0])
    return install(model, Plan([choices[fqn] for fqn in modules], options, backward, device))


def apply_plan(
    model: nn.Module, plan: Tuned | Mapping[str, Any] | str | Path, candidates: Candidates | None = None
) -> Tuned:
    """Patch `model` as a former `tune` decided, without measuring.

    `plan` is what `tune` returned, its `to_dict()`, or the path of the file that its `save` wrote. `candidates`
    gives options by name where the file could not hold them; those of `default_candidates` are known.

    Raises `SelectionError` when the plan names a module that the model does not have, or has in another class,
    `ArgumentError` when it is no plan, and what `apply` raises. Whatever is raised, the model is as it was.
    """
    if isinstance(plan, Tuned):
        found = plan.plan
    else:
        data = json.loads(Path(plan).read_text(encoding="utf-8")) if isinstance(plan, (str, Path)) else plan
        if not isinstance(data, Mapping):
            raise ArgumentError(f"a plan is a mapping or a path to its file, not {type(data).__name__}")
        device = str(data.get("made_with", {}).get("device", "cpu"))
        found = read_plan(data, {**default_candidates(device), **(candidates or {})})
    check_fits(model, found)
    return install(model, found)


@dataclass
class _Side:
    """A candidate that compiled: what it is installed by, and how it was measured."""

    proxy: PatchedForward
    trial: Trial


class _Bench:
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
        with apply(self._model, where=lambda m, _: m is self._module, nested="all", **options):
            proxy = registry.proxy_of(self._module)
            record = registry.active(self._module)
            assert proxy is not None and record is not None
            first = self._step.once()
            ran_eager = record.compiled_calls == 0
        return _Side(proxy, Trial(name, first_call=first, refused="ran eager" if ran_eager else ""))

    def _measure(self, sides: Mapping[str, _Side], min_run_time: float) -> float:
        """Measure the original and all sides in turn; return the seconds of the original."""

        def run(proxy: PatchedForward) -> float:
            registry.install(self._module, proxy)
            try:
                return self._step.seconds()
            finally:
                registry.uninstall(self._module)

        self._step.calibrate(min(self._step.once() for _ in range(3)))
        running = [lambda side=side: run(side.proxy) for side in sides.values()]
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
        registry.install(self._module, proxy)
        try:
            with self._call.modes():
                found = verify(self._module, *inputs.args, grad=self._backward, **inputs.kwargs)
        finally:
            registry.uninstall(self._module)
        return "" if found.ok else found.verdict


def _none_patched(modules: Mapping[str, nn.Module]) -> None:
    for fqn, module in modules.items():
        if registry.active(module) is not None:
            raise AlreadyPatchedError(
                f"{fqn or '(the model itself)'} ({type(module).__name__}) is patched already: restore it before "
                "it is tuned, or exclude it. Nothing was changed."
            )


def _grouped(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
    options: Mapping[str, Any],
    backward: bool,
) -> list[list[str]]:
    """Return the FQNs of equal modules together: those that run the very same compiled graphs.

    That is surer than to compare classes, shapes and settings, and costs a tracing that a patch needs anyway.
    """
    groups: dict[Any, list[str]] = {}
    for fqn, call in calls.items():
        module = modules[fqn]
        step = Repeated(module, call, backward)
        ran: tuple[int, ...] = ()
        try:
            with apply(model, where=lambda m, _, this=module: m is this, nested="all", **options):
                record = registry.active(module)
                step.once()
                ran = tuple(id(graph) for graph in record.graphs) if record is not None else ()
        except ThunderPatchError:
            pass  # told where the candidate is tried; a module of its own until then
        groups.setdefault((type(module), ran) if ran else fqn, []).append(fqn)
    return list(groups.values())


def _device(model: nn.Module, calls: Mapping[str, Call]) -> str:
    tensors = [*model.parameters(), *(t for call in calls.values() for t in tensors_in((call.args, call.kwargs)))]
    return "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"


def _uncalled(fqn: str, module: nn.Module) -> Choice:
    return Choice(fqn, type(module).__name__, ORIGINAL, "the model did not call it")


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
