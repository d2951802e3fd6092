"""Runs one case in eager and patched, from the same inputs and state, and says what differs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .entries import Case, tensors


@dataclass
class Result:
    """What a call gave: outputs, gradients per input and parameter, inputs and buffers afterwards."""

    outputs: list[Any]
    gradients: list[Tensor | None] | str
    inputs: list[Tensor]
    buffers: list[Tensor]
    identities: list[set[int]]  # per output, the inputs that it is; then those whose memory it shares


def _cotangent(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    real = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return (real + 0.25j if tensor.is_complex() else real).to(tensor.dtype)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False  # sparse and the like have no storage


def run(case: Case, call: Any, module: nn.Module, cast: torch.dtype | None = None) -> Result:
    """Call ``call`` with fresh copies of the case's arguments and collect everything comparable."""

    def fresh(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone() if cast is None else _cast(tensor.detach(), cast).clone()
        if tensor.layout is torch.strided and copied.stride() != tensor.stride():
            base = torch.empty_strided(tensor.size(), tensor.stride(), dtype=copied.dtype)
            copied = base.copy_(copied)
        return copied.requires_grad_(tensor.requires_grad and case.grad)

    calls = pytree.tree_map_only(Tensor, fresh, [(c.args, c.kwargs) for c in case.calls])
    leaves = [t for t in tensors(calls) if t.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad] if case.grad else []
    if case.non_leaf:
        calls = [((pytree.tree_map_only(Tensor, torch.clone, a[0]), *a[1:]), k) for a, k in calls]
    given = tensors(calls)
    with torch.set_grad_enabled(case.grad):
        if hasattr(module, "op") or hasattr(module, "method"):
            outputs = pytree.tree_leaves(call(calls))
        else:
            outputs = pytree.tree_leaves(call(*calls[0][0], **calls[0][1]))
    returned = [o for o in outputs if isinstance(o, Tensor)]
    identities = [{i for i, g in enumerate(given) if o is g} for o in returned]
    identities += [{i for i, g in enumerate(given) if _same_storage(o, g)} for o in returned]
    gradients: Any = []
    # What was mutated is a result as well: its history must be right.
    roots = [t for t in [*returned, *(given if case.non_leaf else [])] if t.requires_grad]
    if roots and (leaves or parameters):
        try:
            gradients = list(
                torch.autograd.grad(roots, [*leaves, *parameters], [_cotangent(r) for r in roots], allow_unused=True)
            )
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            AssertionError,
        ) as error:
            gradients = f"{type(error).__name__}: {str(error)[:300]}"
    buffers = [b.detach().clone() for b in module.buffers()]
    return Result(outputs, gradients, [g.detach() for g in given], buffers, identities)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def copied(module: nn.Module, cast: torch.dtype | None = None) -> nn.Module:
    """A copy of the module that shares no state with it; with ``cast``, in that dtype."""
    fresh = copy.deepcopy(module)
    if cast is not None:
        fresh._apply(lambda t: _cast(t, cast))
    return fresh
