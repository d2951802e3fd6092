"""Regions that checkpoint themselves: `torch.utils.checkpoint` inside their forward, around all that they do.

Dynamo captures that as one operation with a graph inside, which thunder takes as a whole or not at all. Here the
inside is compiled as any graph is, and torch's own checkpoint stands around the compiled code at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from . import capture, graphs
from .capture import trail
from .graph import Graph

_OPERATION: Any = torch.ops.higher_order.tag_activation_checkpoint
# What does not change the recomputation: of the reentrant way, what it does is in how eager goes about it.
_PLAIN = {"use_reentrant", "preserve_rng_state"}


class CheckpointedGraph(Graph):
    """The graph inside a checkpoint, compiled, and run so that its backward computes it again."""

    preserve_rng_state = True

    def runner(self) -> Callable[..., Any]:
        """Return what Dynamo calls: the graph under a checkpoint, and a note in the trail that it ran."""
        ran, this, preserve = trail, self, self.preserve_rng_state

        def body(*inputs: Any) -> Any:
            return this.call(*inputs)

        def run(*inputs: Any) -> Any:
            ran.graphs.append(this)
            if not torch.is_grad_enabled():
                return this.call(*inputs)
            return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=preserve)

        capture.runs_graphs(run)
        return run


def inside(gm: fx.GraphModule) -> tuple[fx.GraphModule, bool] | None:
    """Return what a graph that is one checkpoint computes inside, and whether it preserves the state of the RNG.

    None for any other graph, and where a rule of the caller's says what is recomputed (`context_fn`).
    """
    calls = gm.graph.find_nodes(op="call_function", target=_OPERATION)
    if len(calls) != 1 or not calls[0].kwargs.keys() <= _PLAIN:
        return None
    (call,) = calls
    picked = [node for node in gm.graph.nodes if node.op.startswith("call_") and node is not call]
    if not all(node.target is operator.getitem and node.args[0] is call for node in picked):
        return None
    results: Any = graphs.output(gm).args[0]
    body = getattr(gm, str(call.args[0].target))
    if body.meta.get("_checkpoint_context_fn") or not all(node in picked for node in results):
        return None
    graph = fx.Graph()
    given = {node: graph.node_copy(node) for node in graphs.placeholders(gm)}
    inputs = dict(zip(graphs.placeholders(body), fx.map_arg(call.args[1:], given.__getitem__), strict=True))
    outputs: Any = graph.graph_copy(body.graph, inputs)
    graph.output(tuple(outputs[node.args[1]] for node in results))
    return fx.GraphModule(body, graph, "Captured"), bool(call.kwargs.get("preserve_rng_state", True))
