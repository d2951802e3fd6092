"""FX graphs as Dynamo captures them, and when two are the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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


def output(gm: fx.GraphModule) -> fx.Node:
    node: fx.Node = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return node


def operations(gm: fx.GraphModule) -> int:
    """Return how many operations a graph has."""
    return sum(node.op.startswith("call_") for node in gm.graph.nodes)


def grad_mode_after(gm: fx.GraphModule) -> bool | None:
    """Return the grad mode that a graph leaves behind; None where it leaves that alone."""
    switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return bool(switches[-1].args[0]) if switches else None
