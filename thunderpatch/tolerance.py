"""How far a value may be from the original's: as far as rounding takes the original itself, a few times over.

The yardstick is float64. The original's own error against it is measured, and also how far float64 itself
moves when each input and parameter is moved by one rounding step, which any method of computing has to
suffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Two orders of summation are equally good and yet differ in their largest error. Measured, patched against eager: up
# to 2.6 times for the layers of Llama, GPT-2, BERT, T5 and ViT in float32 and bfloat16, once 6.6 for a whole model.
FACTOR = 8.0

# Relative to the largest value, for what has no counterpart in float64: a few times torch.testing's own.
_UNMEASURED = {torch.float16: 4e-3, torch.bfloat16: 6e-2, torch.float64: 4e-7, torch.complex128: 4e-7}
_UNMEASURED_ELSE = 5e-6


@dataclass(frozen=True)
class Difference:
    """How far one value is off: `error` and `budget` in its own unit; `words` for what numbers cannot say."""

    what: str
    error: float
    budget: float
    words: str = ""

    @property
    def ratio(self) -> float:
        """The error as a multiple of the budget; infinite for what must be equal and is not."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.budget if self.budget > 0.0 and not math.isnan(self.error) else math.inf

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        return self.words or f"{self.what} is off by {self.error:.1e}, allowed {self.budget:.1e}"


@dataclass(frozen=True)
class Yardstick:
    """The values in float64, and the same from inputs and parameters moved by a rounding step.

    Where `rtol` or `atol` is given, it decides instead, element by element, as in
    `torch.testing.assert_close`.
    """

    exact: Mapping[str, Any] | None = None
    moved: Mapping[str, Any] | None = None
    rtol: float | None = None
    atol: float | None = None

    @property
    def measures(self) -> bool:
        """Whether float64 is wanted: no tolerance was given."""
        return self.rtol is None and self.atol is None

    def differences(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[Difference]:
        """Return one `Difference` for each value of either, the worst first."""
        names = [*expected, *(name for name in got if name not in expected)]
        found = [self._difference(name, expected.get(name), got.get(name)) for name in names]
        return sorted(found, key=lambda difference: -difference.ratio)

    def _difference(self, name: str, expected: Any, got: Any) -> Difference:
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            same = type(expected) is type(got) and (expected == got or (expected != expected and got != got))
            words = "" if same else f"{name} is {_spelled(got)}, not {_spelled(expected)}"
            return Difference(name, 0.0 if same else math.inf, 0.0, words)
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            return Difference(name, math.inf, 0.0, f"{name} is {_spelled(got)}, not {_spelled(expected)}")
        want, have = _numbers(expected), _numbers(got)
        same_kind = torch.equal(want.isnan(), have.isnan()) and torch.equal(want.isinf(), have.isinf())
        if not same_kind or not torch.equal(want[want.isinf()], have[have.isinf()]):
            return Difference(name, math.inf, 0.0, f"{name} is not finite in other places")
        if not self.measures:
            return self._elementwise(name, want, have)
        return self._measured(name, expected, want, have)

    def _elementwise(self, name: str, want: Tensor, have: Tensor) -> Difference:
        finite = want.isfinite()
        error = (have - want).abs()[finite]
        allowed = (self.atol or 0.0) + (self.rtol or 0.0) * want.abs()[finite]
        if not error.numel():
            return Difference(name, 0.0, 0.0)
        ratio = torch.where(error == 0, 0.0, error / allowed)
        worst = int(ratio.argmax())
        return Difference(name, error[worst].item(), allowed[worst].item())

    def _measured(self, name: str, expected: Tensor, want: Tensor, have: Tensor) -> Difference:
        exact = _like(self.exact, name, expected)
        moved = _like(self.moved, name, expected)
        scale = _largest(want)
        if exact is None or moved is None:
            if not (expected.is_floating_point() or expected.is_complex()):
                return Difference(name, _largest(have - want), 0.0)
            return Difference(name, _largest(have - want), scale * _UNMEASURED.get(expected.dtype, _UNMEASURED_ELSE))
        step = rounding(expected.dtype) * scale
        budget = FACTOR * max(_largest(want - exact), _largest(moved - exact)) + step
        # What eager computes in a value that float64 does not have is no error of eager.
        return Difference(name, min(_largest(have - exact), _largest(have - want)), budget)


def rounding(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding step of `dtype`; 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _like(values: Mapping[str, Any] | None, name: str, expected: Tensor) -> Tensor | None:
    value = None if values is None else values.get(name)
    return _numbers(value) if isinstance(value, Tensor) and value.shape == expected.shape else None


def _numbers(tensor: Tensor) -> Tensor:
    """Return the values as one dense tensor of float64."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.to(torch.float64)


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 when there is none."""
    finite = tensor[tensor.isfinite()]  # the difference of two that are inf is NaN
    return finite.abs().max().item() if finite.numel() else 0.0


def _spelled(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:60] if value is not None else "None"
