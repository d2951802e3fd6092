"""Symbolic sizes and numbers in a captured graph: which there are, and how it becomes static or is rid of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .graphs import copied, example, output, placeholders

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbolic_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that are symbolic numbers, or tensors that stand for one."""
    nodes = enumerate(placeholders(gm))
    return tuple(i for i, node in nodes if isinstance(example(node), SYMBOLS) or _wraps_a_number(node))


def _wraps_a_number(node: fx.Node) -> bool:
    """Whether all that the graph does with an input is `.item()`: so Dynamo hands over floats that vary.

    Of a numpy number Dynamo takes the item by a function of its own.
    """
    value = example(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        return False
    return bool(node.users) and all(
        user.target == "item" or getattr(user.target, "__name__", "") == "wrapped_item" for user in node.users
    )


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a number, or what Dynamo makes of a number to return it."""
    return node.target is torch.scalar_tensor or isinstance(example(node), (*SYMBOLS, bool, int, float))


def specialise(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of `gm` in which symbolic sizes have the values that `inputs` give them.

    The copy takes the same inputs. Its example values are computed anew with fake tensors, since thunder's
    splitter and its partitions read shapes and `requires_grad` there.
    """
    values: dict[fx.Node, Any] = {}
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {}  # node of the old graph -> number

    def resolve(node: fx.Node) -> Any:
        return known[node] if node in known else values[node]

    taken = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = next(taken)
            values[node] = graph.node_copy(node)
            if isinstance(example(node), SYMBOLS):
                known[node] = value
            elif _wraps_a_number(node):
                known.update((user, value.item()) for user in node.users)
            continue
        if node in known:
            continue
        # A number made of numbers. What makes a tensor of them (arange, rand) stays an operation.
        number = isinstance(example(node), (*SYMBOLS, bool, int, float))
        if node.op == "call_function" and number and all(n in known for n in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
            known[node] = node.target(*args, **kwargs)
            continue
        values[node] = graph.node_copy(node, resolve)
    static = fx.GraphModule(gm, graph, gm.__class__.__name__)
    propagate(static, inputs)
    return static


def numbered(gm: fx.GraphModule) -> tuple[fx.GraphModule, frozenset[int]]:
    """Return a copy that takes as numbers what `gm` takes as tensors only to call `.item()`, and those positions."""
    copy = copied(gm)
    found = frozenset(i for i, node in enumerate(placeholders(copy)) if _wraps_a_number(node))
    for i in found:
        node = placeholders(copy)[i]
        for user in list(node.users):
            user.replace_all_uses_with(node)
            copy.graph.erase_node(user)
    copy.recompile()
    return copy, found


def without_numbers(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None, list[int]]:
    """Return a copy without the outputs that are numbers made of numbers, a graph of those alone, and their places.

    thunder cannot return a number, and inductor returns one that is no integer as it was when it compiled.
    """
    numbers = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            taken = numbers.node_copy(node)
            if isinstance(example(node), SYMBOLS) or _wraps_a_number(node):
                known[node] = taken
        elif _is_number(node) and node.op.startswith("call_") and all(n in known for n in node.all_input_nodes):
            known[node] = numbers.node_copy(node, known.__getitem__)
    outputs: Any = output(gm).args[0]
    places = [place for place, node in enumerate(outputs) if node in known]
    if not places:
        return gm, None, []
    numbers.output(tuple(known[outputs[place]] for place in places))
    numbers.eliminate_dead_code()
    rest = copied(gm)
    result: Any = output(rest)
    result.args = (tuple(node for place, node in enumerate(result.args[0]) if place not in places),)
    rest.graph.eliminate_dead_code()
    rest.recompile()
    return rest, fx.GraphModule(gm, numbers, "Numbers"), places


def propagate(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Set each node's example value, by running the graph on fakes of `inputs`; nothing real is computed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [_fake(value, mode) for value in inputs]

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = result
            return result

    grad = torch.is_grad_enabled()
    try:
        with mode:
            Recorder(gm).run(*fakes)
    finally:
        torch.set_grad_enabled(grad)


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    # Detached first: an example value must know whether a gradient is wanted, not the history behind it.
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    if not value.requires_grad:
        return fake
    with torch.enable_grad():
        leaf = fake.requires_grad_()
        return leaf if value.is_leaf else leaf.clone()
