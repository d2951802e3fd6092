"""Nothing grows, everything is freed, and threads that come first together get right answers."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import registry


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


CYCLES = 1000
# One object of 64 bytes that each cycle left behind would come to as much; a proxy, to ten times as much.
MOST_BYTES_A_CYCLE = 64
MOST_OBJECTS = CYCLES // 10


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.slow
def test_a_thousand_cycles_of_apply_call_and_restore_leave_nothing(training: bool) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)

    def cycles(count: int) -> None:
        for _ in range(count):
            with thunderpatch.patched(model, types=Block):
                y = model(x)
                if training:
                    y.sum().backward()

    with torch.set_grad_enabled(training):
        cycles(20)
        before = objects()
        cycles(CYCLES)
        assert objects() - before < MOST_OBJECTS
        traced = CYCLES  # twice: pools of the interpreter and of autograd fill in the first thousand
        tracemalloc.start()
        try:
            cycles(traced)
            gc.collect()
            start = tracemalloc.get_traced_memory()[0]
            cycles(traced)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - start
        finally:
            tracemalloc.stop()
    assert grown / traced < MOST_BYTES_A_CYCLE


def test_models_that_come_and_go_leave_nothing() -> None:
    x, records = torch.randn(2, 4), []

    def one() -> None:
        model = nn.Sequential(Block(), nn.Linear(4, 3))
        thunderpatch.apply(model, types=[Block, nn.Linear])
        model(x).sum().backward()
        records.append(weakref.ref(registry.active(model[0])))

    for _ in range(3):
        one()
    before = objects()
    for _ in range(10):
        one()
    after = objects()
    assert [ref() for ref in records] == [None] * 13
    # What Dynamo itself keeps for good of each compilation is a few hundred objects; a model would be thousands.
    assert (after - before) / 10 < 1000


def test_what_has_been_compiled_goes_with_the_last_model_that_uses_it() -> None:
    model = Block(width=7)
    thunderpatch.apply(model)
    model(torch.randn(2, 7))
    record = registry.active(model)
    refs = [weakref.ref(thing) for thing in (record.group, record.lane)]
    twin = Block(width=7)
    thunderpatch.apply(twin)
    twin(torch.randn(2, 7))
    del model, record
    gc.collect()
    assert None not in [ref() for ref in refs]
    del twin
    gc.collect()
    assert [ref() for ref in refs] == [None] * 2


@pytest.mark.parametrize("width", range(5, 25))
def test_first_calls_from_four_threads_at_once_are_right(width: int) -> None:
    """20 repetitions, each of another width, so that each compiles."""
    model, x = Block(width), torch.randn(3, width)
    want = model(x)
    thunderpatch.apply(model)
    gate, found = threading.Barrier(4), []

    def work() -> None:
        gate.wait()
        found.append(model(x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for got in found:
        torch.testing.assert_close(got, want)
    assert [row.compiled_calls for row in thunderpatch.report(model)] == [4]
