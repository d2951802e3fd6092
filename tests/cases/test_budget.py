"""Public reports of modules that silently ran eager because Dynamo's recompile limit was reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import nn

import thunderpatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(5, 5), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class Pool(nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x.flatten(1).sum(1) - n * x.shape[0]


@pytest.fixture(autouse=True)
def limit_is_an_error() -> Iterator[None]:
    """Dynamo's limit stays at 8; reaching it raises instead of running eager."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    assert torch._dynamo.config.recompile_limit == 8


def test_each_of_many_modules_of_one_class_is_compiled() -> None:
    """pytorch/pytorch#167504"""
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(10)], *[nn.SiLU() for _ in range(10)])
    x = torch.randn(2, 5)
    want = model(x)
    thunderpatch.apply(model, types=[nn.Linear, nn.SiLU])
    torch.testing.assert_close(model(x), want)
    assert [len(child.forward.last_traces) for child in model] == [1] * 20
    assert all(row.compiled_calls == row.calls == 1 for row in thunderpatch.report(model))


def test_modules_of_many_shapes_are_compiled() -> None:
    model = nn.Sequential(*[nn.Linear(n, n + 1) for n in range(2, 13)])
    x = torch.randn(3, 2)
    want = model(x)
    thunderpatch.apply(model, types=nn.Linear)
    torch.testing.assert_close(model(x), want)
    assert all(row.compiled_calls == row.calls == 1 for row in thunderpatch.report(model))


def test_one_module_in_many_states_is_compiled_in_each() -> None:
    """Lightning-AI/lightning-thunder#2775"""
    block, threads = Block(), torch.get_num_threads()
    thunderpatch.apply(block)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for grad in (True, False):
                for train in (True, False):
                    for wanted in (True, False):
                        block.train(train).requires_grad_(wanted)
                        with torch.set_grad_enabled(grad):
                            assert block(torch.randn(3, 5)).requires_grad is (grad and wanted)
    finally:
        torch.set_num_threads(threads)
    row = thunderpatch.report(block)[""]
    assert (row.calls, row.compiled_calls) == (16, 16)


def test_many_batch_sizes_and_an_integer_argument_are_compiled() -> None:
    """Lightning-AI/lightning-thunder#2432"""
    pool = Pool()
    thunderpatch.apply(pool)
    sizes = (1, 2, 4, 7, 11, 16, 22, 29, 37)
    for n in sizes:
        x = torch.randn(n, 3, 2)
        torch.testing.assert_close(pool(x, n), x.reshape(n, 6).sum(1) - n * n)
    row = thunderpatch.report(pool)[""]
    assert row.compiled_calls == row.calls == len(sizes)


def test_a_counter_on_the_module_is_no_limit() -> None:
    """A number that the forward itself changes is guarded by its value at first."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.tanh() * self.calls

    module, x = Counting(), torch.randn(3)
    thunderpatch.apply(module)
    for n in range(1, 13):
        torch.testing.assert_close(module(x), x.tanh() * n)
    assert module.calls == 12
    row = thunderpatch.report(module)[""]
    assert row.compiled_calls == row.calls == 12
