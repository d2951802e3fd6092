"""FX graphs as Dynamo captures them: when two are the same, and how one with symbolic sizes becomes static."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that can be edited, and that holds nothing of the call in which `gm` was captured.

    So are the graphs inside it, which checkpointing and other higher-order operations run.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph, "Captured")
    for name, inner in gm.named_children():
        if isinstance(inner, fx.GraphModule) and isinstance(getattr(copy, name, None), fx.GraphModule):
            body = copied(inner)
            body.meta.update(inner.meta)  # how a checkpointed region is to be recomputed
            setattr(copy, name, body)
    for node in placeholders(copy):
        node.meta.pop("grapharg", None)
    return copy


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


def structure(gm: fx.GraphModule) -> tuple[Any, ...] | None:
    """Return a hashable value that is equal for graphs that do the same to inputs of the same kinds.

    Names play no part, so that the layers of a model that differ in nothing but their place give one value.
    None when the graph holds a tensor or an object of its own, which no other graph can share.
    """
    index: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}
    parts: list[Any] = []
    try:
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                target: Any = _attribute(gm, node)
            else:
                target = () if node.op == "placeholder" else (node.target,)
            arguments = _frozen((node.args, node.kwargs), index)
            value = _renamed(describe(example(node)), symbols) if node.op == "placeholder" else None
            parts.append((node.op, target, arguments, value))
            index[node] = len(index)
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key


def _renamed(value: Any, symbols: dict[str, str]) -> Any:
    """Return a description with its symbols numbered as they come: their names differ from trace to trace."""
    if isinstance(value, tuple):
        return tuple(_renamed(item, symbols) for item in value)
    if isinstance(value, str):
        return re.sub(r"\b[a-z]+\d+\b", lambda m: symbols.setdefault(m[0], f"symbol {len(symbols)}"), value)
    return value


def _attribute(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    value = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    inner = structure(value) if isinstance(value, fx.GraphModule) else None
    if inner is None:
        raise TypeError(f"{node.target} is part of this graph alone")
    return inner


def _frozen(value: Any, index: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", index[value])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(item, index) for item in value))
    if isinstance(value, dict):
        return ("dict", *((name, _frozen(item, index)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", _frozen((value.start, value.stop, value.step), index))
    if isinstance(value, (float, complex)):
        return (type(value).__name__, repr(value))  # 0.0 == -0.0 and nan != nan, and 1 == 1.0 == True
    return (type(value).__name__, value)


def describe(value: Any) -> tuple[Any, ...]:
    """Return what a compiled graph may rely on of an input: all that Dynamo guards on and thunder reads."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return (
            type(value).__name__,
            _sizes(value.shape),
            _sizes(value.stride()) if strided else (),
            str(value.storage_offset()) if strided else "",
            value.dtype,
            value.device,
            value.layout,
            value.requires_grad,
            value.is_leaf,
            value.is_inference(),
            value.is_conj(),
            value.is_neg(),
            *_wrapped(value),
        )
    return (type(value).__name__, str(value))


def _wrapped(value: torch.Tensor) -> tuple[Any, ...]:
    """Describe what a wrapper subclass holds: of a DTensor its local part, its mesh and placements."""
    if not is_traceable_wrapper_subclass(value):
        return ()
    names, context = value.__tensor_flatten__()
    return (repr(context), *(describe(getattr(value, name)) for name in names))


def _sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size if type(size) is int else str(size) for size in sizes)


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


def operations(gm: fx.GraphModule) -> int:
    """Return how many operations a graph has."""
    return sum(node.op.startswith("call_") for node in gm.graph.nodes)


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
