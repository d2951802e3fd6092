"""Graphs with symbolic sizes: static ones for the first sizes, and one for any size after those.

thunder compiles for sizes that are known. A table of static graphs serves a model whose batches have a few sizes; a
model that decodes meets a new length with every token. After some of them (`static_sizes`) the rest share one graph,
which inductor compiles with its sizes left open. `dynamic=False` keeps each size to itself, in thunder.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import capture, graphs, splitting, symbols
from .calls import Call
from .graph import AsCaptured, Graph, compiling, log, unhooked
from .inductor import InductorPart
from .lanes import fresh
from .options import Options
from .quirks import Route
from .quirks_known import EAGER, INDUCTOR
from .recomputation import Region

MOST_SIZES, FEWEST_SIZES, _OPERATIONS = 8, 3, 200


def static_sizes(gm: fx.GraphModule) -> int:
    """Return for how many sizes a graph is compiled before one for any size is made.

    One for any size costs inductor about what 200 operations in all cost thunder (4 to 8 s on one core, torch
    2.13.0); at most 8 sizes, which is where Dynamo itself would give up, and at least 3, since a data set has a
    last batch.
    """
    return min(MOST_SIZES, max(FEWEST_SIZES, _OPERATIONS // max(1, graphs.operations(gm))))


class SymbolicGraph:
    """A graph with symbolic sizes, as captured, and the graphs that run instead of it."""

    def __init__(
        self, gm: fx.GraphModule, find: Callable[[fx.GraphModule], Graph], options: Options, owner: str
    ) -> None:
        self.gm, self._numbers, self._places = symbols.without_numbers(gm)
        self._find, self._options, self.owner = find, options, owner
        self._symbols = symbols.symbolic_inputs(gm)
        self._static: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._found: list[Graph] = []
        self._limit = static_sizes(gm)
        self._any: Callable[..., Any] | None = None
        self._must_be_static = options.dynamic is False

    def runner(self) -> Callable[..., Any]:
        """Return what Dynamo calls."""
        this, table, symbols = self, self._static, self._symbols

        def run(*inputs: Any) -> Any:
            sizes = tuple([v.item() if isinstance(v := inputs[i], torch.Tensor) else v for i in symbols])
            call = table.get(sizes) or this._call_for(sizes, inputs)
            return call(*inputs)

        capture.runs_graphs(run)
        return run if self._numbers is None else self._with_numbers(run, self._numbers.forward)

    def _with_numbers(self, run: Callable[..., Any], numbers: Callable[..., Any]) -> Callable[..., Any]:
        places = self._places

        def complete(*inputs: Any) -> Any:
            results = list(run(*inputs))
            for place, number in zip(places, numbers(*inputs), strict=True):
                results.insert(place, number)
            return tuple(results)

        capture.runs_graphs(complete)
        return complete

    def _call_for(self, sizes: tuple[Any, ...], inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._any is not None:
            return self._any
        with compiling, unhooked():
            if any(isinstance(value, torch.Tensor) and value.is_nested for value in inputs):
                why = Route("nested tensor", "", EAGER, "neither thunder nor a part of a graph in inductor takes one")
                self._any = self._as_captured([why])
                return self._any
            if len(self._static) >= self._limit and not self._must_be_static:
                self._any = self._for_any(inputs)
                self._must_be_static = self._any is None
                return self._any or self._call_for(sizes, inputs)
            if sizes not in self._static:
                graph = self._find(symbols.specialise(self.gm, inputs))
                self._found.append(graph)
                self._static[sizes] = graph.runner()
            return self._static[sizes]

    def _for_any(self, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        routes = [route for known in self._found for route in known.routes]
        # Something writes to its inputs, or is wrong in inductor too: so it is with any sizes.
        if whole := [route for route in routes if route.target == EAGER]:
            return self._as_captured([Route(why.quirk, "", EAGER, f"for any size: {why.reason}") for why in whole])
        graph = AnySizes(self.gm, self._options, self.owner, inputs, self._limit)
        graph.breaks = dict(self._found[0].breaks)
        try:
            graph.prove(inputs)
        except Exception as error:  # then each size is compiled by itself, as before
            log.info("%s: no graph for any size, since inductor raised %s: %s", self.owner, type(error).__name__, error)
            return None
        log.info("%s: compiled a graph for any size, after %d sizes", self.owner, self._limit)
        return graph.runner()

    def _as_captured(self, routes: list[Route]) -> Callable[..., Any]:
        graph = AsCaptured(self.gm, self._options, self.owner, list(dict.fromkeys(routes)))
        graph.breaks = dict(self._found[0].breaks) if self._found else {}
        return graph.runner()


class AnySizes(Graph):
    """A graph for all sizes, compiled by inductor."""

    def __init__(self, gm: fx.GraphModule, options: Options, owner: str, inputs: Sequence[Any], limit: int) -> None:
        super().__init__(gm, options, owner)
        self._sample = symbols.specialise(gm, inputs)
        reason = f"it met more than {limit} sizes, and thunder would compile for each (dynamic=False: it does)"
        self.routes = [Route("sizes", "the graph", INDUCTOR, reason)]
        region = Region.of(gm.forward, owner, options)
        self._compiled = InductorPart(_compiled(gm, options, self.seconds), self._sample, region)

    @property
    def sample(self) -> fx.GraphModule:
        return self._sample

    @property
    def parts(self) -> list[tuple[str, int]]:
        return [("inductor", graphs.operations(self._sample))]

    def prove(self, inputs: Sequence[Any]) -> None:
        """Compile for any sizes, in a run on copies of the inputs; nothing else is changed by it."""
        began = time.perf_counter()
        with torch.random.fork_rng(), splitting.backward_too():
            self._compiled.compiled(*Call.of(inputs, {}).fresh().args)
        # What is not inductor's is Dynamo's, which traces the graph once more.
        self.seconds["dynamo"] += time.perf_counter() - began - self.seconds["inductor"]

    def _compile(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return self._compiled


def _compiled(gm: fx.GraphModule, options: Options, seconds: defaultdict[str, float]) -> Callable[..., Any]:
    """Return `gm` as a function that is compiled at its first call and takes any sizes after that.

    It is traced by Dynamo once more, now with all sizes left open, so that what inductor finds out about them
    becomes guards.
    """
    numbered, numbers = symbols.numbered(gm)

    def inductor(gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        return splitting.inductor_compile(gm, inputs, dict(options.inductor) or None, seconds)

    def forward(*inputs: Any) -> Any:
        return numbered(*inputs)

    optimizer = capture.Optimizer(inductor, capture.Watch(), dynamic=True, fullgraph=True)
    compiled = optimizer.compile(fresh(forward))
    if not numbers:
        return compiled  # type: ignore[no-any-return]  # Dynamo's own wrapper has no types

    def call(*inputs: Any) -> Any:
        return compiled(*(value.item() if i in numbers else value for i, value in enumerate(inputs)))

    return call
