"""Inputs of a graph that share memory: where the graph writes to one, compilers go wrong in silence.

thunder takes tensors of one storage for the same tensor in other shapes, whatever their strides and offsets: of the
two halves of a buffer it makes one. inductor compiles for such sharing as it was shown. Dynamo does not guard on it.
A graph that writes to nothing is right all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .graphs import example, placeholders
from .quirks_mutation import mutated
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
