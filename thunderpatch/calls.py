"""The arguments of a call, kept so that the call can be made again and again from the same start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .copying import Storages, move, rebuild


@dataclass(frozen=True)
class Inputs:
    """One set of arguments to call with.

    `given` are the tensors as handed over, `leaves` the tensors at which their gradients arrive. A tensor
    that requires no gradient is its own leaf.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, copied: detached, with `requires_grad`, aliasing, strides and devices kept.

    `fresh()` makes a set to call with, and leaves what is here untouched.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inner: frozenset[int] = frozenset()  # ids of the tensors that were results of other modules, not leaves
    grad_mode: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Copy the arguments of a call that is about to happen, and the modes that are on."""
        storages, inner = Storages(), set()

        def copy(tensor: Tensor) -> Tensor:
            clone = storages.clone(tensor).requires_grad_(tensor.requires_grad)
            if tensor.requires_grad and not tensor.is_leaf:
                inner.add(id(clone))
            return clone

        copied, named = rebuild((tuple(args), dict(kwargs)), copy)
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in on)
        return cls(copied, named, frozenset(inner), torch.is_grad_enabled(), autocast)

    def fresh(self, cast: torch.dtype | None = None, moved_by: float = 0.0) -> Inputs:
        """Return arguments to call with once, in floating point of dtype `cast` where that is given.

        What was no leaf is none again, so that the module may write to it. `moved_by` is a relative size by
        which each number is moved at random.
        """
        storages, given, leaves = Storages(cast), list[Tensor](), list[Tensor]()

        def make(tensor: Tensor) -> Tensor:
            copy = storages.clone(tensor)
            if moved_by:
                move(copy, moved_by)
            if id(tensor) in self.inner:
                leaves.append(copy.clone().requires_grad_())
                copy = handed_over(leaves[-1], copy)
            else:
                leaves.append(copy.requires_grad_(tensor.requires_grad))
            given.append(copy)
            return copy

        args, kwargs = rebuild((self.args, self.kwargs), make)
        return Inputs(args, kwargs, given, leaves)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Set the grad mode and autocast that were on in the call."""
        with torch.set_grad_enabled(self.grad_mode), contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, boxed: list[Tensor]) -> Tensor:
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def handed_over(leaf: Tensor, copy: Tensor) -> Tensor:
    """Give `copy` the history of a value computed from `leaf`; its memory stays its own."""
    with torch.enable_grad():
        result: Tensor = _HandOver.apply(leaf, [copy])  # type: ignore[no-untyped-call]  # torch has no types here
        return result
