"""Turns an in-place op on a value that the graph made itself into the op that returns a new value.

thunder writes such a change into the memory of the old value, which it may have kept for the backward: the gradient
of ``abs_`` is then that of the result. Out of place, the same op is right, in thunder and across partitions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .quirks_nodes import bound, position, spelled, value

# Out of place these do something else, or what they return has another memory on purpose.
DIFFERENT = {"bernoulli_", "resize_", "resize_as_", "requires_grad_", "set_", "data_", "sparse_resize_"}


@dataclass(frozen=True)
class Form:
    """How a node is called out of place."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def has_functional_form(node: fx.Node) -> bool:
    """Whether there is an out-of-place form of an in-place node that has the same type and shape."""
    form = _form(node)
    if form is None:
        return False
    call: Callable[..., Any] = getattr(Tensor, form.target) if form.op == "call_method" else form.target
    try:
        result = call(*fx.map_arg(form.args, value), **fx.map_arg(form.kwargs, value))
    except Exception:
        return False  # there is no such op for these arguments
    before = value(node)
    # In place, the type of the changed tensor wins; out of place, the wider one.
    same = isinstance(result, Tensor) and isinstance(before, Tensor) and result.dtype == before.dtype
    return same and result.shape == before.shape


def _form(node: fx.Node) -> Form | None:
    name = spelled(node)
    if node.kwargs.get("out") is not None or name in DIFFERENT:
        return None
    if node.op == "call_method":
        plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
        method = plain if plain != name and callable(getattr(Tensor, plain, None)) else None
        return None if method is None else Form("call_method", method, node.args, node.kwargs)
    if bound(node, "inplace") is True:
        args, kwargs = list(node.args), dict(node.kwargs)
        if "inplace" in kwargs:
            kwargs["inplace"] = False
        else:
            args[position(node, "inplace")] = False
        return Form(node.op, node.target, tuple(args), kwargs)
    target = _function(name, node.target)
    return None if target is None else Form(node.op, target, node.args, node.kwargs)


def _function(name: str, target: Any) -> Any:
    if getattr(operator, name, None) is target:
        return getattr(operator, name[1:], None) if name.startswith("i") else None
    for place in (torch, F):
        if getattr(place, name, None) is target:
            return getattr(place, name.removesuffix("_"), None) if name.endswith("_") else None
    return None


def make_functional(node: fx.Node) -> None:
    """Give the node its out-of-place form; whatever reads the changed value afterwards reads the node."""
    changed = node.args[0] if node.args else next(iter(node.kwargs.values()))
    form = _form(node)  # of what the node reads now: a change before this one may have been made a new value
    assert isinstance(changed, fx.Node) and form is not None
    node.op, node.target, node.args, node.kwargs = form.op, form.target, form.args, form.kwargs
    changed.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)
