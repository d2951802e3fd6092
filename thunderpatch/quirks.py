"""What thunder 0.2.x gets wrong goes elsewhere: finds it in a captured graph, and edits the graph so that it does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .quirks_conditions import lacks_gradient
from .quirks_functional import make_functional
from .quirks_known import EAGER, HOOK, INDUCTOR, INFERENCE, NO_GRADIENT, QUIRKS, SUBCLASS, THUNDER, TRANSFORM
from .quirks_mutation import Mutations, in_grad_mode, mutations
from .quirks_nodes import is_call, keep_from_thunder, needs_grad, nested, picks, spelled, thunder_takes
from .quirks_numbers import numbers_in_place_of_tensors
from .quirks_respelled import spell_out
from .quirks_unread import drop_unread


@dataclass(frozen=True)
class Route:
    """Where a node, or with ``node=""`` the whole graph, goes instead of thunder, and why."""

    quirk: str
    node: str
    target: str
    reason: str

    @property
    def whole_graph_eager(self) -> bool:
        """Whether the whole graph runs as captured."""
        return self.target == EAGER and not self.node


IN_PLACE = "in-place"
# What holds of a node that no quirk matches.
IN_THUNDER = Route("", "", THUNDER, "")


def reroute(gm: fx.GraphModule) -> list[Route]:
    """Decide where the parts of a captured graph go, and edit it so that thunder's splitter does so.

    Each node that must not run in thunder gets a stand-in target that the splitter takes for unknown. If the whole
    graph is to run as captured, that is the only route; the graph is then left as it was.
    """
    for graph in (gm, *nested(gm)):
        drop_unread(graph)
        numbers_in_place_of_tensors(graph)
    decisions = [_decide(graph) for graph in (gm, *nested(gm))]
    for _, found in decisions:
        if found.eager:
            reason = f"{found.eager} ({found.node}), {found.fault}"
            return [Route(IN_PLACE, "", EAGER, reason)]
    calls = [node for node in gm.graph.nodes if is_call(node) and not picks(node)]
    eager = [route for node in calls if (route := decisions[0][0].get(node, IN_THUNDER)).target == EAGER]
    if eager and len(eager) == len(calls):
        return [Route(eager[0].quirk, "", EAGER, "; ".join(dict.fromkeys(route.reason for route in eager)))]
    for routes, found in decisions:
        for node in found.functional:
            make_functional(node)
        for node, route in routes.items():
            if route.target == THUNDER:
                spell_out(node)
            else:
                keep_from_thunder(node, uncompiled=route.target == EAGER)
    return [route for routes, _ in decisions for route in routes.values() if route.target != THUNDER]


def _decide(gm: fx.GraphModule) -> tuple[dict[fx.Node, Route], Mutations]:
    routes: dict[fx.Node, Route] = {}
    calls = [node for node in gm.graph.nodes if is_call(node) and not picks(node)]
    # Cut between a wrapper and what it wraps, or where a mode is on, the parts would not do the same.
    whole = next((quirk for quirk in (INFERENCE, HOOK, SUBCLASS, TRANSFORM) if any(map(quirk.matches, calls))), None)
    for node in calls:
        if quirk := whole or next((quirk for quirk in QUIRKS if quirk.matches(node)), None):
            routes[node] = Route(quirk.name, node.name, quirk.target, quirk.reason)
    graded = in_grad_mode(list(gm.graph.nodes)) if any(map(needs_grad, calls)) else ()
    for node in calls:
        if node in graded and node not in routes and lacks_gradient(node):
            routes[node] = Route(NO_GRADIENT.name, node.name, NO_GRADIENT.target, NO_GRADIENT.reason)
    found = mutations(gm, lambda node: routes.get(node, IN_THUNDER).target == THUNDER and thunder_takes(node))
    for node in found.apart:
        reason = f"{spelled(node)} changes an input that is read under two names, or across two parts"
        if routes.get(node, IN_THUNDER).target != EAGER:
            routes[node] = Route(IN_PLACE, node.name, EAGER, reason)
    for node in found.outside:
        reason = f"{spelled(node)} works on a value that is changed in place and read under two names"
        if routes.get(node, IN_THUNDER).target == THUNDER and not picks(node):
            routes[node] = Route(IN_PLACE, node.name, INDUCTOR, reason)
    return routes, found
