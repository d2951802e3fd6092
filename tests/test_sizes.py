"""Sizes and numbers that change from call to call: static graphs for the first ones, then one for any."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import sizes
from thunderpatch.graph import Graph
from thunderpatch.reports import Status


class Attention(nn.Module):
    """Looks back at keys and values whose number grows, as a decoder's cache does."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        past = torch.cat([past, x], 1)
        return torch.softmax(x @ past.transpose(1, 2), -1) @ past, past


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.tanh(x * factor)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * x


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).relu_()


@pytest.fixture(autouse=True)
def few_static_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_SIZES", 3)


@pytest.fixture
def width() -> int:
    """A width that no other test has, so that no graph of theirs is found again."""
    return next(_widths)


_widths = itertools.count(3)


@pytest.fixture
def graphs_made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were compiled while the test ran."""
    made: list[Graph] = []
    compile_graph = Graph._compile

    def noting(self: Graph, inputs: Any) -> Callable[..., Any]:
        made.append(self)
        return compile_graph(self, inputs)

    monkeypatch.setattr(Graph, "_compile", noting)
    compile_any = sizes.AnySizes._compile

    def noting_any(self: sizes.AnySizes, inputs: Any) -> Callable[..., Any]:
        made.append(self)
        return compile_any(self, inputs)

    monkeypatch.setattr(sizes.AnySizes, "_compile", noting_any)
    return made


def decode(model: nn.Module, steps: int, width: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, past = torch.randn(2, 1, width), torch.randn(2, 3, width)
    outputs = []
    with torch.no_grad():
        for _ in range(steps):
            for layer in model.children():
                x, grown = layer(x, past)
            past = grown
            outputs.append(x)
    return outputs


def test_a_cache_that_grows_is_compiled_for_some_lengths_and_then_for_any(graphs_made: list[Graph], width: int) -> None:
    model = nn.Sequential(Attention(), Attention())
    want = decode(model, 12, width)
    thunderpatch.apply(model, types=Attention)
    torch.testing.assert_close(decode(model, 12, width), want)
    assert [type(graph) for graph in graphs_made][-1] is sizes.AnySizes
    assert len(graphs_made) <= 2 + sizes.MOST_SIZES  # the first length, the static ones, and that for any
    row = thunderpatch.report(model).rows[0]
    assert row.compiled_calls == row.calls == 12
    assert any("sizes" in route for route in row.routes)


def test_lengths_that_were_compiled_by_thunder_stay_there(graphs_made: list[Graph], width: int) -> None:
    model = nn.Sequential(Attention())
    thunderpatch.apply(model, types=Attention)
    decode(model, 9, width)
    made, ran = list(graphs_made), list[type[Graph]]()

    def noting(graph: Graph, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: (ran.append(type(graph)), call(*inputs))[1]

    for graph in made:
        graph.call = noting(graph, graph.call)
    decode(model, 4, width)
    assert graphs_made == made
    assert len(ran) == 4 and ran.count(Graph) >= 3


def test_gradients_of_any_batch_size_equal_eagers(width: int) -> None:
    plain, model = Gated(width), nn.Sequential(Gated(width))
    model[0].load_state_dict(plain.state_dict())
    thunderpatch.apply(model, types=Gated)
    for size in range(2, 9):
        x = torch.randn(size, width)
        for module in (plain, model):
            module.zero_grad()
            module(x).square().sum().backward()
        torch.testing.assert_close(model[0].linear.weight.grad, plain.linear.weight.grad)
    row = thunderpatch.report(model).rows[0]
    assert row.compiled_calls == row.calls == 7
    assert any("sizes" in route for route in row.routes)


def test_a_number_that_changes_with_every_call_is_compiled_for_some_values_and_then_for_any(
    graphs_made: list[Graph], width: int
) -> None:
    model = nn.Sequential(Scaled())
    thunderpatch.apply(model, types=Scaled)
    x = torch.randn(3, width)
    for step in range(9):
        torch.testing.assert_close(model[0](x, 0.5 + step / 7), torch.tanh(x * (0.5 + step / 7)))
    assert len(graphs_made) <= 2 + sizes.MOST_SIZES


def test_what_writes_to_its_input_runs_as_captured_for_any_size(graphs_made: list[Graph], width: int) -> None:
    model = nn.Sequential(Writes())
    thunderpatch.apply(model, types=Writes)
    for size in range(2, 9):
        x, y = (torch.ones(size, width, requires_grad=True) for _ in range(2))
        given, expected = x.clone(), y.clone()
        model(given).square().sum().backward()
        Writes()(expected).square().sum().backward()
        torch.testing.assert_close(given, expected)
        torch.testing.assert_close(x.grad, y.grad)
    assert len(graphs_made) <= 2 + sizes.MOST_SIZES
    assert thunderpatch.report(model).rows[0].status is Status.ROUTED


def test_dynamic_false_keeps_each_size_in_thunder(graphs_made: list[Graph], width: int) -> None:
    model = nn.Sequential(Gated(width))
    thunderpatch.apply(model, types=Gated, dynamic=False)
    for size in range(2, 9):
        model(torch.randn(size, width))
    assert len(graphs_made) == 7 and not any(isinstance(graph, sizes.AnySizes) for graph in graphs_made)


def test_a_size_is_compiled_by_itself_where_inductor_cannot_leave_it_open(
    monkeypatch: pytest.MonkeyPatch, graphs_made: list[Graph], width: int
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no sizes left open here")

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    model = nn.Sequential(Gated(width))
    thunderpatch.apply(model, types=Gated)
    for size in range(2, 9):
        x = torch.randn(size, width)
        torch.testing.assert_close(model(x), torch.tanh(model[0].linear(x)) * x)
    row = thunderpatch.report(model).rows[0]
    assert row.compiled_calls == row.calls == 7
    assert not any(isinstance(graph, sizes.AnySizes) for graph in graphs_made)


def test_what_inductor_gets_wrong_runs_as_captured_for_any_size(graphs_made: list[Graph], width: int) -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x).prod(-1)

    model = nn.Sequential(Product())
    thunderpatch.apply(model, types=Product)
    for size in range(2, 9):
        x, y = (torch.zeros(size, width, requires_grad=True) for _ in range(2))
        model(x).sum().backward()
        Product()(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(graphs_made) <= 2 + sizes.MOST_SIZES
    row = thunderpatch.report(model).rows[0]
    assert row.status is Status.ROUTED and "for any size: thunder's gradient of a product" in row.reason


def test_making_the_graph_for_any_size_draws_no_random_numbers_and_leaves_gradients_alone(width: int) -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.dropout(x, 0.5, True))

    model = nn.Sequential(Dropped())
    thunderpatch.apply(model, types=Dropped)
    for size in range(2, 9):
        x = torch.ones(size, width, requires_grad=True)
        torch.manual_seed(size)
        model(x)
        state = torch.get_rng_state()
        torch.manual_seed(size)
        model(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is None


def test_layers_share_what_is_known_of_sizes(graphs_made: list[Graph], width: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
    thunderpatch.apply(model, repeated=True)
    with torch.no_grad():  # else the first layer's input alone requires no gradient
        for size in range(2, 9):
            model(torch.randn(size, width))
    rows = thunderpatch.report(model).rows
    assert all(row.compiled_calls == row.calls == 7 for row in rows)
    assert len({tuple(row.routes) for row in rows}) == 1
    made = [graph for graph in graphs_made if isinstance(graph, sizes.AnySizes)]
    assert len(made) == 1
