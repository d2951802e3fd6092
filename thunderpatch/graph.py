"""One captured graph, from what Dynamo handed over to something that runs.

Compiling waits for the first call, when real inputs are there: a failure can then be answered with the graph as
captured, on inputs, buffers and random state that are untouched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from . import aliasing, capture, graphs, quirks, splitting, symbols
from .capture import trail
from .checking import check
from .compat import backend_context
from .dispatch import CompileFailure, Partition, RunFailure
from .errors import CompileError, interrupted
from .options import Options
from .quirks_known import EAGER
from .quirks_nodes import runs_as_captured
from .snapshot import Snapshot

log = logging.getLogger("thunderpatch")
_Error = TypeVar("_Error", bound=BaseException)

# One at a time: thunder keeps its state in a function's compile data, and Dynamo holds a lock of its own anyway.
compiling = threading.RLock()


class Graph:
    """One distinct graph under one set of options: as captured, and compiled once it was called.

    `owner` names the module that it was captured for. After a failure another module may be the next to try, which
    `asked_by` names.
    """

    def __init__(
        self, gm: fx.GraphModule, options: Options, owner: str, asked_by: Callable[[], str | None] = lambda: None
    ) -> None:
        self.gm, self.options, self.owner, self._asked_by = gm, options, owner, asked_by
        self.routes: list[quirks.Route] = []
        self.info: Any = None  # thunder's SubgraphInfo
        self.partitions: list[Partition] = []
        self.error: Exception | None = None  # why the graph runs as captured
        # Of compiling, by who took them. Whoever runs the graph first has waited for them, and takes them from here.
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.breaks: dict[tuple[str, str], None] = {}  # (source line, reason) of graph breaks that end the graph
        self.call: Callable[..., Any] = self._first_call
        self.settings = settings()
        self._apart: AsCaptured | None = None  # runs instead where inputs share memory

    @property
    def sample(self) -> fx.GraphModule:
        """The graph for one set of sizes, in a form that can be written down."""
        return self.gm

    @property
    def parts(self) -> list[tuple[str, int]]:
        """(what runs it, number of operations) of each part."""
        found = self.info.submodule_to_compiled_functions.items() if self.info is not None else ()
        return [(_kind(captured, compiled), graphs.operations(captured)) for captured, compiled in found]

    @property
    def eager(self) -> bool:
        """Whether the graph runs as captured, uncompiled: routed so, or after a failure."""
        return self.error is not None or any(route.whole_graph_eager for route in self.routes)

    def runner(self) -> Callable[..., Any]:
        """Return what Dynamo calls: the graph, and a note in the trail that it ran."""
        ran, this = trail, self

        def run(*inputs: Any) -> Any:
            ran.graphs.append(this)
            return this.call(*inputs)

        capture.runs_graphs(run)
        return run

    def _first_call(self, *inputs: Any) -> Any:
        with compiling:
            if self.call != self._first_call:  # another thread was first
                return self.call(*inputs)
            self.owner = self._asked_by() or self.owner
            if self._apart is None and aliasing.writes(self.gm):
                why = quirks.Route("shared memory", "", EAGER, aliasing.REASON)
                self._apart = AsCaptured(self.gm, self.options, self.owner, [why])
            if self._apart is not None and aliasing.share_memory(inputs):
                return self._instead(self._apart, inputs)
            with splitting.backward_too():  # the splitter leaves inductor's parts to their first call
                return self._compile_and_call(inputs)

    def _compile_and_call(self, inputs: tuple[Any, ...]) -> Any:
        with unhooked():
            call = self._compile(inputs)
        before = Snapshot(inputs, several=[kind for kind, _ in self.parts] != ["thunder"])
        try:
            if self.options.check and not self.eager:
                with unhooked():
                    check(self.gm, call, inputs, self.owner)
            result = call(*inputs)
        except CompileFailure as failure:
            result = self._uncompiled(failure, before, inputs)
            call = self.gm.forward
        finally:
            self.seconds["thunder"] += sum(partition.seconds for partition in self.partitions)
        self.call = self._fused() or self._unless_shared(call)
        if not self.eager:
            log.info("%s: compiled its graph, %d partitions by thunder", self.owner, len(self.partitions))
        return result

    def _uncompiled(self, failure: CompileFailure, before: Snapshot, inputs: tuple[Any, ...]) -> Any:
        """Run as captured what failed in its first run, if `on_error` says so."""
        before.put_back()
        if isinstance(failure, RunFailure):
            result = self.gm.forward(*inputs)  # an error of the program's own comes again, as eager raises it
            if self.options.on_error == "raise":
                before.put_back()
            self._fail(failure.__cause__ or failure)
            return result
        self._fail(failure.__cause__ or failure)
        return self.gm.forward(*inputs)

    def _unless_shared(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, which is not for inputs that share memory if the graph writes to any."""
        apart = self._apart
        if apart is None or self.eager:
            return call
        return lambda *inputs: self._instead(apart, inputs) if aliasing.share_memory(inputs) else call(*inputs)

    @staticmethod
    def _instead(other: Graph, inputs: tuple[Any, ...]) -> Any:
        trail.graphs[-1] = other
        return other.call(*inputs)

    def _fused(self) -> Callable[..., Any] | None:
        if len(self.partitions) != 1 or self.eager:
            return None
        return splitting.fused(self.info.split_graph_module, self.partitions[0])

    def _compile(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self.error = None  # of an attempt before, which raised
        if self._apart is not None and aliasing.captured_as_shared(self.gm):  # and is now called with others
            symbols.propagate(self.gm, inputs)
        self.routes = quirks.reroute(self.gm)
        for route in self.routes:
            log.info("%s: %s goes to %s: %s", self.owner, route.node or "the graph", route.target, route.reason)
        if self.eager:
            return self.gm.forward
        gradients = torch.is_grad_enabled()
        try:
            with backend_context():
                call, self.info, self.partitions = splitting.split(self.gm, self.options, self.owner, self.seconds)
        except Exception as error:
            self._fail(error)
            return self.gm.forward
        finally:
            torch.set_grad_enabled(gradients)  # tracing a part that switches them off leaves them so
        return call

    def _fail(self, error: BaseException) -> None:
        """Take note of a failure, or raise it, as `on_error` says."""
        if interrupted(error):
            raise KeyboardInterrupt from error
        if self.options.on_error == "raise":
            message = (
                f"{self.owner}: the region could not be compiled with options {self.options}: "
                f"{type(error).__name__}: {error}\n"
                "Leave the module out (exclude=), or let it run uncompiled (on_error='eager')."
            )
            self.error = CompileError(message)
            raise CompileError(message) from error
        assert isinstance(error, Exception)
        self.error = without_frames(error)
        log.info("%s: runs uncompiled after %s: %s", self.owner, type(error).__name__, error)


class AsCaptured(Graph):
    """A graph that runs as Dynamo captured it, in all calls that come to it."""

    def __init__(self, gm: fx.GraphModule, options: Options, owner: str, routes: list[quirks.Route]) -> None:
        super().__init__(gm, options, owner)
        self.routes = routes

    def _first_call(self, *inputs: Any) -> Any:
        return self.gm.forward(*inputs)


def _kind(captured: fx.GraphModule, compiled: Any) -> str:
    if compiled.compiler.name == "THUNDER":
        return "thunder"
    return "eager" if runs_as_captured(captured) else "inductor"


def unhooked() -> contextlib.AbstractContextManager[Any]:
    """Keep what compiling saves for a backward of its own from the hooks of the caller: checkpointing counts them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def without_frames(error: _Error) -> _Error:
    """Return an error that can be kept: the frames that it came through hold the model and its inputs."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None:
            link.__traceback__ = None
            links += [other for other in (link.__cause__, link.__context__) if other not in links]
    return error


def settings() -> tuple[Any, ...]:
    """Return the global state that a compiled graph depends on and that its nodes do not show.

    Inference mode and the default device are not among it: Dynamo switches the one off while it calls a backend, and
    what depends on the other names its device in the graph.
    """
    enabled = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        tuple(enabled.items()),
        torch.is_autocast_cache_enabled(),
    )
