"""Regions that checkpoint themselves, as transformers' layers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dynamo import captured
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thunderpatch
from thunderpatch import autograd, checkpointed, graphs
from thunderpatch.reports import Status


class Layer(nn.Module):
    """Its forward is a checkpoint and no more."""

    def __init__(self, dropout: float = 0.0, **settings: Any) -> None:
        super().__init__()
        self.settings = {"use_reentrant": False} | settings
        self.up, self.down, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.settings)  # type: ignore[no-any-return]

    def body(self, x: Tensor) -> Tensor:
        # thunder knows no `i1`: the inside goes to several parts.
        return x + self.dropout(self.down(torch.special.i1(self.up(x).sin()).cos()))


class Counting(Layer):
    """Sets a variable and puts it back, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[int] | None = None
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        before, self.now = self.now, [1]
        self.calls += 1
        try:
            return super().body(x) * len(self.now)
        finally:
            self.now = before


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in (x, *module.parameters()) if p.grad is not None)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_inside_is_compiled_in_parts_and_equals_eager(reentrant: bool, direct: bool) -> None:
    module, x = Layer(use_reentrant=reentrant), torch.randn(4, 8)
    wanted = step(module, x)
    thunderpatch.apply(module, direct=direct)
    for _ in range(3):
        torch.testing.assert_close(step(module, x), wanted)
    with torch.no_grad():
        torch.testing.assert_close(module(x), wanted[0])
    (row,) = thunderpatch.report(module).rows
    assert row.status is Status.PARTLY and (row.calls, row.compiled_calls) == (4, 4)
    assert row.thunder_partitions and row.inductor_partitions and row.ops_thunder > 4


class Plain(Layer):
    """Makes no checkpoint itself, but is put into one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def runs(module: nn.Module) -> list[bool]:
    """Return a list that grows with each run of the graph that a module ran: whether gradients were recorded."""
    (graph,) = thunderpatch.registry.active(module).graphs  # type: ignore[union-attr]
    run, found = graph.call, list[bool]()

    def counted(*inputs: Any) -> Any:
        found.append(torch.is_grad_enabled())
        return run(*inputs)

    graph.call = counted
    return found


@pytest.mark.parametrize("inside", [True, False])
def test_the_backward_runs_the_compiled_code_again_and_once(inside: bool) -> None:
    """A part in inductor saves its own tensors: each would have the checkpoint compute all again."""
    module, x = Layer() if inside else Plain(), torch.randn(4, 8)
    thunderpatch.apply(module)

    def around(x: Tensor) -> Tensor:
        return module(x) if inside else checkpoint(module, x, use_reentrant=False)  # type: ignore[no-any-return]

    around(x.requires_grad_()).sum().backward()
    found = runs(module)
    around(x).sum().backward()
    assert found == [True, True]


def test_without_gradients_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Layer(), torch.randn(4, 8)
    thunderpatch.apply(module)
    with torch.no_grad():
        wanted = module(x)
        monkeypatch.delattr(checkpointed, "checkpoint")
        torch.testing.assert_close(module(x), wanted)


def test_the_gradient_is_taken_twice_from_a_graph_that_is_retained() -> None:
    module, x = Layer(), torch.randn(4, 8, requires_grad=True)
    thunderpatch.apply(module)
    for _ in range(2):
        out = module(x).square().sum()
        first = torch.autograd.grad(out, [x, *module.parameters()], retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(out, [x, *module.parameters()]), first)


@pytest.mark.filterwarnings("ignore::thunderpatch.ThunderPatchWarning")
def test_a_backward_that_fails_under_a_checkpoint_runs_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    module, x = Layer(), torch.randn(6, 8)
    wanted = step(module, x)
    thunderpatch.apply(module, on_error="eager")
    with monkeypatch.context() as broken:
        broken.setattr(autograd.Gradient, "compiled", failing)
        torch.testing.assert_close(step(module, x), wanted)
    torch.testing.assert_close(step(module, x), wanted)


def test_nothing_of_the_inside_is_kept_for_the_backward() -> None:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    module, x = Layer(), torch.randn(4, 8, requires_grad=True)
    thunderpatch.apply(module)
    module(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    assert (4, 32) not in kept


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_has_one_mask_in_forward_and_recomputation_if_the_random_state_is_preserved(preserve: bool) -> None:
    module, x = Layer(dropout=0.5, preserve_rng_state=preserve), torch.ones(64, 8, requires_grad=True)
    nn.init.zeros_(module.down.weight)
    nn.init.ones_(module.down.bias)
    thunderpatch.apply(module)
    for _ in range(2):
        torch.manual_seed(1)
        out = module(x)
        dropped = (out.detach() - 1) == 0
        assert 0.3 < dropped.float().mean() < 0.7
        # The gradient of the bias counts what was kept, in the mask of the recomputation.
        (counted,) = torch.autograd.grad(out.sum(), module.down.bias)
        assert torch.equal(counted, 2.0 * (~dropped).sum(0)) == preserve


def test_what_python_sets_and_puts_back_inside_is_no_hindrance() -> None:
    module, x = Counting(), torch.randn(4, 8)
    wanted = step(copy.deepcopy(module), x)
    thunderpatch.apply(module)
    torch.testing.assert_close(step(module, x), wanted)
    (row,) = thunderpatch.report(module).rows
    assert row.compiled_calls == 1 and module.now is None
    assert module.calls == 1  # eager counts in the recomputation too


def test_layers_share_the_code_of_the_inside() -> None:
    model, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(4, 8)
    wanted = step(model, x)
    thunderpatch.apply(model, types=Layer)
    torch.testing.assert_close(step(model, x), wanted)
    assert len({id(g) for layer in model for g in thunderpatch.registry.active(layer).graphs}) == 1  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::thunderpatch.ThunderPatchWarning")
def test_a_failure_to_compile_the_inside_is_answered_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken on purpose")

    module, x = Layer(), torch.randn(5, 8)
    wanted = step(module, x)
    monkeypatch.setattr("torch._inductor.compile", failing)
    with thunderpatch.patched(module), pytest.raises(thunderpatch.CompileError, match="broken on purpose"):
        module(x)
    thunderpatch.apply(module, on_error="eager")
    torch.testing.assert_close(step(module, x), wanted)
    (row,) = thunderpatch.report(module).rows
    assert row.status is Status.LATCHED


def test_what_is_more_than_one_checkpoint_stays_one_graph_in_a_graph() -> None:
    def around(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False) * x  # type: ignore[no-any-return]

    def twice(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, checkpoint(torch.cos, x, use_reentrant=False), use_reentrant=False)  # type: ignore[no-any-return]

    def plain(x: Tensor) -> Tensor:
        return x.sin()

    def alone(x: Tensor) -> tuple[Tensor, ...]:
        first, second = checkpoint(lambda x: (x.sin(), x.cos()), x, use_reentrant=False)
        return second, first

    x = torch.randn(3, requires_grad=True)
    assert [checkpointed.inside(captured(f, x)) for f in (around, twice, plain)] == [None] * 3
    found = checkpointed.inside(graphs.copied(captured(alone, x)))
    assert found is not None
    torch.testing.assert_close(found[0](x), (x.cos(), x.sin()))
