"""Finds in-place changes that thunder, or the seam between two partitions, would get wrong.

thunder makes a graph functional and writes the changes back, outside autograd: into an input at the end, into a
value of the graph's own at once, where the backward may still want the old one. Right is a buffer without a
gradient. Wrong, always in silence, is the gradient of a changed input, of an op that needs what it has changed, of a
value that one partition makes and another changes, and of one that is read under two names after the change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .quirks_functional import has_functional_form
from .quirks_nodes import AUGMENTED_NAMES, bound, inputs, is_call, needs_grad, op_name, outputs, spelled, tensors


@dataclass(frozen=True)
class Mutations:
    """What in-place changes call for: the whole graph eager, and why, or something of these nodes."""

    eager: str = ""
    node: str = ""
    fault: str = "and thunder gets its gradient wrong"
    outside: tuple[fx.Node, ...] = ()  # belong together, in inductor
    apart: tuple[fx.Node, ...] = ()  # change an input, as captured: AOT autograd does not take each view of one
    functional: tuple[fx.Node, ...] = ()


def mutated(node: fx.Node) -> list[Any]:
    """List the arguments that a node changes in place."""
    if not is_call(node):
        return []
    out = node.kwargs.get("out")
    targets = [] if out is None else list(out) if isinstance(out, (tuple, list)) else [out]
    name, first = spelled(node), node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                targets.append(given)
    elif _assigns(node, name) or bound(node, "inplace") is True:
        targets.append(first)
    return targets


def _assigns(node: fx.Node, name: str) -> bool:
    """Whether the name is that of an in-place op: ``mul_``, ``iadd``, ``__imul__``, ``setitem``."""
    plain = name.strip("_")
    if name in ("setitem", "__setitem__"):
        return True
    if getattr(node.target, "__module__", "") == "_operator" or name.startswith("__"):
        return f"__{plain}__" in AUGMENTED_NAMES
    return name.endswith("_")


def storages(tree: Any) -> set[StorageWeakRef]:
    """Return the memories of the tensors among example values, of nodes or as they are."""
    found = set()
    for tensor in tensors(tree):
        while is_functorch_wrapped_tensor(tensor):  # inside vmap and grad, whose tensors have no storage of their own
            tensor = get_unwrapped(tensor)
        if tensor.layout is torch.strided:
            found.add(StorageWeakRef(tensor.untyped_storage()))
    return found


def mutations(gm: fx.GraphModule, stays: Callable[[fx.Node], bool]) -> Mutations:
    """Say what the in-place changes of a graph call for.

    ``stays`` tells whether thunder would run a node.
    """
    nodes = list(gm.graph.nodes)
    changes = [(node, storage) for node in nodes for storage in storages(mutated(node))]
    if not changes:
        return Mutations()
    for node, _ in changes:
        if spelled(node) in RESHAPING:
            return Mutations(f"{spelled(node)} gives a tensor another shape in place", node.name, "unseen by thunder")
        if any(map(_overlaps_itself, tensors(mutated(node)))):
            return Mutations(f"{spelled(node)} writes to what overlaps itself", node.name, "which no compiler takes")
    given = storages([node for node in nodes if not is_call(node) and node.op != "output"])
    outside: set[fx.Node] = set()
    apart: dict[fx.Node, None] = {}
    inside: list[fx.Node] = []
    functional: dict[fx.Node, None] = {}
    graded_nodes = in_grad_mode(nodes)
    # Asking thunder is slow, and a BatchNorm counts in each layer.
    stays, seam = functools.cache(stays), functools.cache(lambda: _seam(nodes, stays))
    for node, storage in changes:
        names = [other for other in nodes if other.op != "output" and storage in storages(other)]
        graded = any(t.requires_grad for t in [*inputs(node), *tensors(names)])
        if storage in given and graded:
            return Mutations(f"{spelled(node)} changes an input of the graph in place", node.name)
        if graded and node not in graded_nodes:
            return Mutations(f"{spelled(node)} changes what has a gradient, in place and under no_grad", node.name)
        if graded or storage not in given:
            if not _read_under_other_names(node, names, nodes) and has_functional_form(node):
                functional[node] = None
            else:
                outside.update(_region(node, names, nodes, lambda other: other not in outside and stays(other)))
        elif _last_of_a_view(node, names, nodes) or _cast_is_read(node, names, nodes) or seam():
            apart[node] = None
        else:
            inside.append(node)
    # What went outside cuts the graph where there may have been no seam before.
    cut = {*outside, *apart}
    if cut and inside and _seam(nodes, lambda node: node not in cut and stays(node)):
        apart.update(dict.fromkeys(inside))
    return Mutations(
        outside=tuple(node for node in nodes if node in outside), apart=tuple(apart), functional=tuple(functional)
    )


# What is in no op's schema: that the tensor itself is another one afterwards.
RESHAPING = {
    *("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "set_"),
    *("resize_", "resize_as_", "resize_as_sparse_", "rename_"),
}


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded or unfolded one do."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 < tensor.numel()


def in_grad_mode(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that run while gradients are recorded."""
    enabled, found = torch.is_grad_enabled(), set()
    for node in nodes:
        if is_call(node) and spelled(node) == "_set_grad_enabled":
            enabled = bool(node.args[0])
        elif enabled and is_call(node):
            found.add(node)
    return found


