"""Compares two results; the budget for a difference is eager's own error against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .running import Result

# The patched result may be this many times as far from float64 as eager is: other orders of summation
# are as good as eager's, and a maximum over few elements scatters by such a factor.
FACTOR = 6.0


def _numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)


def _error(a: Tensor, b: Tensor) -> float:
    difference = (_numbers(a) - _numbers(b)).abs()
    finite = difference[torch.isfinite(difference)]
    return finite.max().item() if finite.numel() else 0.0


def close(expected: Tensor, got: Tensor, exact: Callable[[], Tensor | None]) -> bool:
    """Whether ``got`` is as right as ``expected``; ``exact`` gives the float64 value when it is needed."""
    try:
        torch.testing.assert_close(
            _numbers(got).to(torch.float64), _numbers(expected), equal_nan=True, **_tolerance(expected.dtype)
        )
        return True
    except AssertionError:
        pass
    reference = exact()
    if reference is None or reference.shape != expected.shape:
        return False
    if not torch.equal(_numbers(expected).isfinite(), _numbers(got).isfinite()):
        return False
    floor = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
    scale = _numbers(reference).abs().nan_to_num(0, 0, 0).max().item() if reference.numel() else 0.0
    return _error(got, reference) <= FACTOR * _error(expected, reference) + floor * scale


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    if not (dtype.is_floating_point or dtype.is_complex):
        return {"rtol": 0.0, "atol": 0.0}
    rtol, atol = {
        torch.float64: (1e-7, 1e-7),
        torch.complex128: (1e-7, 1e-7),
        torch.bfloat16: (1.6e-2, 1e-5),
        torch.float16: (1e-3, 1e-5),
    }.get(dtype, (1.3e-6, 1e-5))
    return {"rtol": rtol, "atol": atol}


def differences(expected: Result, got: Result, exact: Callable[[], Result | None]) -> list[str]:
    """Say in words where ``got`` differs from ``expected``; an empty list when it does not."""
    found = []
    if len(expected.outputs) != len(got.outputs):
        return ["another number of outputs"]
    for part in ("outputs", "inputs", "buffers"):
        found += _differing(part, getattr(expected, part), getattr(got, part), exact)
    if isinstance(got.gradients, str):
        if not isinstance(expected.gradients, str):
            found.append(f"backward raises {got.gradients}")
    elif not isinstance(expected.gradients, str):
        if len(expected.gradients) != len(got.gradients):
            found.append("gradients missing")
        else:
            found += _differing("gradients", expected.gradients, got.gradients, exact)
    if any(not same <= other for same, other in zip(expected.identities, got.identities, strict=True)):
        found.append("aliasing of outputs and inputs")
    return found


def _differing(part: str, expected: list[Any], got: list[Any], exact: Callable[[], Result | None]) -> list[str]:
    found = []
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        where = f"{part}[{index}]"
        if isinstance(want, Tensor) != isinstance(have, Tensor):
            zeros = isinstance(want, Tensor) and not _numbers(want).any()
            found.append(f"{where} is {type(have).__name__}, not {'zeros' if zeros else type(want).__name__}")
        elif not isinstance(want, Tensor):
            if want != have and not (want != want and have != have):
                found.append(f"{where} is {have}, not {want}")
        elif want.shape != have.shape or want.dtype != have.dtype:
            found.append(f"{where} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}")
        else:
            if want.requires_grad != have.requires_grad:
                found.append(f"{where} requires_grad is {have.requires_grad}")
            if not close(want, have, lambda i=index: _at(exact(), part, i)):
                found.append(f"{where} differs by {_error(want, have):.2g}")
    return found


def _at(result: Result | None, part: str, index: int) -> Tensor | None:
    items = getattr(result, part) if result is not None else ()
    value = items[index] if not isinstance(items, str) and index < len(items) else None
    return value if isinstance(value, Tensor) else None
