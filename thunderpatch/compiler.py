"""The backend: what Dynamo calls with each graph that it captures.

A graph that does the same as an earlier one, under the same options, is that earlier one: neither thunder nor
inductor sees it again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx

from . import capture, checkpointed, graphs, symbols
from .checkpointed import CheckpointedGraph
from .graph import Graph, settings
from .options import Options
from .sizes import SymbolicGraph

log = logging.getLogger("thunderpatch")
_Kind = TypeVar("_Kind", Graph, SymbolicGraph)


class Compiler:
    """What one set of options compiles with. Graphs live as long as something that may call them does."""

    def __init__(self, options: Options, watch: capture.Watch, owner: Callable[[], str | None]) -> None:
        self.options = options
        self._asked_by = owner
        self._graphs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.compiled = 0  # graphs compiled, not found again
        # Dynamo keeps every backend for good: what it gets is a function that knows this object weakly.
        this = weakref.ref(self)

        def thunderpatch(gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
            compiler = this()
            assert compiler is not None
            return compiler.backend(gm)

        self.optimizer = capture.Optimizer(thunderpatch, watch, dynamic=options.dynamic, fullgraph=options.fullgraph)

    def backend(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that runs `gm`; Dynamo's guards hold whenever it is called."""
        ended_by = _graph_break(gm)
        # A copy holds the nodes alone, not what Dynamo hangs on the graph and the inputs of this call.
        gm = graphs.copied(gm)
        if not symbols.symbolic_inputs(gm):
            return self.find(gm, ended_by).runner()

        def find(static: fx.GraphModule) -> Graph:
            return self.find(static, ended_by)

        return self._known(gm, lambda: SymbolicGraph(gm, find, self.options, self._owner())).runner()

    def find(self, gm: fx.GraphModule, ended_by: tuple[str, str] | None = None) -> Graph:
        """Return the graph that does what `gm` does, a new one only if there is none yet."""
        found = self._known(gm, lambda: self._new(gm))
        if ended_by is not None:
            found.breaks[ended_by] = None
        return found

    def _owner(self) -> str:
        return self._asked_by() or "(unknown)"

    def _new(self, gm: fx.GraphModule) -> Graph:
        graph = self._made(gm)
        self.compiled += 1
        log.info("%s: captured a graph of %d nodes", graph.owner, len(gm.graph.nodes))
        return graph

    def _made(self, gm: fx.GraphModule) -> Graph:
        found = checkpointed.inside(gm)
        if found is None:
            return Graph(gm, self.options, self._owner(), self._asked_by)
        graph = CheckpointedGraph(found[0], self.options, self._owner(), self._asked_by)
        graph.preserve_rng_state = found[1]
        return graph

    def _known(self, gm: fx.GraphModule, make: Callable[[], _Kind]) -> _Kind:
        structure = graphs.structure(gm)
        key = None if structure is None else (structure, settings())
        found: _Kind | None = self._graphs.get(key) if key is not None else None
        if found is None:
            found = make()
            if key is not None:
                self._graphs[key] = found
        else:
            log.debug("%s: reuses a graph of %s", self._owner(), found.owner)
        return found


def _graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return the source line and the reason of the graph break at which Dynamo ended `gm`; None at a return."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = getattr(reason, "user_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "(unknown)"
    return where, next((line for line in str(reason.reason).splitlines() if line.strip()), "(no reason given)")
