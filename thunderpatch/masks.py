"""Dropout with the masks that thunder draws, so that a module with dropout can be compared.

From one random state torch and thunder draw different masks: torch's kernel draws from a Bernoulli
distribution, thunder compares uniform numbers of the input's dtype with the probability. Here eager does what
thunder does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Masks(TorchFunctionMode):
    """While active, `torch.nn.functional.dropout` draws its masks as thunder does.

    Given the `drawn` of an earlier run, it uses those masks again, for inputs of any dtype.
    """

    def __init__(self, again: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self._again = None if again is None else iter(again)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p in (0, 1) or inplace:
            return torch.nn.functional.dropout(input, p, training, inplace)
        if self._again is None:
            uniform = torch.empty(input.shape, dtype=input.dtype, device=input.device).uniform_(0.0, 1.0)
            self.drawn.append(uniform < 1 - p)
        else:
            self.drawn.append(next(self._again))
        return input * self.drawn[-1] * (1 / (1 - p))


def again(masks: Masks | None) -> Masks | None:
    """Return what uses the masks of an earlier run again."""
    return None if masks is None else Masks(masks.drawn)
