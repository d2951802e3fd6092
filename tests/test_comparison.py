import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from thunderpatch import comparison
from thunderpatch.cli import main
from thunderpatch.comparison import ALLOWANCE, Comparison, compare
from thunderpatch.demo import Training
from thunderpatch.reports import Report, Row, Status


def made(patched: float = 2.0, left: tuple[str, ...] = (), calls: int = 3, compiled: int = 3) -> Comparison:
    """A comparison whose eager losses are 4 and 2, each 1e-3 off from float64."""
    row = Row(fqn="blocks.0", cls="Block", status=Status.COMPILED, calls=calls, compiled_calls=compiled)
    seconds = [0.5, 0.25]
    return Comparison(
        eager=Training([4.0, 2.0], seconds),
        patched=Training([4.0, patched], seconds),
        exact=Training([4.0, 2.001], seconds),
        report=Report([row]),
        left=list(left),
    )


def test_losses_may_differ_by_what_rounding_explains() -> None:
    assert made().allowed == pytest.approx(ALLOWANCE * 1e-3, rel=1e-2)
    assert made(patched=2.0 + 7.9e-3).ok and not made(patched=2.0 + 8.1e-3).ok
    assert not made(patched=math.nan).ok


def test_anything_left_or_any_eager_call_is_not_well() -> None:
    assert made().ok
    assert not made(left=("attributes of blocks.0",)).ok
    assert not made(calls=3, compiled=2).ok
    assert not made(calls=0, compiled=0).ok


@pytest.mark.parametrize("columns", [80, 200])
def test_it_shows_table_losses_times_and_what_is_left(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(made(patched=2.001, left=("attributes of blocks.0",)))
    lines = [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= columns
    assert ["2", "2.000000", "2.001000", "1.0e-03"] in lines
    assert ["patched", "0.50", "250.0"] in lines
    assert "blocks.0" in text and "attributes of blocks.0" in text and text.endswith("NOT well")
    assert str(made()).endswith("all is well")


def test_a_comparison_is_plain_data() -> None:
    plain = json.loads(json.dumps(made().to_dict()))
    assert plain["ok"] is True and plain["eager"]["losses"] == [4.0, 2.0]
    assert plain["report"]["rows"][0]["fqn"] == "blocks.0"


def test_patched_training_equals_eager_and_leaves_nothing() -> None:
    random = torch.get_rng_state()
    seen: list[int] = []
    result = compare(steps=3, on_step=lambda step, loss: seen.append(step))
    assert result.ok and result.left == []
    assert result.eager.losses != result.exact.losses and result.allowed < 1e-3
    assert [(row.fqn, row.calls, row.compiled_calls) for row in result.report] == [
        (f"blocks.{i}", 3, 3) for i in range(12)
    ]
    assert seen == [0, 1, 2] * 3
    assert torch.equal(random, torch.get_rng_state())


@contextlib.contextmanager
def leaving_a_forward(model: nn.Module, **_: Any) -> Iterator[None]:
    block = model.get_submodule("blocks.3")
    block.forward = block.forward
    yield


@contextlib.contextmanager
def dropping_a_gradient(model: nn.Module, **_: Any) -> Iterator[None]:
    bias = model.get_parameter("blocks.11.mlp.0.bias")
    handle = bias.register_hook(lambda gradient: torch.zeros_like(gradient))
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("patched", "expected"),
    [(leaving_a_forward, "attributes of blocks.3"), (dropping_a_gradient, "Largest difference")],
)
def test_what_a_patch_leaves_or_changes_is_found_and_is_status_1(
    patched: Any, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(fqn="blocks.0", cls="Block", status=Status.COMPILED, calls=3, compiled_calls=3)
    monkeypatch.setattr(comparison, "report", lambda model: Report([row]))
    monkeypatch.setattr(comparison, "patched", patched)
    assert main(["demo", "--steps", "3"]) == 1
    out = capsys.readouterr().out
    assert expected in out and out.endswith("NOT well\n")
