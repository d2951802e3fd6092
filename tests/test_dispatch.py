"""A partition is called directly only where Dynamo's guards cover what thunder would check."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thunderpatch


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def partitions(module: nn.Module) -> list:
    return [part for graph in module.forward._self_record.graphs for part in graph.partitions]


@pytest.mark.parametrize("grad", [True, False])
def test_a_static_graph_that_writes_to_nothing_is_called_directly(grad: bool) -> None:
    model, x = Unit(), torch.randn(3, 4)
    expected = model(x)
    thunderpatch.apply(model)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    assert [part.direct for part in partitions(model)] == [True]


def test_direct_can_be_switched_off() -> None:
    model, x = Unit(), torch.randn(3, 4)
    expected = model(x)
    thunderpatch.apply(model, direct=False)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    assert [part.direct for part in partitions(model)] == [False]


def test_each_shape_and_dtype_has_a_computation_of_its_own() -> None:
    model, reference = Unit(), Unit()
    reference.load_state_dict(model.state_dict())
    thunderpatch.apply(model)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), reference(x))
    model.double(), reference.double()
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x))
    assert model(x).dtype == torch.float64


def test_autocast_is_followed_in_a_direct_call() -> None:
    model, x = Unit(), torch.randn(3, 4)
    thunderpatch.apply(model)
    seen = []
    for _ in range(2):
        seen.append(model(x).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(model(x).dtype)
    assert seen == [torch.float32, torch.bfloat16] * 2


def test_gradients_of_a_direct_call_equal_eagers() -> None:
    model, reference = Unit(), Unit()
    reference.load_state_dict(model.state_dict())
    thunderpatch.apply(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        grads = []
        for module in (model, reference):
            module.zero_grad()
            given = x.clone().requires_grad_()
            module(given).square().sum().backward()
            grads.append([given.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*grads)


class SwitchesGradients(nn.Module):
    """Switches gradients off in the thunder part before inductor's sort, and on in the one after it, if at all."""

    def __init__(self, on_again: bool) -> None:
        super().__init__()
        self.first, self.second, self.on_again = nn.Linear(4, 4), nn.Linear(4, 4), on_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch.set_grad_enabled(False)
        if not self.on_again:
            return y * 2
        z = self.second(torch.sort(y * 2).values)
        torch.set_grad_enabled(True)
        return self.second(y + z)


@pytest.mark.parametrize("on_again", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_region_leaves_gradients_switched_as_eager_does(grad: bool, on_again: bool) -> None:
    model, x = SwitchesGradients(on_again), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    thunderpatch.apply(model)
    for _ in range(3):
        found = []
        for each in (eager, model):
            with torch.set_grad_enabled(grad):
                out = each(x)
                found.append((out.detach(), out.requires_grad, torch.is_grad_enabled()))
            if on_again:
                assert out.requires_grad
                found[-1] += tuple(torch.autograd.grad(out.sin().sum(), [*each.parameters()], allow_unused=True))
        torch.testing.assert_close(found[1], found[0])
    (row,) = thunderpatch.report(model).rows
    assert row.compiled_calls == row.calls == 3
