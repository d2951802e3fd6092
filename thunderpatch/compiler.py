"""From a captured graph to something that runs: routing, thunder, and reuse of what was compiled before.

Dynamo calls `Compiler.backend` with each graph that it captures. A graph that does the same as an earlier one, under
the same options, is that earlier one: neither thunder nor inductor sees it again. Compiling itself waits for the
first call, when real inputs are there: a failure can then be answered with the graph as captured, on inputs,
buffers and random state that are untouched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn

from . import capture, graphs, quirks
from .capture import trail
from .checking import check
from .compat import backend_context, load_thunder
from .dispatch import CompileFailure, Partition, Snapshot
from .errors import CompileError
from .options import Options

log = logging.getLogger("thunderpatch")
_Error = TypeVar("_Error", bound=BaseException)

# One at a time: thunder keeps its state in a function's compile data, and Dynamo holds a lock of its own anyway.
_compiling = threading.RLock()


class Graph:
    """One distinct graph under one set of options: as captured, and compiled once it was called."""

    def __init__(self, gm: fx.GraphModule, options: Options, owner: str) -> None:
        self.gm, self.options, self.owner = gm, options, owner
        self.routes: list[quirks.Route] = []
        self.info: Any = None  # thunder's SubgraphInfo
        self.partitions: list[Partition] = []
        self.error: Exception | None = None  # why the graph runs as captured
        self.seconds = 0.0  # of the splitter, which compiles inductor's parts
        self.breaks: dict[tuple[str, str], None] = {}  # (source line, reason) of graph breaks that end the graph
        self.call: Callable[..., Any] = self._first_call
        self.settings = _settings()

    @property
    def eager(self) -> bool:
        """Whether the graph runs as captured, uncompiled: routed so, or after a failure."""
        return self.error is not None or any(route.target == "eager" for route in self.routes)

    def runner(self) -> Callable[..., Any]:
        """Return what Dynamo calls: the graph, and a note in the trail that it ran."""
        ran, this = trail, self

        def run(*inputs: Any) -> Any:
            ran.graphs.append(this)
            return this.call(*inputs)

        capture.runs_graphs(run)
        return run

    def _first_call(self, *inputs: Any) -> Any:
        with _compiling:
            if self.call != self._first_call:  # another thread was first
                return self.call(*inputs)
            call = self._compile(inputs)
            before = Snapshot(inputs, several=len(self.partitions) > 1)
            try:
                if self.options.check and not self.eager:
                    check(self.gm, call, inputs, self.owner)
                result = call(*inputs)
            except CompileFailure as failure:
                before.put_back()
                self._fail(failure.__cause__ or failure)
                call = self.gm.forward
                result = call(*inputs)
            self.call = self._fused() or call
            if not self.eager:
                log.info("%s: compiled its graph, %d partitions by thunder", self.owner, len(self.partitions))
            return result

    def _fused(self) -> Callable[..., Any] | None:
        """Return a function without the split graph around it, where that does nothing but call one partition."""
        if len(self.partitions) != 1 or self.eager:
            return None
        nodes = list(self.info.split_graph_module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        calls = [node for node in nodes if node.op == "call_module"]
        results = nodes[-1].args[0]
        if len(calls) != 1 or calls[0].kwargs or not all(arg in inputs for arg in calls[0].args):
            return None
        parts = [(operator.getitem, (calls[0], k)) for k in range(len(results))]
        if list(results) != [calls[0]] and [(node.target, node.args) for node in results] != parts:
            return None
        if len(nodes) > len(inputs) + 2 + (len(parts) if list(results) != [calls[0]] else 0):
            return None
        return self.partitions[0].fused([inputs.index(arg) for arg in calls[0].args], len(inputs), len(results))

    def _compile(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        began = time.perf_counter()
        self.error = None  # of an attempt before, which raised
        self.routes = quirks.reroute(self.gm)
        for route in self.routes:
            log.info("%s: %s goes to %s: %s", self.owner, route.node or "the graph", route.target, route.reason)
        if any(route.target == "eager" for route in self.routes):
            return self.gm.forward
        gradients = torch.is_grad_enabled()
        try:
            with backend_context(), _backward_too():
                call = self._split()
        except Exception as error:
            torch.set_grad_enabled(gradients)  # a compiler that fails may leave them switched off
            self._fail(error)
            return self.gm.forward
        finally:
            self.seconds += time.perf_counter() - began
        return call

    def _split(self) -> Callable[..., Any]:
        """Let thunder's splitter cut the graph and return a function that runs the parts."""
        thunder = load_thunder()
        from thunder.dynamo.splitter import _splitter
        from thunder.dynamo.utils import recompile_graph, remove_empty_autocast
        from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform

        # The splitter edits nodes; what was captured stays as it is, to fall back on and to differentiate twice.
        gm = graphs.copied(self.gm)
        remove_empty_autocast(gm)
        recompile_graph(gm)
        options = dict(self.options.thunder)
        options.setdefault("fusion_type", "dataflow")
        options.setdefault("thunderfx_disable_split_autograd", True)
        # Dynamo's guards hold for every call that gets here: thunder need not check tensors again.
        prune = ExtractionOnlyPrologueTransform(skip_check_on_input_tensors=True)
        options["transforms"] = [*(options.get("transforms") or ()), prune]
        inductor = functools.partial(torch._inductor.compile, options=dict(self.options.inductor) or None)
        jit = functools.partial(
            _jit, functools.partial(thunder.jit, **options), bool(self.options.thunder.get("transforms"))
        )
        split, self.info = _splitter(gm, jit, inductor, [], options)
        captured = self.info.original_split_graph_module.split_graph_module
        parts: dict[str, Any] = {}
        for name, child in split.named_children():
            if name.startswith("thunder_"):
                original = getattr(captured, name.replace("thunder_", "submod_"))
                self.partitions.append(Partition(child, original, self.owner, self.options))
                parts[name] = self.partitions[-1]
            else:
                parts[name] = child
        return _straight(split, parts)

    def _fail(self, error: BaseException) -> None:
        """Take note of a failure, or raise it, as `on_error` says."""
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


