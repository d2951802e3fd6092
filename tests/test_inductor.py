"""A part that inductor compiled takes part in autograd as eager code does: again, twice, and differentiated itself."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch

_widths = itertools.count(3)


class Special(nn.Module):
    """erfcx is inductor's, what is around it thunder's; both of its factors are computed from one input."""

    def __init__(self) -> None:
        super().__init__()
        width = next(_widths)  # no other test has it, so that no graph of theirs is found again
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.erfcx(torch.tanh(self.linear(x))) * x


class Strided(nn.Module):
    """Returns a view that thunder leaves to inductor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (3, 1))


def twice(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a gradient penalty."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return [grad.detach(), *torch.autograd.grad(grad.square().sum(), [x, *model.parameters()], allow_unused=True)]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Special())


@pytest.fixture
def x(model: nn.Sequential) -> torch.Tensor:
    return torch.randn(3, model[0].linear.in_features)  # type: ignore[union-attr, arg-type]


def inductor_parts(model: nn.Module) -> int:
    return sum(row.inductor_partitions for row in thunderpatch.report(model).rows)


def test_a_gradient_penalty_equals_eagers_where_the_inputs_are_kept(model: nn.Module, x: torch.Tensor) -> None:
    want = twice(model, x)
    thunderpatch.apply(model, types=Special, double_backward=True)
    for _ in range(3):
        torch.testing.assert_close(twice(model, x), want)
    assert inductor_parts(model) == 1


def test_an_input_that_is_gone_is_refused_once_and_kept_from_then_on(model: nn.Module, x: torch.Tensor) -> None:
    want = twice(model, x)
    thunderpatch.apply(model, types=Special)
    with pytest.raises(thunderpatch.CompileError, match=r"0 \(Special\): double backward.*double_backward=True"):
        twice(model, x)
    torch.testing.assert_close(twice(model, x), want)


def test_a_backward_may_run_again_where_the_graph_is_retained(model: nn.Module, x: torch.Tensor) -> None:
    def again(model: nn.Module) -> Any:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    want = again(model)
    thunderpatch.apply(model, types=Special)
    for _ in range(2):
        torch.testing.assert_close(again(model), want)


def test_a_freed_graph_is_refused_as_in_eager(model: nn.Module, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Special)
    loss = model(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_an_output_that_is_not_used_and_an_input_without_gradient_are_left_out() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return torch.special.erfcx(x) + 1, torch.special.erfcx(x * y) + 1, torch.special.erfcx(y) + 1

    def run(model: nn.Module) -> Any:
        x, y = torch.ones(2, 5, requires_grad=True), torch.full((2, 5), 0.5)
        first, second, fixed = model(x, y)
        assert not fixed.requires_grad
        return torch.autograd.grad(second.sum(), x)[0], first.detach(), fixed

    model = nn.Sequential(Two())
    want = run(model[0])
    thunderpatch.apply(model, types=Two)
    for _ in range(2):
        torch.testing.assert_close(run(model[0]), want)


def test_a_view_stays_a_view_and_is_not_differentiated_twice() -> None:
    model = nn.Sequential(Strided())
    thunderpatch.apply(model, types=Strided, double_backward=True)
    for _ in range(2):
        leaf = torch.ones(2, 3, requires_grad=True)
        base = leaf.clone()
        view = model(base)
        assert view._base is not None and view.data_ptr() == base.data_ptr()
        view.mul_(2)
        base.sum().backward()
        torch.testing.assert_close(leaf.grad, torch.tensor([[2.0, 2, 1], [2, 2, 1]]))
    assert inductor_parts(model) == 1
    with pytest.raises(thunderpatch.CompileError, match=r"0 \(Strided\): double backward"):
        torch.autograd.grad(model(leaf.clone()).sum(), leaf, create_graph=True)


def test_a_part_keeps_no_input_alive_in_an_ordinary_step() -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.erfcx(x)

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    alone = nn.Sequential(Alone())
    thunderpatch.apply(alone, types=Alone)
    leaf = torch.ones(2, 7, requires_grad=True)
    alone(leaf * 1)
    given = Copied.apply(leaf)
    known = weakref.ref(given)
    result = alone(given)
    del given
    gc.collect()
    assert known() is None
    result.sum().backward()
