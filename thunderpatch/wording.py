"""Says in words which operations of a model's graphs do not run in thunder, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx

from .graph import Graph
from .quirks_nodes import Opaque, nested, spelled

WHOLE = "the graph"


def routes(graphs: Iterable[Graph]) -> list[str]:
    """Return what is sent elsewhere because thunder would get it wrong: "cat (2 times) to eager: why"."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for graph in graphs:
        nodes = _nodes(graph.gm)
        for route in graph.routes:
            stand_ins = [node.target for node in nodes.get(route.node, ()) if isinstance(node.target, Opaque)]
            op = stand_ins[0].instead_of if stand_ins else route.node or WHOLE
            found.setdefault((route.target, route.reason), Counter())[op] += 1
    return [
        f"{', '.join(_counted(op, count) for op, count in ops.items())} to {target}: {reason}"
        for (target, reason), ops in found.items()
    ]


def splits(graphs: Iterable[Graph]) -> list[str]:
    """Return what thunder leaves to inductor of its own accord: "addmm (4 times): why"."""
    found: Counter[tuple[str, str]] = Counter()
    for graph in graphs:
        nodes = _nodes(graph.gm)
        for reason in graph.info.split_reasons if graph.info is not None else ():
            named = re.search(r"node with name: (\S+) and target: ", reason.info)
            same = [node for node in nodes.get(named[1], ()) if str(node.target) in reason.info] if named else []
            if not same:
                found["", f"{reason.info}{f' ({reason.exception})' if reason.exception else ''}"] += 1
            elif not isinstance(same[0].target, Opaque):  # that thunder does not know our stand-in is told as a route
                found[spelled(same[0]), _why(reason, same[0])] += 1
    return [f"{_counted(op, count)}: {why}" if op else why for (op, why), count in found.items()]


def _why(reason: Any, node: fx.Node) -> str:
    if reason.exception:
        return f"thunder fails on it: {next(iter(reason.exception.splitlines()), '')}"
    # What thunder says without the node's name and without its target, whose repr may hold an address.
    return str(reason.info.partition(f"target: {node.target}")[2]).strip(" .")


def _nodes(gm: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Return the nodes by name; a nested graph may use a name again."""
    found: dict[str, list[fx.Node]] = {}
    for graph in (gm, *nested(gm)):
        for node in graph.graph.nodes:
            found.setdefault(node.name, []).append(node)
    return found


def _counted(op: str, count: int) -> str:
    return op if count == 1 or op == WHOLE else f"{op} ({count} times)"