def without_frames(error: _Error) -> _Error:
    """Return an error that can be kept: the frames that it came through hold the model and its inputs."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None:
            link.__traceback__ = None
            links += [other for other in (link.__cause__, link.__context__) if other not in links]
    return error


class _Jitted(nn.Module):
    """What thunder made of a plain function, in the form in which the splitter takes it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self._lc_cd, self._lc_cs = function._lc_cd, function._lc_cs

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _jit(jit: Callable[..., Any], as_module: bool, part: fx.GraphModule, **options: Any) -> nn.Module:
    """Let thunder compile a partition, by its bare code where that says it all.

    thunder interprets what it is given line by line: a module's way to its forward costs it as much again as the code
    of a small graph. The caller's transforms may look for a module (`as_module`).
    """
    if as_module or any(node.op in ("get_attr", "call_module") for node in part.graph.nodes):
        return jit(part, **options)  # type: ignore[no-any-return]
    return _Jitted(jit(functools.partial(type(part).forward, None), **options))


class SymbolicGraph:
    """A graph with symbolic sizes: a table of static ones, each compiled at the first call with its sizes."""

    def __init__(self, gm: fx.GraphModule, symbols: tuple[int, ...], find: Callable[[fx.GraphModule], Graph]) -> None:
        self.gm, self.symbols, self._find = gm, symbols, find
        self.static: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def runner(self) -> Callable[..., Any]:
        table, symbols = self.static, self.symbols

        def run(*inputs: Any) -> Any:
            sizes = tuple([v.item() if isinstance(v := inputs[i], torch.Tensor) else v for i in symbols])
            call = table.get(sizes)
            if call is None:
                with _compiling:
                    graph = self._find(graphs.specialise(self.gm, inputs))
                call = table[sizes] = graph.runner()
            return call(*inputs)

        capture.runs_graphs(run)
        return run


class Compiler:
    """What one set of options compiles with. Graphs live as long as something that may call them does."""

    def __init__(self, options: Options, watch: capture.Watch, owner: Callable[[], str]) -> None:
        self.options = options
        self._owner = owner
        self._graphs: weakref.WeakValueDictionary[Any, Graph] = weakref.WeakValueDictionary()
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
        symbols = graphs.symbolic_inputs(gm)
        if symbols:
            return SymbolicGraph(gm, symbols, functools.partial(self.find, ended_by=ended_by)).runner()
        return self.find(gm, ended_by).runner()

    def find(self, gm: fx.GraphModule, ended_by: tuple[str, str] | None = None) -> Graph:
        """Return the graph that does what `gm` does, a new one only if there is none yet."""
        structure = graphs.structure(gm)
        key = None if structure is None else (structure, _settings())
        found = self._graphs.get(key) if key is not None else None
        if found is None:
            found = Graph(gm, self.options, self._owner())
            self.compiled += 1
            log.info("%s: captured a graph of %d nodes", found.owner, len(gm.graph.nodes))
            if key is not None:
                self._graphs[key] = found
        else:
            log.debug("%s: reuses a graph of %s", self._owner(), found.owner)
        if ended_by is not None:
            found.breaks[ended_by] = None
        return found


def _graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return the source line and the reason of the graph break at which Dynamo ended `gm`; None at a return."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = getattr(reason, "user_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "(unknown)"
    return where, next((line for line in str(reason.reason).splitlines() if line.strip()), "(no reason given)")


def _backward_too() -> contextlib.AbstractContextManager[Any]:
    """Let inductor compile the backward of its parts together with their forward.

    It would wait for the first backward, and a failure there is too late to be answered. The setting is private to
    the length of a compilation; torch 2.9 has none.
    """
    config = torch._functorch.config
    if not hasattr(config, "force_non_lazy_backward_lowering"):
        return contextlib.nullcontext()
    return config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def _straight(split: fx.GraphModule, parts: dict[str, Any]) -> Callable[..., Any]:
    """Return the split graph as a plain function, its parts reached without a module's __getattr__ and __call__."""
    shell = _Shell()
    for node in split.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target).split(".")[0]
            setattr(shell, name, getattr(split, name))
    for name, part in parts.items():
        setattr(shell, name, part)
    forward = type(split).forward
    return functools.partial(forward, shell)


class _Shell:
    """Holds the parts of a split graph under the names that its code uses."""


def _settings() -> tuple[Any, ...]:
    """The global state that a compiled graph depends on and that its nodes do not show."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        torch.is_autocast_cache_enabled(),
    )
