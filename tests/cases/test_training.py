"""Whole trainings that thunder alone gets wrong in silence: in-place networks, losses made of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunderpatch


class BasicBlock(nn.Module):
    """As in ResNet-18: both its activations work in place, the second on a sum with the input."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The shape of ResNet-18, eight channels wide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [(8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 2)]
        self.layers = nn.Sequential(
            *(block for a, b, stride in widths for block in (BasicBlock(a, b, stride), BasicBlock(b, b, 1)))
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


def trained(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Return losses, gradients and state after five steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shown = {}
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        shown[f"loss {step}"] = loss.detach()
    shown |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return shown | {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        rtol, atol = (1e-7, 1e-9) if value.dtype == torch.float64 else (1e-4, 1e-5)
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def classified(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)))


SELECTORS: dict[str, dict[str, Any]] = {"relu": {"types": [nn.ReLU]}, "blocks": {"types": [BasicBlock]}}


@pytest.mark.parametrize("which", ["relu", pytest.param("blocks", marks=pytest.mark.slow)])
def test_a_resnet_that_works_in_place_trains_as_eager(which: str) -> None:
    torch.manual_seed(0)
    # In float32 its last layers, which normalise four values, turn any rounding into another training.
    plain, x = ResNet18().double(), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model = copy.deepcopy(plain)
    thunderpatch.apply(model, **SELECTORS[which])
    assert_same(trained(plain, classified, x), trained(model, classified, x))
    report = thunderpatch.report(model)
    assert len(report) == {"relu": 9, "blocks": 8}[which]
    for row in report:
        if which == "relu":
            assert row.status == "routed" and "changes an input of the graph in place" in row.reason
            assert "gradient wrong" in row.reason
        else:  # each change is of a value of the block's own
            assert row.thunder_partitions and row.compiled_calls == row.calls == 5
            assert all("changes an input" not in route for route in row.routes)


class Critic(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), activation, nn.Linear(16, 16), activation, nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def wasserstein(model: nn.Module, real: Tensor) -> Tensor:
    """WGAN-GP: the critic's loss with a penalty on the norm of its gradient."""
    fake = torch.randn_like(real)
    between = (real + torch.rand(len(real), 1) * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(fake).mean() - model(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def forces(model: nn.Module, x: Tensor) -> Tensor:
    """An energy and its gradient with respect to positions, both fitted."""
    positions = x.detach().clone().requires_grad_()
    energy = model(positions).sum()
    (force,) = torch.autograd.grad(energy, positions, create_graph=True)
    return (energy - 1) ** 2 + ((-force - torch.sin(x)) ** 2).sum()


ACTIVATIONS = {"in thunder": nn.Tanh(), "in other words": nn.SELU(), "partly in inductor": nn.Softsign()}


@pytest.mark.parametrize("loss_of", [wasserstein, forces])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_loss_made_of_gradients_trains_as_eager(activation: str, loss_of: Any) -> None:
    torch.manual_seed(0)
    plain, x = Critic(ACTIVATIONS[activation]), torch.randn(8, 6)
    model = copy.deepcopy(plain)
    thunderpatch.apply(model, double_backward=True)
    assert_same(trained(plain, loss_of, x), trained(model, loss_of, x))
    assert all(row.compiled_calls == row.calls > 0 for row in thunderpatch.report(model))


def test_a_gradient_with_a_history_updates_statistics_no_more_often_than_eager() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(8, 6)
    model = copy.deepcopy(plain)
    thunderpatch.apply(model, double_backward=True)
    assert_same(trained(plain, forces, x), trained(model, forces, x))
    assert int(model[0].num_batches_tracked) == 5


def test_a_function_class_with_a_backward_of_its_own_is_asked_for_it() -> None:
    class Straight(torch.autograd.Function):
        """Rounds, and lets the gradient pass."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Straight.apply(self.first(x) * 3).sin())

    torch.manual_seed(0)
    plain, x = Quantised(), torch.randn(8, 6)
    model = copy.deepcopy(plain)
    thunderpatch.apply(model)
    assert_same(trained(plain, classified, x), trained(model, classified, x))
    assert thunderpatch.report(model).ok
