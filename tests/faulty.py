"""Modules to compile wrongly on purpose, and ways to do so, for the tests."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunderpatch import graphs
from thunderpatch.graph import Graph

OFF = 1e-2


class Marked(nn.Module):
    """The one that is compiled wrongly: its graph alone holds an `atan`. Two outputs, a buffer, a parameter."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.seen.add_(x.mean(0))
        hidden = self.linear(x)
        return hidden.tanh(), hidden.atan()


class Plain(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Model(nn.Module):
    """Three units, of which `middle` is the marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Plain(), Marked(), Plain()

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.middle(self.first(x))
        return self.last(one + two)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + OFF


def wrong_output(call: Callable[..., Any], inputs: Any) -> Any:
    one, two = call(*inputs)
    return one, two + OFF


def wrong_gradient(call: Callable[..., Any], inputs: Any) -> Any:
    one, two = call(*inputs)
    return one, _WrongGradient.apply(two)


def wrong_buffer(call: Callable[..., Any], inputs: Any) -> Any:
    result = call(*inputs)
    (buffer,) = (t for t in inputs if t.dim() == 1 and not isinstance(t, nn.Parameter))
    with torch.no_grad():
        buffer.add_(OFF)
    return result


FAULTS = {"output": wrong_output, "gradient": wrong_gradient, "buffer": wrong_buffer}


def marked(graph: Graph) -> bool:
    return any("atan" in str(node.target) for node in graph.gm.graph.nodes)


@contextlib.contextmanager
def compiled_wrongly(fault: str, calls: list[Any] | None = None) -> Iterator[None]:
    """Compile each marked graph so that it does what is asked and then something else.

    No graph is found again meanwhile, so that what is compiled here is used here and nowhere else.
    """
    gc.collect()  # modules of earlier tests, whose code a new one of the same kind would share
    compile_, tamper = Graph._compile, FAULTS[fault]

    def wrong(self: Graph, inputs: Any) -> Callable[..., Any]:
        call = compile_(self, inputs)
        if not marked(self):
            return call
        self.routes = []  # or the graph would be known to run as captured

        def tampered(*inputs: Any) -> Any:
            if calls is not None:
                calls.append(inputs)
            return tamper(call, inputs)

        return tampered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "structure", lambda gm: None)
        patch.setattr(Graph, "_compile", wrong)
        yield
