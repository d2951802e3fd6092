"""What thunder 0.2.x gets wrong, how it is recognised in a captured graph, and where it goes instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from .quirks_mutation import mutations
from .quirks_nodes import inputs, is_call, keep_from_thunder, needs_grad, nested, outputs, spelled

INDUCTOR, EAGER = "inductor", "eager"


@dataclass(frozen=True)
class Route:
    """Where a node, or with ``node=""`` the whole graph, goes instead of thunder, and why."""

    quirk: str
    node: str
    target: str
    reason: str


@dataclass(frozen=True)
class Quirk:
    """One fault of thunder: ``matches`` recognises the nodes, ``evidence`` shows the fault in a line of code."""

    name: str
    evidence: str
    matches: Callable[[fx.Node], bool]
    reason: str
    target: str = INDUCTOR


def _complex_with_grad(node: fx.Node) -> bool:
    return needs_grad(node) and any(t.is_complex() for t in [*inputs(node), *outputs(node)])


QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "complex gradient",
        "x = torch.randn(3, dtype=torch.complex64, requires_grad=True); (x * x).abs().sum().backward()",
        _complex_with_grad,
        "thunder's gradients of complex numbers lack conjugation",
    ),
)
IN_PLACE = "in-place"


def reroute(gm: fx.GraphModule) -> list[Route]:
    """Decide where the parts of a captured graph go, and edit it so that thunder's splitter does so.

    Each node that must not run in thunder gets a stand-in target that the splitter gives to inductor. If a route
    has the target "eager", the whole graph is to run as captured; it is then left as it was.
    """
    routes = {id(graph): _decide(graph) for graph in (gm, *nested(gm))}
    decided = [route for pairs in routes.values() for route, _ in pairs]
    eager = [route for route in decided if route.target == EAGER]
    if eager:
        return eager[:1]
    for pairs in routes.values():
        for _, node in pairs:
            if node is not None:
                keep_from_thunder(node)
    return decided


def _decide(gm: fx.GraphModule) -> list[tuple[Route, fx.Node | None]]:
    routes: dict[fx.Node, Route] = {}
    for node in gm.graph.nodes:
        for quirk in QUIRKS if is_call(node) else ():
            if quirk.matches(node):
                routes[node] = Route(quirk.name, node.name, quirk.target, quirk.reason)
                break
    found = mutations(gm, lambda node: node not in routes and _thunder_takes(node))
    if found.eager:
        reason = f"{found.eager} ({found.node}), and thunder gets its gradient wrong"
        return [(Route(IN_PLACE, "", EAGER, reason), None)]
    for node in found.outside:
        reason = f"{spelled(node)} works on a value that is changed in place across a seam"
        routes.setdefault(node, Route(IN_PLACE, node.name, INDUCTOR, reason))
    return [(route, node) for node, route in routes.items()]


def _thunder_takes(node: fx.Node) -> bool:
    """Whether thunder's splitter would give the node to thunder."""
    from thunder.dynamo.utils import is_node_supported_by_thunder

    return not is_call(node) or bool(is_node_supported_by_thunder(node, {})[0])
