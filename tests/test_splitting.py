from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch


class Recomputed(nn.Module):
    """Has its checkpoint inside: Dynamo captures that as a graph in the graph."""

    def __init__(self, reentrant: bool, width: int = 4) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(width, width), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=self.reentrant) * x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_recomputes_a_part_of_itself_is_compiled_in_either_way(reentrant: bool) -> None:
    module, x = Recomputed(reentrant), torch.randn(3, 4, requires_grad=True)
    module(x).square().sum().backward()
    want = [p.grad.clone() for p in (x, *module.parameters())]
    module.zero_grad()
    x.grad = None
    thunderpatch.apply(module)
    module(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in (x, *module.parameters())], want)
    row = thunderpatch.report(module)[""]
    assert (row.compiled_calls, row.thunder_partitions, row.inductor_partitions) == (1, 1, 0)


def test_a_failure_inside_a_graph_in_a_graph_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FX explains an error in a graph module by its line of code, and thunder interpreted that for minutes."""
    thunderpatch.apply(module := Recomputed(reentrant=False, width=5))  # no graph that another test has compiled
    import thunder.core.utils

    check: Callable[..., Any] = thunder.core.utils.check

    def failing(condition: bool, message: Any, *args: Any, **kwargs: Any) -> None:
        assert not getattr(message, "__qualname__", "").startswith("checkpoint."), "broken on purpose"
        check(condition, message, *args, **kwargs)

    monkeypatch.setattr(thunder.core.utils, "check", failing)
    began = time.perf_counter()
    with pytest.raises(thunderpatch.CompileError, match="broken on purpose"):
        module(torch.randn(3, 5, requires_grad=True))
    assert time.perf_counter() - began < 60
