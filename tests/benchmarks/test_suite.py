"""The suite's own rules; that nothing here measures anything keeps it among the ordinary tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from .cases import _compare
from .results import Cell, Result
from .workers import PeerError, Worker

SETTINGS = {"device": "cpu", "threads": 1, "limit": 120.0, "clock": "wall"}


def text(result: Result) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(result.table(120))
    return captured.get()


def filled() -> Result:
    result = Result("name", "Title", "us", ["eager", "ours", "theirs"])
    result.put("row", "eager", Cell([2.0, 1.0, 3.0]))
    result.put("row", "ours", Cell([4.0]))
    result.put("row", "theirs", Cell(note="is not installed"))
    return result


def test_a_cell_is_the_median_and_its_spread_the_distance_of_the_quartiles() -> None:
    assert Cell([5.0, 1.0, 2.0]).value == 2.0
    assert Cell([1.0, 2.0, 3.0, 4.0, 5.0]).spread == 3.0
    assert Cell(note="why").value is None


def test_the_table_compares_with_the_first_peer_and_says_why_a_cell_is_empty() -> None:
    shown = text(filled())
    assert "4 (2x)" in shown and "none" in shown and "theirs: is not installed" in shown


def test_results_are_json_with_every_sample() -> None:
    data = json.loads(json.dumps(filled().to_dict()))
    assert data["rows"]["row"]["eager"]["samples"] == [2.0, 1.0, 3.0]
    assert data["rows"]["row"]["theirs"]["note"] == "is not installed"


def test_a_picture_is_drawn_even_where_cells_are_empty(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    filled().draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_peer_that_computes_something_else_is_no_peer() -> None:
    _compare([1.0, 5.0], [1.0001, 5.0], 1e-3)
    for other in ([1.1, 5.0], [1.0, math.nan]):
        with pytest.raises(PeerError, match="something else"):
            _compare(other, [1.0, 5.0], 1e-3)


def test_a_worker_measures_in_a_process_of_its_own_and_tells_what_failed() -> None:
    worker = Worker("eager", "relu", SETTINGS)
    try:
        assert worker.ask("first", "inference") > 0 and worker.ask("time", "inference", 3) > 0
        assert len(worker.ask("result", "inference")) == 3 and worker.ask("graphs") == 0
        with pytest.raises(PeerError, match="no_such_thing"):
            worker.ask("no_such_thing")
    finally:
        worker.close()


def test_a_peer_that_cannot_be_made_says_why() -> None:
    with pytest.raises(PeerError, match="KeyError: 'nobody'"):
        Worker("nobody", "relu", SETTINGS)


def test_a_peer_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(PeerError, match="took more than 0 s"):
        Worker("eager", "relu", {**SETTINGS, "limit": 0.01})
