"""Where gradients arrive: of a part with several outputs, not each input leads to each.

A compiled backward takes a gradient for each output and gives one to each input. A loss that leaves an output aside
gives it none; eager then gives none to what led to that output alone, and an optimizer leaves such a weight as it is.
With zeros instead it would go on with weight decay and momentum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .aliasing import writes
from .graphs import output, placeholders
from .quirks_nodes import needs_grad


class Reach:
    """Which inputs of a part get a gradient, by which of its `count` outputs have one.

    Not known, and then taken to be all, where the part is no captured graph, or changes a value in place: that
    depends on more than the graph's edges tell.
    """

    def __init__(self, part: object, count: int) -> None:
        sources = _sources(part) if isinstance(part, fx.GraphModule) and not writes(part) else []
        self._sources = sources if len(sources) == count else None
        self._found: dict[tuple[int, ...], frozenset[int]] = {}

    def without(self, absent: Sequence[int]) -> frozenset[int] | None:
        """Return the positions of the inputs at which a gradient arrives when these outputs have none; None for all."""
        if self._sources is None or not absent:
            return None
        key = tuple(absent)
        if key not in self._found:
            present = [inputs for k, inputs in enumerate(self._sources) if k not in key]
            self._found[key] = frozenset[int]().union(*present)
        return self._found[key]


def _sources(part: fx.GraphModule) -> list[frozenset[int]]:
    """Return, for each output, the positions of the inputs that its gradient may arrive at."""
    found = {node: frozenset([position]) for position, node in enumerate(placeholders(part))}
    for node in part.graph.nodes:
        if node not in found and node.op != "output" and ("example_value" not in node.meta or needs_grad(node)):
            found[node] = frozenset[int]().union(*(found.get(source, ()) for source in node.all_input_nodes))
    return [found.get(result, frozenset()) for result in pytree.tree_leaves(output(part).args[0])]


def zeros_like(outputs: Sequence[Any]) -> list[Callable[[], Tensor] | None]:
    """Return, for each output that is a tensor, what makes the zeros that autograd would for a missing gradient."""
    return [
        functools.partial(torch.zeros, o.shape, dtype=o.dtype, device=o.device) if isinstance(o, Tensor) else None
        for o in outputs
    ]
