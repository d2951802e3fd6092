"""verify: each selected module, and then the whole model, patched against original."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import registry
from .calls import Call
from .capturing import capture_inputs
from .copying import in_float64, move
from .judging import Judgement, judge, spelled
from .masks import Masks, again
from .outcome import Outcome, run
from .patching import apply, disabled, restore
from .preserving import preserved
from .progress import progress
from .selection import Nested, select
from .stages import find_stage
from .tolerance import Yardstick, rounding
from .verification import Row, Verdict, Verification


def verify(
    model: nn.Module,
    *args: Any,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    grad: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    thunderfx_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Verification:
    """Compare each selected module of `model` with its original, on what `model(*args, **kwargs)` feeds it.

    The selectors are those of `select`; with none given, what is patched already is compared, or else the
    model itself. `thunderfx_options` are the options of `apply`, as a dict; modules that are patched already
    keep theirs.

    One eager run of the model captures each module's first call. Then each module is run alone, original and
    patched, from the same arguments, random state and buffers, and at last the whole model; compared are
    outputs, the gradients of inputs and parameters (unless `grad=False`), arguments and buffers afterwards.

    A value may be as far from float64 as `tolerance.FACTOR` (8) times the original is, or as float64 itself
    moves when inputs and parameters are moved by one rounding step of the dtype: what two equally good orders
    of summation differ by. `rtol` and `atol` decide instead where given, as in `torch.testing.assert_close`.

    The model, its gradients and buffers, the arguments and the random state are as before. Raises what
    `select` and `apply` raise, and what the model raises unpatched.
    """
    modules = _modules(model, types, names, where, exclude, repeated, nested)
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        calls = capture_inputs(model, {"": model, **modules}, args, kwargs)
    rows = []
    with (
        preserved(model),
        _patched(model, modules, thunderfx_options or {}),
        progress("comparing", len(modules) + 1) as advance,
    ):
        for fqn, module in modules.items():
            rows.append(_compare(fqn, module, calls.get(fqn), Yardstick(rtol=rtol, atol=atol)))
            advance(fqn)
        if "" not in modules:
            whole = _compare("", model, calls.get(""), Yardstick(rtol=rtol, atol=atol))
            rows.append(replace(whole, whole=True))
    return Verification(rows)


def _modules(model: nn.Module, *selectors: Any) -> dict[str, nn.Module]:
    types, names, where, exclude, repeated, nested = selectors
    if not any(given is not None for given in (types, names, where, exclude)) and not repeated:
        patched = dict(registry.patched_below(model)) if isinstance(model, nn.Module) else {}
        if patched:
            return patched
    return select(model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested)


@contextlib.contextmanager
def _patched(model: nn.Module, modules: Mapping[str, nn.Module], options: Mapping[str, Any]) -> Iterator[None]:
    new = {id(module) for module in modules.values() if registry.active(module) is None}
    if not new:
        yield
        return
    with apply(model, where=lambda module, fqn: id(module) in new, nested="all", **options):
        yield


def _compare(fqn: str, module: nn.Module, call: Call | None, yardstick: Yardstick) -> Row:
    row = Row(fqn=fqn, cls=type(module).__name__, verdict=Verdict.EQUAL)
    if call is None:
        return replace(row, verdict=Verdict.NEVER_CALLED, note="the model did not call it")
    subject = _Alone(module, call)
    try:
        original = subject.original()
    except Exception as error:
        note = f"alone, the original raises {spelled(error)}"
        return replace(row, verdict=Verdict.NOT_COMPARABLE, note=note)
    try:
        patched = run(module, call)
    except Exception as error:
        return replace(row, verdict=Verdict.RAISES, note=spelled(error))
    judgement = judge(subject, original, patched, yardstick)
    row = replace(row, note=judgement.note)
    if not judgement.comparable:
        return replace(row, verdict=Verdict.NOT_COMPARABLE)
    if judgement.found:
        worst = judgement.found[0]
        row = replace(row, worst=worst.what, error=worst.error, budget=worst.budget)
    if judgement.ok:
        return row
    differing = tuple(str(difference) for difference in judgement.found if not difference.ok)
    return replace(row, verdict=Verdict.DIFFERS, differing=differing, stage=_stage(module, call, judgement))


def _stage(module: nn.Module, call: Call, judgement: Judgement) -> str:
    def agrees() -> bool:
        try:
            return judgement.agrees(run(module, call))
        except Exception:
            return False

    records = [record for _, m in registry.patched_below(module) if (record := registry.active(m))]
    return find_stage({graph: None for record in records for graph in record.graphs}, agrees)


class _Alone:
    """One module with the arguments of one call, run outside the model."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module, self._call = module, call

    def original(self, masks: Masks | None = None) -> Outcome:
        with disabled(self._module):
            return run(self._module, self._call, masks=masks)

    def exact(self, masks: Masks | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        call = replace(self._call, autocast=())
        numbers = [*self._module.parameters(), *self._call.fresh().given]
        step = max((rounding(tensor.dtype) for tensor in numbers), default=0.0)
        twin = _in_float64(self._module)
        exact = run(twin, call, cast=torch.float64, masks=again(masks))
        for parameter in twin.parameters():
            move(parameter, step)
        moved = run(twin, call, cast=torch.float64, moved_by=step, masks=again(masks))
        return exact.values, moved.values


def _in_float64(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    restore(twin)
    twin._apply(in_float64)
    return twin
