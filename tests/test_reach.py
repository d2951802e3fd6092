"""Which weights get a gradient when a loss leaves some of a region's outputs aside."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import thunderpatch
from thunderpatch.reach import Reach


class Heads(nn.Module):
    def __init__(self, compute: Callable[[Heads, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute(self, x)


def in_thunder(heads: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    h = heads.body(x)
    return heads.first(h), heads.second(x)


def in_inductor(heads: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sort(heads.first(x)).values, torch.sort(heads.second(heads.body(x))).values


def detached_in_another_part(heads: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    return heads.first(heads.body(x)), heads.second(x).detach()


def cut_off_under_no_grad(heads: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        h = heads.body(x)
    return heads.first(h + x), heads.second(h)


KINDS = [in_thunder, in_inductor, detached_in_another_part, cut_off_under_no_grad]


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("compute", KINDS)
def test_what_leads_to_an_unused_output_alone_is_left_to_itself(
    compute: Callable[[Heads, Tensor], tuple[Tensor, Tensor]], used: tuple[int, ...]
) -> None:
    model = Heads(compute)
    eager = copy.deepcopy(model)
    thunderpatch.apply(model)
    results = []
    for each in (eager, model):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            outputs = each(x)
            loss = sum(outputs[k].square().sum() for k in used)
            assert isinstance(loss, Tensor)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            results.append([each_p.grad is None for each_p in (*each.parameters(), x)])
            optimizer.zero_grad()
    assert results[:3] == results[3:]
    # Weight decay shows a weight with a gradient of zeros.
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))
    (row,) = thunderpatch.report(model).rows
    assert row.compiled_calls == row.calls == 3


def test_an_unused_output_has_no_part_in_a_double_backward_either() -> None:
    model = Heads(in_thunder)
    eager = copy.deepcopy(model)
    thunderpatch.apply(model)
    x = torch.randn(2, 4)
    for each in (eager, model):
        y = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(each(y)[0].tanh().sum(), y, create_graph=True)
        grad.square().sum().backward()
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in eager.parameters()]
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def graph(function: Callable[..., object]) -> fx.GraphModule:
    """Trace, and note for each node that a gradient flows through it."""
    gm = fx.symbolic_trace(function)
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = torch.ones(2, requires_grad=True)
    return gm


def test_inputs_are_found_by_output_along_the_graph() -> None:
    reach = Reach(graph(lambda a, b, c: (a * b, torch.tanh(c), b)), 3)
    assert reach.without([]) is None  # all of them, at no cost
    assert reach.without([1]) == {0, 1} and reach.without([0]) == {1, 2} and reach.without([0, 2]) == {2}


def test_with_a_change_in_place_or_another_count_every_input_may_be_reached() -> None:
    assert Reach(graph(lambda a, b: (a.mul(2).add_(1), b)), 2).without([0]) is None
    assert Reach(graph(lambda a, b: (a, b)), 3).without([0]) is None
    assert Reach(torch.tanh, 1).without([0]) is None
