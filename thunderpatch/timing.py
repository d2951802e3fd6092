"""benchmark: what patching gains, per module and for the whole model, on the model's real inputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import registry
from .capturing import capture_inputs
from .gains import Benchmark, Row
from .patching import apply
from .preserving import preserved
from .progress import progress
from .selection import Nested, select
from .stopwatch import Repeated, in_turn, quartiles, ratios, unpatched

__all__ = ["Benchmark", "benchmark"]


def benchmark(
    model: nn.Module,
    *args: Any,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    backward: bool = False,
    min_run_time: float = 0.2,
    thunderfx_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Benchmark:
    """Time each selected module, original against patched, on what `model(*args, **kwargs)` feeds it.

    The selectors are those of `select`; with none given, what is patched already is measured, or else the
    model itself. `thunderfx_options` are the options of `apply`, as a dict; modules that are patched keep
    theirs. With `backward` a step is forward and backward, otherwise it is inference, with grad mode off.

    One eager run of the model captures each module's first call. Then each module is timed alone, and at
    last the whole model: both ways in turn, in short blocks of `torch.utils.benchmark`, on as many threads as
    torch uses now, for `min_run_time` seconds each and up to six times that where the machine is noisy.

    The model, its gradients and buffers, the arguments and the random state are as before. Raises what
    `select` and `apply` raise, and what the model raises unpatched.
    """
    given = {"types": types, "names": names, "where": where, "exclude": exclude, "repeated": repeated or None}
    chosen = any(value is not None for value in given.values())
    patched = {} if chosen or not isinstance(model, nn.Module) else dict(registry.patched_below(model))
    modules = patched or select(model, **{**given, "repeated": repeated}, nested=nested)
    everything = {**modules, "": model}
    with preserved(model), torch.set_grad_enabled(backward):
        calls = capture_inputs(model, everything, args, kwargs)
        with unpatched(modules.values()):
            steps = {fqn: Repeated(everything[fqn], call, backward) for fqn, call in calls.items()}
        with (
            _applied(model, modules, thunderfx_options or {}),
            progress("timing", len(modules) + 1) as advance,
        ):
            rows = []
            for fqn, module in modules.items():
                rows.append(_row(fqn, module, steps.get(fqn), [module], min_run_time))
                advance(fqn)
            whole = _row("", model, steps[""], list(modules.values()), min_run_time)
            counts = _calls_in_one_step(modules, steps[""])
    rows = [dataclasses.replace(row, calls=counts[row.fqn]) for row in rows]
    return Benchmark(rows, dataclasses.replace(whole, whole=True), backward)


@contextlib.contextmanager
def _applied(model: nn.Module, modules: Mapping[str, nn.Module], options: Mapping[str, Any]) -> Iterator[None]:
    """Patch what is not patched yet, for the length of a `with` statement."""
    new = {id(module) for module in modules.values() if registry.active(module) is None}
    with contextlib.ExitStack() as stack:
        if new:
            stack.enter_context(apply(model, where=lambda m, fqn: id(m) in new, nested="all", **options))
        yield


def _row(fqn: str, module: nn.Module, step: Repeated | None, patched: Sequence[nn.Module], min_run_time: float) -> Row:
    row = Row(fqn=fqn, cls=type(module).__name__)
    if step is None:
        return dataclasses.replace(row, note="the model did not call it")

    def eager() -> float:
        with unpatched(patched):
            return step.seconds()

    first = step.once()
    with unpatched(patched):
        peak_eager = step.peak_memory()
        step.calibrate(min(step.once() for _ in range(3)))
    samples = in_turn([eager, step.seconds], min_run_time)
    (low_e, eager_, high_e), (low_p, patched_, high_p) = map(quartiles, samples)
    low_r, ratio, high_r = quartiles(ratios(*samples))
    return dataclasses.replace(
        row,
        eager=eager_,
        eager_spread=high_e - low_e,
        patched=patched_,
        patched_spread=high_p - low_p,
        ratio=ratio,
        ratio_spread=high_r - low_r,
        first_call=first,
        peak_eager=peak_eager,
        peak_patched=step.peak_memory(),
    )


def _calls_in_one_step(modules: Mapping[str, nn.Module], step: Repeated) -> dict[str, int]:
    """Count how often each patched module is called when the model runs once."""

    def counts() -> dict[str, int]:
        records = {fqn: registry.active(module) for fqn, module in modules.items()}
        return {fqn: record.calls if record is not None else 0 for fqn, record in records.items()}

    before = counts()
    step.once()
    return {fqn: count - before[fqn] for fqn, count in counts().items()}
