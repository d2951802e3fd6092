"""verify: each selected module, and then the whole model, patched against original."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import registry
from .capturing import Call, capture_inputs
from .copying import move
from .masks import Masks
from .outcome import Outcome, run
from .patching import apply, disabled, restore
from .preserving import preserved
from .progress import progress
from .selection import Nested, select
from .stages import find_stage
from .tolerance import Difference, Yardstick, rounding
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
        _patched(model, modules, thunderfx_options or {}),
        progress("comparing", len(modules) + 1) as advance,
    ):
        for fqn, module in modules.items():
            rows.append(_compare(fqn, module, calls.get(fqn), Yardstick(rtol=rtol, atol=atol)))
            advance(fqn)
        if "" not in modules:
            whole = _compare("", model, calls.get(""), Yardstick(rtol=rtol, atol=atol))
            rows.append(dataclasses.replace(whole, whole=True))
    return Verification(rows)


def _modules(model: nn.Module, *selectors: Any) -> dict[str, nn.Module]:
    types, names, where, exclude, repeated, nested = selectors
    if not any(given is not None for given in (types, names, where, exclude)) and not repeated:
        patched = dict(registry.patched_below(model)) if isinstance(model, nn.Module) else {}
        if patched:
            return patched
    return select(
        model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested
    )


@contextlib.contextmanager
def _patched(
    model: nn.Module, modules: Mapping[str, nn.Module], options: Mapping[str, Any]
) -> Iterator[None]:
    new = {id(module) for module in modules.values() if registry.active(module) is None}
    if not new:
        yield
        return
    with apply(model, where=lambda module, fqn: id(module) in new, nested="all", **options):
        yield


def _compare(fqn: str, module: nn.Module, call: Call | None, yardstick: Yardstick) -> Row:
    row = Row(fqn=fqn, cls=type(module).__name__, verdict=Verdict.EQUAL)
    if call is None:
        note = "the model did not call it"
        return dataclasses.replace(row, verdict=Verdict.NEVER_CALLED, note=note)
    try:
        with disabled(module):
            original = run(module, call)
    except Exception as error:
        note = f"alone, the original raises {_spelled(error)}"
        return dataclasses.replace(row, verdict=Verdict.NOT_COMPARABLE, note=note)
    try:
        patched = run(module, call)
    except Exception as error:
        return dataclasses.replace(row, verdict=Verdict.RAISES, note=_spelled(error))
    if original.drew:
        return _compare_random(row, module, call, yardstick, original, patched)
    yardstick, note = _measured(yardstick, module, call)
    return _judged(row, module, yardstick, original, patched, note, lambda: run(module, call))


def _compare_random(
    row: Row, module: nn.Module, call: Call, yardstick: Yardstick, original: Outcome, patched: Outcome
) -> Row:
    """Compare a module that draws random numbers, with the masks that torch draws or those of thunder."""
    # No float64 here: it would draw other masks, and their difference would pass for rounding.
    found = yardstick.differences(original.values, patched.values)
    if original.same_random_numbers(patched) and found[0].ok:
        return _told(row, found, "random, compared with the same random numbers")
    masks = Masks()
    with disabled(module):
        masked = run(module, call, masks=masks)
        again = run(module, call, masks=Masks(masks.drawn))
    if again.drew or not masked.same_random_numbers(patched):
        note = "random: thunder draws its random numbers in another way"
        return dataclasses.replace(row, verdict=Verdict.NOT_COMPARABLE, note=note)
    yardstick, note = _measured(yardstick, module, call, masks)
    note = "; ".join(filter(None, ["random, compared with the same dropout masks", note]))
    return _judged(row, module, yardstick, masked, patched, note, lambda: run(module, call))


def _judged(
    row: Row,
    module: nn.Module,
    yardstick: Yardstick,
    original: Outcome,
    patched: Outcome,
    note: str,
    again: Callable[[], Outcome],
) -> Row:
    found = yardstick.differences(original.values, patched.values)
    if not found or found[0].ok:
        return _told(row, found, note)

    def agrees() -> bool:
        try:
            values = again().values
        except Exception:
            return False
        return yardstick.differences(original.values, values)[0].ok

    records = [record for _, m in registry.patched_below(module) if (record := registry.active(m))]
    stage = find_stage({graph: None for record in records for graph in record.graphs}, agrees)
    return dataclasses.replace(_told(row, found, note), verdict=Verdict.DIFFERS, stage=stage)


def _told(row: Row, found: list[Difference], note: str) -> Row:
    if not found:
        return dataclasses.replace(row, note=note)
    worst = found[0]
    differing = tuple(str(difference) for difference in found if not difference.ok)
    return dataclasses.replace(
        row, worst=worst.what, error=worst.error, budget=worst.budget, differing=differing, note=note
    )


def _measured(
    yardstick: Yardstick, module: nn.Module, call: Call, masks: Masks | None = None
) -> tuple[Yardstick, str]:
    """Return the yardstick with the values of float64, or as it is and a note where float64 cannot be had."""
    if yardstick.rtol is not None or yardstick.atol is not None:
        return yardstick, ""
    step = max((rounding(t.dtype) for t in _floating(module, call)), default=0.0)
    plain = dataclasses.replace(call, autocast=())
    replay = (lambda: Masks(masks.drawn)) if masks is not None else (lambda: None)
    try:
        twin = _in_float64(module)
        exact = run(twin, plain, cast=torch.float64, masks=replay())
        with preserved(twin):
            for parameter in twin.parameters():
                move(parameter, step)
            moved = run(twin, plain, cast=torch.float64, moved_by=step, masks=replay())
    except Exception as error:
        return yardstick, f"does not run in float64 ({_spelled(error)}): compared with fixed tolerances"
    return dataclasses.replace(yardstick, exact=exact.values, moved=moved.values), ""


def _in_float64(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    restore(twin)
    wide = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
    twin._apply(  # type: ignore[no-untyped-call]
        lambda t: t.double() if t.is_floating_point() else t.to(wide.get(t.dtype, t.dtype))
    )
    return twin


def _floating(module: nn.Module, call: Call) -> list[torch.Tensor]:
    given = call.fresh().given
    return [t for t in [*module.parameters(), *given] if t.is_floating_point() or t.is_complex()]


def _spelled(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"
