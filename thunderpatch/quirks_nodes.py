"""Reads nodes of a Dynamo graph: which op in any of its spellings, its arguments, whether a gradient flows."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

CALLS = ("call_function", "call_method")
# The operator module's names of what the program spells as an assignment: iadd for x += y.
AUGMENTED_NAMES = frozenset(name for name in dir(operator) if name.startswith("__i")) - {
    "__index__",
    "__inv__",
    "__invert__",
}


def is_call(node: fx.Node) -> bool:
    """Whether the node computes something, rather than being an input, a constant or the output."""
    return node.op in CALLS


def spelled(node: fx.Node) -> str:
    """Return the op's name as the program spells it: ``mul_`` for ``x.mul_(2)``, ``iadd`` for ``x += 1``."""
    if node.op == "call_method":
        return str(node.target)
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::")[-1])
    return str(getattr(target, "__name__", type(target).__name__))


def op_name(node: fx.Node) -> str:
    """Return one name for all spellings of an op: function, method, operator and in-place form."""
    name = spelled(node)
    if getattr(node.target, "__module__", "") == "_operator":
        name = name.strip("_")
        return name[1:] if f"__{name}__" in AUGMENTED_NAMES else name
    return name.strip("_").removesuffix("_")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument however it was passed; position 0 is the tensor that a method belongs to."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if len(node.args) > position else default


def value(node: Any) -> Any:
    """Return the fake value of a node, of what holds a constant the constant, of anything else itself."""
    if not isinstance(node, fx.Node):
        return node
    if "example_value" in node.meta or node.op != "get_attr":
        return node.meta.get("example_value")
    return functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module)


def tensors(tree: Any) -> list[Tensor]:
    """List the fake tensors among nodes, however nested."""
    return [leaf for leaf in pytree.tree_leaves(fx.map_arg(tree, value)) if isinstance(leaf, Tensor)]


def inputs(node: fx.Node) -> list[Tensor]:
    """List the tensors that a node reads."""
    return tensors((list(node.args), dict(node.kwargs)))


def outputs(node: fx.Node) -> list[Tensor]:
    """List the tensors that a node returns."""
    return tensors(node)


def needs_grad(node: fx.Node) -> bool:
    """Whether a gradient flows through the node. What Dynamo recorded knows of grad mode and of integers."""
    return any(tensor.requires_grad for tensor in outputs(node))


def thunder_takes(node: fx.Node) -> bool:
    """Whether thunder's splitter would give the node to thunder."""
    from thunder.dynamo.utils import is_node_supported_by_thunder

    return not is_call(node) or bool(is_node_supported_by_thunder(node, {})[0])


def picks(node: fx.Node) -> bool:
    """Whether the node takes one of several results of another; the splitter keeps it with that one."""
    return node.target is operator.getitem and not isinstance(value(node.args[0]), Tensor)


def nested(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the graphs that higher-order ops of ``gm`` run, such as the body of a checkpointed region."""
    for node in gm.graph.nodes:
        body = value(node) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield body


class Opaque:
    """Calls an op under a name that thunder's splitter does not know, so that it goes to inductor.

    With ``uncompiled``, the part that it is in runs as captured.
    """

    def __init__(self, target: Callable[..., Any] | str, uncompiled: bool) -> None:
        self.target, self.uncompiled = target, uncompiled
        self.call = _method(target) if isinstance(target, str) else target
        name = target if isinstance(target, str) else str(getattr(target, "__name__", type(target).__name__))
        self.instead_of = name
        # The graph's code spells the target by these.
        self.__name__ = f"outside_thunder_{name}"
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


@functools.cache
def opaque(target: Callable[..., Any] | str, uncompiled: bool) -> Opaque:
    """Return the one stand-in for a target; equal graphs stay equal graphs."""
    return Opaque(target, uncompiled)


def _method(name: str) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, name)(*args, **kwargs)

    return call


def keep_from_thunder(node: fx.Node, *, uncompiled: bool) -> None:
    """Edit the node so that thunder's splitter gives it to inductor; it computes what it did before."""
    if not isinstance(node.target, Opaque):
        node.target = opaque(node.target, uncompiled)
        node.op = "call_function"


def runs_as_captured(gm: fx.GraphModule) -> bool:
    """Whether a part holds an operation that neither thunder nor inductor gets right."""
    nodes = [node for graph in (gm, *nested(gm)) for node in graph.graph.nodes]
    return any(isinstance(node.target, Opaque) and node.target.uncompiled for node in nodes)


def has_parameter(target: Any, name: str) -> bool:
    """Whether a Python function has a parameter of that name."""
    try:
        return name in _parameters(target)
    except (TypeError, ValueError):
        return False


@functools.cache
def _parameters(target: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(target).parameters)


def bound(node: fx.Node, name: str) -> Any:
    """Return the argument that a Python function's parameter ``name`` gets, or None."""
    if not has_parameter(node.target, name):
        return None
    return argument(node, position(node, name), name)


def position(node: fx.Node, name: str) -> int:
    """Return where a Python function takes the parameter ``name``."""
    return _parameters(node.target).index(name)
