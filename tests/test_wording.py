"""The words in which a report says what does not run in thunder, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunderpatch
from thunderpatch.reports import Row


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def told(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Row:
    model = Calls(function)
    thunderpatch.apply(model)
    for x in inputs:
        model(x)
    return thunderpatch.report(model)[""]


def test_a_split_names_the_operation_how_often_it_is_there_and_why() -> None:
    weight = torch.randn(4, 4)
    row = told(lambda x: torch.addmm(weight, torch.addmm(weight, x, x) * 2, x).sin(), torch.randn(4, 4))
    assert row.split_reasons == ["addmm (2 times): only has an automatic torch fallback in thunder"]


def test_an_operation_that_thunder_fails_on_is_told_with_the_error() -> None:
    row = told(lambda x: F.scaled_dot_product_attention(x, x, x, enable_gqa=True) * 2, torch.randn(1, 2, 4, 8))
    (reason,) = row.split_reasons
    assert reason.startswith("scaled_dot_product_attention: thunder fails on it: ") and "enable_gqa" in reason


def test_what_is_routed_is_named_by_the_operation_and_is_no_split() -> None:
    row = told(lambda x: torch.copysign(torch.copysign(x * 2, x), x), torch.randn(3, requires_grad=True))
    (route,) = row.routes
    assert route.startswith("copysign (2 times) to inductor: thunder's gradient of copysign")
    assert row.split_reasons == []


def test_operations_are_counted_over_all_graphs_of_a_module() -> None:
    def halves(x: Tensor) -> Tensor:
        y = torch.special.bessel_j0(x) * 2
        torch._dynamo.graph_break()
        return torch.special.bessel_j0(y) + 1

    row = told(halves, torch.randn(3))
    assert row.graphs == 2
    (reason,) = row.split_reasons
    assert reason.startswith(("bessel_j0 (2 times): ", "special_bessel_j0 (2 times): "))


def test_a_graph_that_runs_as_captured_is_told_as_a_whole() -> None:
    row = told(lambda x: x.relu_() * 2, torch.randn(3, requires_grad=True).clone())
    (route,) = row.routes
    assert route.startswith("the graph to eager: ")
