"""When two captured graphs are the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from dynamo import captured
from torch import fx, nn

from thunderpatch import graphs


def scaled(factor: Any, cls: type[nn.Module] = nn.Tanh) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(3, 3), cls()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.linear(x)) * factor

    return Layer()


X = torch.ones(2, 3)


def key(function: Callable[..., Any], *args: Any) -> Any:
    return graphs.structure(captured(function, *args))


def test_layers_that_differ_in_nothing_but_place_and_weights_are_the_same() -> None:
    stack = nn.ModuleList([scaled(2), scaled(2)])
    assert key(lambda x: stack[0](x), X) == key(lambda y: stack[1](y), X)


def test_the_weights_of_a_list_by_number_are_the_same_graph() -> None:
    cache = [torch.ones(3), torch.zeros(3)]
    assert key(lambda x: x + cache[0], X) == key(lambda x: x + cache[1], X)


@pytest.mark.parametrize(("one", "other"), [(2, 3), (1, 1.0), (0.0, -0.0), (1, True)])
def test_another_constant_is_another_graph(one: Any, other: Any) -> None:
    assert key(scaled(one), X) != key(scaled(other), X)


def test_nan_constants_are_equal_to_themselves() -> None:
    assert key(lambda x: x * float("nan"), X) == key(lambda x: x * float("nan"), X)


def test_another_operation_is_another_graph() -> None:
    assert key(scaled(2, nn.Tanh), X) != key(scaled(2, nn.Sigmoid), X)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 3),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(3, 2).t(),
        torch.ones(2, 6)[:, ::2],
    ],
    ids=["shape", "dtype", "requires_grad", "transposed", "strided"],
)
def test_another_kind_of_input_is_another_graph(other: torch.Tensor) -> None:
    assert key(torch.sin, X) != key(torch.sin, other)


def test_an_input_that_has_a_history_differs_from_a_leaf() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    assert key(torch.sin, leaf) != key(torch.sin, leaf * 1)


def test_swapped_arguments_are_another_graph() -> None:
    one, two = X, X + 1  # two tensors: Dynamo would make one input of the same one twice
    assert key(lambda a, b: torch.where(a > 0, a, b), one, two) != key(lambda a, b: torch.where(a > 0, b, a), one, two)


def test_a_graph_with_a_tensor_of_its_own_is_shared_with_none() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = X
    graph.output(graph.call_function(torch.add, (node, graph.get_attr("constant"))))
    root = nn.Module()
    root.constant = torch.ones(3)
    assert graphs.structure(fx.GraphModule(root, graph)) is None


def test_a_graph_inside_a_graph_counts() -> None:
    def checkpointed(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.utils.checkpoint.checkpoint(lambda x: x.sin() * factor, x, use_reentrant=False)

    leaf = torch.ones(2, 3, requires_grad=True)
    assert key(checkpointed(2), leaf) == key(checkpointed(2), leaf) is not None
    assert key(checkpointed(2), leaf) != key(checkpointed(3), leaf)


def test_a_copy_does_the_same_and_holds_nothing_of_the_call() -> None:
    module = scaled(2)
    x = torch.ones(2, 3)
    gm = captured(module, x)
    copy = graphs.copied(gm)
    assert graphs.structure(copy) == graphs.structure(gm)
    assert [node.meta["example_value"].shape for node in graphs.placeholders(copy)] == [
        node.meta["example_value"].shape for node in graphs.placeholders(gm)
    ]
    refs = [weakref.ref(x), weakref.ref(module)]
    del gm, x, module
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
