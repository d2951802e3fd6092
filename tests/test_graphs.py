"""When two captured graphs are the same, and how one with symbolic sizes becomes static."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import fx, nn

from thunderpatch import graphs


def captured(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """Return the graph that Dynamo makes of a call, before anything else has seen it."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (gm,) = found
    return gm


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


def test_symbolic_inputs_are_found_and_static_graphs_have_none() -> None:
    gm = captured(lambda x: x * x.shape[0], torch.ones(5, 3), dynamic=True)
    assert len(graphs.symbolic_inputs(gm)) == 2
    assert graphs.symbolic_inputs(captured(lambda x: x * x.shape[0], torch.ones(5, 3))) == ()


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 3), (9, 9)])
def test_a_specialised_graph_is_static_and_right(rows: int, columns: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[1], -1) * (x.shape[0] + x.shape[1] // 2) + torch.arange(x.shape[0])[0]

    gm = graphs.copied(captured(function, torch.ones(6, 5), dynamic=True))
    x = torch.randn(rows, columns)
    order = [graphs.example(node) for node in graphs.placeholders(gm)]
    sizes = iter([rows, columns])
    inputs = [x if isinstance(value, torch.Tensor) else next(sizes) for value in order]
    static = graphs.specialise(gm, inputs)
    result = static(*inputs)
    torch.testing.assert_close(result[0] if isinstance(result, tuple) else result, function(x))
    values = [graphs.example(node) for node in static.graph.nodes if node.op == "call_function"]
    shapes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    assert all(type(size) is int for size in shapes) and shapes
    assert graphs.structure(static) is not None


def test_specialising_keeps_what_wants_a_gradient() -> None:
    tensors = torch.ones(4, 3), torch.ones(3, requires_grad=True)
    gm = graphs.copied(captured(lambda x, w: (x * w).sum(0), *tensors, dynamic=True))
    left, sizes = iter(tensors), iter(tensors[0].shape)
    given = [
        next(left) if isinstance(graphs.example(node), torch.Tensor) else next(sizes)
        for node in graphs.placeholders(gm)
    ]
    static = graphs.specialise(gm, given)
    made = [graphs.example(node) for node in static.graph.nodes if node.op in ("call_function", "call_method")]
    assert len(made) == 2 and all(value.requires_grad for value in made)


def test_tensors_made_of_sizes_stay_operations() -> None:
    gm = graphs.copied(captured(lambda x: x + torch.rand(x.shape[0], 1), torch.ones(4, 3), dynamic=True))
    order = [isinstance(graphs.example(node), torch.Tensor) for node in graphs.placeholders(gm)]
    sizes = iter([2, 3])
    static = graphs.specialise(gm, [torch.ones(2, 3) if tensor else next(sizes) for tensor in order])
    assert torch.rand in [node.target for node in static.graph.nodes]


def test_propagation_leaves_grad_mode_and_inputs_as_they_were() -> None:
    gm = graphs.copied(captured(lambda x: x.sin().add_(1), X))
    x = torch.zeros(2, 3)
    with torch.no_grad():
        graphs.propagate(gm, [x])
        assert not torch.is_grad_enabled()
    assert x.abs().sum() == 0
