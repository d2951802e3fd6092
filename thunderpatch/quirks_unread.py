"""What a graph that works in place computes and nobody reads: thunder fails where such a thing is changed in place."""

from __future__ import annotations

import re

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .quirks_mutation import mutated, storages
from .quirks_nodes import is_call, spelled, value

# Without them the random numbers that are drawn next would be others.
RANDOM = re.compile(
    "rand|drop|normal|uniform|bernoulli|poisson|cauchy|exponential|geometric|multinomial|rrelu|attention"
)


def drop_unread(gm: fx.GraphModule) -> None:
    """Erase from a graph, if it works in place, what has no effect on its results, its inputs or random numbers."""
    nodes = list(gm.graph.nodes)
    if not any(map(mutated, nodes)):
        return
    seen = storages([node for node in nodes if not is_call(node) and node.op != "output"])
    for node in reversed(nodes):
        changed = storages(mutated(node))
        effect = changed & seen if changed else not _computes(node)
        if is_call(node) and not node.users and not effect and not RANDOM.search(spelled(node)):
            gm.graph.erase_node(node)
        else:
            seen |= storages(node.all_input_nodes)


def _computes(node: fx.Node) -> bool:
    """Whether all that a node does is to return tensors, as far as that is known."""
    known = node.op == "call_method" or type(node.target).__name__ in ("builtin_function_or_method", "function")
    leaves = pytree.tree_leaves(value(node))
    return known and bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves) and not mutated(node)
