"""What a record counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from torch import nn

from thunderpatch.attribution import watch
from thunderpatch.options import read_options
from thunderpatch.record import Record
from thunderpatch.regions import compiler_for


class Ran:
    """What a record asks of a graph that ran."""

    eager, error = False, None
    seconds: ClassVar[dict[str, float]] = {}


@pytest.fixture
def record() -> Record:
    options = read_options({}, on_error="raise", check=False, direct=True)
    return Record(nn.Linear(2, 2), "it", compiler_for(options, watch, watch.owner))


@pytest.fixture
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[], Any], times: int) -> None:
    threads = [threading.Thread(target=lambda: [work() for _ in range(times)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("_switching_often")
def test_no_call_is_lost_that_several_threads_make_at_once(record: Record) -> None:
    lane: Any = None
    graphs: list[Any] = [Ran(), Ran()]  # two, so that none becomes the usual one
    at_once(lambda: record.note(graphs, lane, compiled=False), 2000)
    at_once(lambda: record.bypass("a tracer"), 2000)
    assert (record.calls, record.compiled_calls, record.bypassed) == (16000, 16000, {"a tracer": 16000})
