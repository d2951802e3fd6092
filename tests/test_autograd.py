"""A region's outputs take part in autograd as eager's do: also those that are views, which may be written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch


class Turned(nn.Module):
    """Returns a view of what it computed, as attention blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).transpose(1, 2)


class Both(nn.Module):
    """Returns what it computed, a view of its input, and its input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tanh(x) * 2, x[:, 1:], x


def written_to(module: nn.Module, pick: Callable[[Any], torch.Tensor]) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    leaf = torch.randn(2, 3, 4, requires_grad=True)
    given = leaf * 1
    result = pick(module(given))
    result.mul_(3).relu_()
    (result.square().sum() + given.sum()).backward()
    return [result.detach(), given.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize(
    ("make", "pick"),
    [
        (Turned, lambda result: result),
        (nn.Flatten, lambda result: result),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (3, 4))), lambda result: result),
        (Both, lambda result: result[0]),
        (Both, lambda result: result[1]),
        (Both, lambda result: result[2]),
    ],
)
def test_an_output_may_be_written_to_as_in_eager(
    make: Callable[[], nn.Module], pick: Callable[[Any], torch.Tensor]
) -> None:
    plain = nn.Sequential(make())
    model = copy.deepcopy(plain)
    thunderpatch.apply(model, names="0")
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        torch.testing.assert_close(written_to(model[0], pick), written_to(plain[0], pick))
    row = thunderpatch.report(model).rows[0]
    assert row.compiled_calls == row.calls == 2


def test_a_view_of_an_input_is_one_to_autograd() -> None:
    model = nn.Sequential(Both())
    thunderpatch.apply(model, types=Both)
    for _ in range(2):
        given = torch.ones(2, 3, requires_grad=True) * 1
        _, view, same = model(given)
        assert same is given and view._base is not None and view.data_ptr() == given[:, 1:].data_ptr()
        assert view.stride() == given[:, 1:].stride()


class Halves(nn.Module):
    """Hands halves of one tensor to a part that runs as captured, and on to one that returns views of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.split(x.sin(), [4, 4], -1)
        left, right = torch.tensor_split(left, [3], dim=1)[0], torch.tensor_split(right, [3], dim=1)[0]
        left, right = left.view(2, 3, 2, 2), right.view(2, 3, 2, 2)
        return left * 2 + right.repeat_interleave(1, dim=2, output_size=2) * 3


def test_a_gradient_goes_to_the_argument_whose_view_it_is_of_where_two_share_a_memory() -> None:
    model, eager = nn.Sequential(Halves()), Halves()
    thunderpatch.apply(model, types=Halves)
    for _ in range(2):
        given = torch.randn(2, 3, 8, requires_grad=True)
        weights = torch.randn(2, 3, 2, 2)
        (found,) = torch.autograd.grad(model(given), given, weights)
        (expected,) = torch.autograd.grad(eager(given), given, weights)
        torch.testing.assert_close(found, expected)
    row = thunderpatch.report(model).rows[0]
    assert row.status == "partly" and row.compiled_calls == 2
