"""Symbolic sizes and numbers in a captured graph: how it becomes static, and is rid of the numbers that it returns."""

from __future__ import annotations

import pytest
import torch
from dynamo import captured

from thunderpatch import graphs, symbols


def test_symbolic_inputs_are_found_and_static_graphs_have_none() -> None:
    gm = captured(lambda x: x * x.shape[0], torch.ones(5, 3), dynamic=True)
    assert len(symbols.symbolic_inputs(gm)) == 2
    assert symbols.symbolic_inputs(captured(lambda x: x * x.shape[0], torch.ones(5, 3))) == ()


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (2, 3), (9, 9)])
def test_a_specialised_graph_is_static_and_right(rows: int, columns: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[1], -1) * (x.shape[0] + x.shape[1] // 2) + torch.arange(x.shape[0])[0]

    gm = graphs.copied(captured(function, torch.ones(6, 5), dynamic=True))
    x = torch.randn(rows, columns)
    order = [graphs.example(node) for node in graphs.placeholders(gm)]
    sizes = iter([rows, columns])
    inputs = [x if isinstance(value, torch.Tensor) else next(sizes) for value in order]
    static = symbols.specialise(gm, inputs)
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
    static = symbols.specialise(gm, given)
    made = [graphs.example(node) for node in static.graph.nodes if node.op in ("call_function", "call_method")]
    assert len(made) == 2 and all(value.requires_grad for value in made)


def test_tensors_made_of_sizes_stay_operations() -> None:
    gm = graphs.copied(captured(lambda x: x + torch.rand(x.shape[0], 1), torch.ones(4, 3), dynamic=True))
    order = [isinstance(graphs.example(node), torch.Tensor) for node in graphs.placeholders(gm)]
    sizes = iter([2, 3])
    static = symbols.specialise(gm, [torch.ones(2, 3) if tensor else next(sizes) for tensor in order])
    assert torch.rand in [node.target for node in static.graph.nodes]


def test_propagation_leaves_grad_mode_and_inputs_as_they_were() -> None:
    gm = graphs.copied(captured(lambda x: x.sin().add_(1), torch.ones(2, 3)))
    x = torch.zeros(2, 3)
    with torch.no_grad():
        symbols.propagate(gm, [x])
        assert not torch.is_grad_enabled()
    assert x.abs().sum() == 0


def test_numbers_made_of_numbers_are_returned_beside_the_graph() -> None:
    def function(x: torch.Tensor, scale: float) -> tuple[int, torch.Tensor, float, torch.Tensor]:
        return x.shape[0] * 2, x * scale, scale * 2, x.sum()

    gm = graphs.copied(captured(function, torch.ones(6, 5), 1.5, dynamic=True))
    rest, numbers, places = symbols.without_numbers(gm)
    assert numbers is not None
    inputs = [
        torch.tensor(2.5)
        if isinstance(value, torch.Tensor) and value.dim() == 0
        else torch.ones(3, 5)
        if isinstance(value, torch.Tensor)
        else 3
        for value in (graphs.example(node) for node in graphs.placeholders(gm))
    ]
    assert [float(number) for number in numbers(*inputs)] == [6, 5.0]
    assert [type(value) for value in rest(*inputs)] == [torch.Tensor, torch.Tensor]
    assert len(rest(*inputs)) + len(places) == len(gm(*inputs)) == 4
    assert len(graphs.placeholders(numbers)) == len(graphs.placeholders(rest)) == len(inputs)


def test_a_graph_that_returns_no_number_stays_the_same() -> None:
    gm = graphs.copied(captured(lambda x: x * x.shape[0], torch.ones(5, 3), dynamic=True))
    assert symbols.without_numbers(gm) == (gm, None, [])
