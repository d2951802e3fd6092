"""Inputs of a graph that share memory: where the graph writes to one, compilers go wrong in silence.

thunder takes tensors of one storage for the same tensor in other shapes, whatever their strides and offsets: of the
two halves of a buffer it makes one. inductor compiles for such sharing as it was shown. Dynamo does not guard on it.
A graph that writes to nothing is right all the same. So is one that writes to memory of its own, once thunder does not
see that others share theirs (`given_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .graphs import example, placeholders
from .quirks_mutation import mutated, storages
from .quirks_nodes import nested

REASON = "two of its inputs share memory and it works in place, which thunder and inductor do not compile for"


def writes(gm: fx.GraphModule) -> bool:
    """Whether an operation of the graph changes a tensor in place."""
    return any(mutated(node) for graph in (gm, *nested(gm)) for node in graph.graph.nodes)


def share_memory(inputs: Iterable[Any]) -> bool:
    """Whether two of the tensors live in one storage, which says nothing of whether they overlap there."""
    seen = set()
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata
            if storage in seen:
                return True
            seen.add(storage)
    return False


def captured_as_shared(gm: fx.GraphModule) -> bool:
    """Whether two inputs shared memory when the graph was captured, as its example values have it."""
    return share_memory(example(node) for node in placeholders(gm))


def written_inputs(gm: fx.GraphModule) -> list[int]:
    """List the positions of the inputs whose memory a graph may write to: all of them, where a graph inside writes."""
    inputs = placeholders(gm)
    if any(map(writes, nested(gm))):
        return list(range(len(inputs)))
    written = set().union(*(storages(mutated(node)) for node in gm.graph.nodes))
    return [i for i, node in enumerate(inputs) if example(node) is None or storages(node) & written]


def given_apart(find: Callable[..., Any], args: Sequence[Any], written: Sequence[int]) -> Any:
    """Call thunder's `find` (`get_computation_and_inputs`) for its code so that it takes no argument for another.

    `written` are the positions of those that the code writes to. If one of them shares its memory with an argument
    that is not the same in other sizes, as thunder takes it to be, NotImplementedError is raised.
    """
    pairs = [(arg, args[j]) for i, arg in enumerate(args) for j in written if i != j and share_memory((arg, args[j]))]
    if not all(_same_elements(*pair) for pair in pairs):
        raise NotImplementedError("a value that is changed in place shares its memory with another part of it")
    seen = {id(arg) for pair in pairs for arg in pair}
    # thunder asks a plain tensor alone where its memory is; what it makes of a parameter is the same code.
    stand_ins = [
        torch.nn.Parameter(arg.detach(), requires_grad=arg.requires_grad)
        if type(arg) is torch.Tensor and id(arg) not in seen
        else arg
        for arg in args
    ]
    meant = {id(stand_in): arg for stand_in, arg in zip(stand_ins, args, strict=True)}
    entry, *found = find(*stand_ins)
    return entry, *(tuple(meant.get(id(value), value) for value in values) for values in found)


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (a.storage_offset(), a.numel(), a.dtype) == (b.storage_offset(), b.numel(), b.dtype)
    return alike and a.is_contiguous() and b.is_contiguous()
