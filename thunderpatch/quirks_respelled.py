"""Ops in other words: what thunder gets right, gradient included, where it gets the op itself wrong.

Each function here takes an op's arguments and computes the same. In a gradient, no exponential overflows and NaN stays
NaN, as in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .quirks_nodes import op_name, tensors, value


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.where(input <= 0, 0.0, input)  # thunder's has > 0, which NaN is not


def _sigmoid(input: Tensor) -> Tensor:
    z = torch.exp(torch.where(input > 0, -input, input))
    return torch.where(input > 0, 1.0, z) / (z + 1.0)


def _where(input: Tensor, condition: Tensor, other: Tensor | float) -> Tensor:
    return torch.where(condition, input, other)


def _mish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.tanh(F.softplus(input))


def _exponential(input: Tensor, positive: float, negative: float, inner: float) -> Tensor:
    below = torch.expm1(torch.where(input > 0, 0.0, input) * inner)
    return torch.where(input > 0, input * positive, below * negative)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _exponential(input, 1.0, alpha, 1.0)


def _celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _exponential(input, 1.0, alpha, 1.0 / alpha)


def _selu(input: Tensor, inplace: bool = False) -> Tensor:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _exponential(input, scale, alpha * scale, 1.0)


WORDS: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "sigmoid": _sigmoid,
    "expit": _sigmoid,
    "special_expit": _sigmoid,
    "mish": _mish,
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "where": _where,
}
# Rounded once at the end, as eager's one kernel does; relu and where round nothing.
NARROW = (torch.bfloat16, torch.float16)


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Appends to a graph nodes that know their fake values, which the splitter and thunder read."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        given, named = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        target: Any = node.target
        call = getattr(given[0], target) if node.op == "call_method" else target
        node.meta["example_value"] = call(*(given[1:] if node.op == "call_method" else given), **named)
        return node


def spell_out(node: fx.Node) -> None:
    """Put what computes the same in the place of a node."""
    words, tracer = WORDS[op_name(node)], _Tracer(node.graph)
    dtype = tensors(node)[0].dtype
    narrow = dtype in NARROW and words not in (_relu, _where)

    def proxy(given: fx.Node) -> Any:
        return fx.Proxy(given, tracer)

    args, kwargs = fx.map_arg((node.args, node.kwargs), proxy)
    mode = getattr(tensors(node)[0], "fake_mode", None) or contextlib.nullcontext()
    with node.graph.inserting_before(node), torch.enable_grad(), mode:
        if narrow:
            args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: a.float() if isinstance(a, fx.Proxy) else a)
        result: Any = words(*args, **kwargs)
        result = result.to(dtype) if narrow else result
    node.replace_all_uses_with(result.node)
    node.graph.erase_node(node)
