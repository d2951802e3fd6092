"""What a graph that works in place computes and nobody reads: thunder fails where such a thing is changed in place."""

from __future__ import annotations

import re

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .quirks_mutation import mutated, storages
from .quirks_nodes import is_call, spelled, value

# What does more than its name says: it draws random numbers, after which the next ones are others, or keeps statistics.
MORE = re.compile(
    "rand|drop|normal|uniform|bernoulli|poisson|cauchy|exponential|geometric|binomial|multinomial|rrelu|attention"
    "|batch_norm|instance_norm|embedding|quant"
)


def drop_unread(gm: fx.GraphModule) -> None:
    """Erase from a graph, if it works in place, what has no effect on its results, its inputs or random numbers."""
    nodes = list(gm.graph.nodes)
    written = storages([value for node in nodes for value in mutated(node)])
    seen = storages([node for node in nodes if not is_call(node) and node.op != "output"])
    for node in reversed(nodes):
        changed, read = storages(mutated(node)), storages(node.all_input_nodes)
        effect = changed & seen if changed else not (read & written and _computes(node))
        if is_call(node) and not node.users and not effect and not MORE.search(spelled(node)):
            gm.graph.erase_node(node)
        else:
            seen |= read


def _computes(node: fx.Node) -> bool:
    """Whether all that a node does is to return tensors, as far as that is known."""
    known = node.op == "call_method" or type(node.target).__name__ in ("builtin_function_or_method", "function")
    leaves = pytree.tree_leaves(value(node))
    return known and bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves) and not mutated(node)
