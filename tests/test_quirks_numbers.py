"""Sizes that are tensors, and tensors made of numbers alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dynamo import captured, raw
from torch import Tensor, fx, nn

import thunderpatch
from thunderpatch.quirks_numbers import numbers_in_place_of_tensors
from thunderpatch.reports import Status

Region = Callable[[Tensor], Any]


def half(x: Tensor) -> Tensor:
    return torch.div(x.size(0), 2, rounding_mode="trunc")


SIZES: dict[str, Region] = {
    "view": lambda x: x.view(2, half(x), 3) * 2,
    "view, then inductor": lambda x: torch.special.i1(x.view(2, half(x), 3)) * (half(x) + 1),
    "inductor, then view": lambda x: torch.special.i1(x).view(2, half(x), 3) * 2,
    "of a quotient": lambda x: x.view(2, torch.div(x.size(0), 2).long(), 3) * 2,
    "reckoned with": lambda x: x.new_zeros((half(x) + 1, 2)) + x[:1, :2],
    "method": lambda x: (
        x.unflatten(0, (2, half(x))),
        x.narrow(0, 0, half(x)),
        x.split(half(x))[1],
        x.repeat(1, half(x)),
    ),
    "factory": lambda x: (torch.zeros(half(x)), torch.arange(half(x)) + 1, torch.full((half(x),), 1.5), x + 1),
    "function": lambda x: F.pad(torch.reshape(x, (2, half(x), 3)), (0, half(x))),
    "and an index": lambda x: (x.view(2, half(x), 3), x[half(x) - 1]),
    "a tensor, halved": lambda x: x.view(2, torch.tensor(x.size(0)) // 2, 3).sin(),
}
NUMBERS: dict[str, Region] = {
    "quotient": lambda x: (torch.div(x.size(0), 3), x * 2),
    "sum": lambda x: (torch.add(x.size(0), 2), x * 2),
    "in a product": lambda x: (x * torch.div(x.size(0), 3), x.int() * torch.div(x.size(0), 3)),
}


class Of(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Any:
        return self.region(x)


@pytest.mark.parametrize("name", [*SIZES, *NUMBERS])
def test_what_is_made_of_numbers_is_what_it_is_in_eager(name: str) -> None:
    module, x = Of((SIZES | NUMBERS)[name]), torch.randn(8, 3)
    wanted = module(x)
    thunderpatch.apply(module)
    for _ in range(2):
        torch.testing.assert_close(module(x), wanted)
    (row,) = thunderpatch.report(module).rows
    assert row.status in (Status.COMPILED, Status.PARTLY) and row.compiled_calls == 2 and row.thunder_partitions


@pytest.mark.parametrize("name", ["quotient", "sum"])
def test_the_fault_is_still_in_thunder(name: str) -> None:
    made, doubled = raw(NUMBERS[name])(torch.randn(8, 3))
    assert isinstance(made, (int, float)) and isinstance(doubled, Tensor)


def test_gradients_pass_by_a_size_that_is_a_tensor() -> None:
    module, x = Of(lambda x: torch.special.i1(x).view(2, half(x), 3).square() * (half(x) + 1)), torch.randn(8, 3)
    wanted = torch.autograd.grad(module(y := x.clone().requires_grad_()).sum(), y)
    thunderpatch.apply(module)
    torch.testing.assert_close(torch.autograd.grad(module(y := x.clone().requires_grad_()).sum(), y), wanted)


def test_a_size_follows_the_shape_of_the_input() -> None:
    module = Of(SIZES["view"])
    thunderpatch.apply(module)
    for rows in (8, 4, 12, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x), x.view(2, rows // 2, 3) * 2)


def test_a_size_that_is_changed_in_place_is_read_when_it_is_used() -> None:
    def region(x: Tensor) -> tuple[Tensor, ...]:
        n = torch.tensor(x.size(0) // 2 - 1)
        short = x.new_zeros(n)
        n += 1
        return short, x.view(2, n, 3) * 2

    module, x = Of(region), torch.randn(8, 3)
    wanted = module(x)
    thunderpatch.apply(module, on_error="eager")
    torch.testing.assert_close(module(x), wanted)


def test_only_sizes_become_numbers() -> None:
    def region(x: Tensor) -> tuple[Tensor, ...]:
        n = half(x)
        return x.view(2, n, 3), x[n - 1], x * n

    gm = captured(region, torch.randn(8, 3))
    numbers_in_place_of_tensors(gm)
    calls = {node.target: node for node in gm.graph.nodes if node.op.startswith("call_")}
    assert calls["view"].args[1:] == (2, 4, 3)
    assert torch.div not in calls and calls[torch.tensor].args == (4,)
    assert calls[operator.mul].args[1] is calls[torch.tensor]
    assert isinstance(calls[operator.getitem].args[1], fx.Node)
