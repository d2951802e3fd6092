"""At which stage of compiling a wrong value enters: each is left out in turn, from the last to the first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .graph import Graph

CAPTURE = "Dynamo's capture"
INDUCTOR = "inductor"
TRACE = "thunder's trace"
EXECUTORS = "the executors chosen"


def find_stage(graphs: Iterable[Graph], agrees: Callable[[], bool]) -> str:
    """Return the first stage after which `agrees()`, which runs the graphs and compares, is False.

    The stages: the captured graphs run eager, only inductor's parts compiled, thunder's parts run by torch's
    executor alone, everything as it is. The graphs are afterwards as before.
    """
    graphs = list(graphs)
    partitions = [partition for graph in graphs if _by_inductor(graph) for partition in graph.partitions]
    stages: list[tuple[str, contextlib.AbstractContextManager[None]]] = [
        (CAPTURE, _instead("call", ((graph, graph.gm.forward) for graph in graphs))),
        (INDUCTOR, _instead("_call", ((partition, partition.region.original) for partition in partitions))),
        (TRACE, _instead("call", ((graph, _by_torch_alone(graph)) for graph in graphs))),
    ]
    if not any(_by_inductor(graph) for graph in graphs):
        del stages[1]
    for stage, context in stages:
        with context:
            if not agrees():
                return stage
    return EXECUTORS


def _by_inductor(graph: Graph) -> bool:
    """Whether a part of the graph is inductor's."""
    return any(compiler == "inductor" for compiler, _ in graph.parts)


def _by_torch_alone(graph: Graph) -> Callable[..., Any]:
    """Return a function that compiles the graph anew without any executor but torch's own."""
    options = dataclasses.replace(graph.options, thunder={**graph.options.thunder, "executors": ()})
    if not graph.partitions:  # thunder has no part of it
        return graph.call
    twin = Graph(graph.gm, options, graph.owner)
    return lambda *inputs: twin.call(*inputs)


@contextlib.contextmanager
def _instead(name: str, values: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    before = []
    try:
        for owner, value in values:
            before.append((owner, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, value in before:
            setattr(owner, name, value)