# Changes whose gradient needs nothing of the value that they change.
FORGETFUL = ("setitem", "__setitem__", "copy_", "zero_", "fill_")


def _read_under_other_names(change: fx.Node, names: list[fx.Node], nodes: list[fx.Node]) -> bool:
    """Whether a view or a base of what was changed, made before, is read after the change."""
    target, end = change.args[0] if change.args else None, nodes.index(change)
    others = [name for name in names if name is not target and nodes.index(name) < end]
    return any(nodes.index(user) > end for name in others for user in name.users)


# What returns its very input where there is nothing to convert, and thunder does not know for a view.
CASTS = {"float", "double", "half", "bfloat16", "type", "type_as", "int", "long", "short", "byte", "char", "bool"}


def _cast_is_read(change: fx.Node, names: list[fx.Node], nodes: list[fx.Node]) -> bool:
    """Whether what is changed is read after that, and is or has been converted to the type that it has."""
    end = nodes.index(change)
    cast = any(is_call(name) and op_name(name) in CASTS and nodes.index(name) < end for name in names)
    return cast and any(nodes.index(user) > end for name in names for user in name.users)


def _last_of_a_view(change: fx.Node, names: list[fx.Node], nodes: list[fx.Node]) -> bool:
    """Whether a view is changed in a memory that no operation reads after that: thunder then fails."""
    end = nodes.index(change)
    views = [name for name in names if nodes.index(name) < end]
    return len(views) > 1 and not any(
        is_call(user) and nodes.index(user) > end for name in names for user in name.users
    )


def _region(
    change: fx.Node, names: list[fx.Node], nodes: list[fx.Node], stays: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Return the nodes that must be in one inductor partition for this change; none if thunder has it right."""
    between = nodes[nodes.index(names[0]) : nodes.index(change) + 1]
    # Eager's result has a gradient even where all of it comes from what has none; thunder's has not.
    keeps_history = not needs_grad(change) or any(t.requires_grad for t in tensors(change.args[1:]))
    forgets = spelled(change) in FORGETFUL and keeps_history
    if forgets and not _read_under_other_names(change, names, nodes) and all(map(stays, between)):
        return []
    return [node for node in between if is_call(node)]


def _seam(nodes: list[fx.Node], stays: Callable[[fx.Node], bool]) -> bool:
    """Whether a partition may be given one value under two names, which with a change in it loses gradients."""
    calls = [node for node in nodes if is_call(node)]
    # Of a value that only its view reads, no partition needs both.
    shared = [(node, source) for node in calls for source in node.all_input_nodes if len(source.users) > 1]
    aliased = any(storages(node) & storages(source) for node, source in shared if outputs(node))
    return aliased and not all(map(stays, calls))
