import html
import io
import json

import pytest
from rich.console import Console

from thunderpatch.reports import OF_CODE, Report, Row, Status


def row(fqn: str, status: Status = Status.COMPILED, **facts: object) -> Row:
    return Row(**{"fqn": fqn, "cls": "Block", "status": status, **facts})


SHARED = {
    "calls": 20,
    "compiled_calls": 20,
    "graphs": 1,
    "thunder_partitions": 2,
    "inductor_partitions": 1,
    "ops_thunder": 40,
    "ops_inductor": 3,
    "split_reasons": ["aten.index_put: not supported by thunder"],
    "seconds": {"dynamo": 0.25, "thunder": 1.5, "inductor": 3.0},
    "shared_with": 2,
    "group": "layers.0",
}


@pytest.mark.parametrize("status", Status)
def test_each_status_shows_with_fqn_and_reason_in_text_html_and_json(status: Status) -> None:
    report = Report([row("layers.7.act", status, reason="because of <x>", calls=3)])
    text = str(report)
    assert str(status) in next(line for line in text.splitlines() if line.startswith("layers.7.act"))
    assert "layers.7.act: because of <x>" in text
    page = report._repr_html_()
    assert f"<td>{status}</td>" in page and html.escape("layers.7.act: because of <x>") in page
    (plain,) = json.loads(report.to_json())["rows"]
    assert (plain["fqn"], plain["status"], plain["reason"]) == ("layers.7.act", str(status), "because of <x>")


def test_what_deserves_attention_comes_first_and_the_order_of_the_model_is_kept_within() -> None:
    statuses = [Status.COMPILED, Status.PARTLY, Status.COMPILED, Status.EAGER, Status.ROUTED, Status.LATCHED]
    report = Report([row(str(i), status) for i, status in enumerate(statuses)])
    assert [r.fqn for r in report.rows] == ["5", "3", "4", "1", "0", "2"]


def test_the_verdict_counts_what_is_compiled_and_names_the_rest() -> None:
    rows = [row(f"a.{i}") for i in range(40)] + [row("b", Status.NEVER_CALLED), row("c", Status.NEVER_CALLED)]
    assert Report(rows).verdict == "40 of 42 modules compiled; 2 never called"
    partly = [row("a", Status.PARTLY), row("b", Status.EAGER), row("c")]
    assert Report(partly).verdict == "2 of 3 modules compiled (1 partly outside thunder); 1 eager"
    routed = [row("a", Status.ROUTED, calls=2, compiled_calls=2), row("b", Status.ROUTED, calls=2)]
    assert Report(routed).verdict == ("1 of 2 modules compiled (1 with operations routed around thunder); 1 routed")
    assert Report([row("a")]).verdict == "1 of 1 module compiled"
    assert Report([]).verdict == "no module is patched"


def test_totals_count_shared_code_once_and_calls_each_time() -> None:
    waited = {**SHARED, "seconds": {"dynamo": 0.5}, "recompiles": 1}
    rows = [row("layers.0", Status.PARTLY, **SHARED), row("layers.1", Status.PARTLY, **waited), row("head", graphs=1)]
    code = dict.fromkeys(OF_CODE, 0) | {"graphs": 2, "graph_breaks": [("a.py:1", "why")], "inductor_partitions": 1}
    totals = Report(rows, code).totals
    assert totals["modules"] == 3 and totals["statuses"] == {"partly": 2, "compiled": 1}
    assert (totals["calls"], totals["graphs"], totals["graph_breaks"], totals["inductor_partitions"]) == (40, 2, 1, 1)
    # What calls waited for is each module's own.
    assert totals["recompiles"] == 1
    assert totals["seconds"] == {"dynamo": 0.75, "inductor": 3.0, "thunder": 1.5}


def test_without_shared_code_totals_are_the_sums_of_the_rows() -> None:
    rows = [row("a", graphs=1, ops_thunder=3), row("b", graphs=2, graph_breaks=[("a.py:1", "why")], ops_eager=1)]
    totals = Report(rows).totals
    assert (totals["graphs"], totals["graph_breaks"], totals["ops_thunder"], totals["ops_eager"]) == (3, 1, 3, 1)


def test_a_wide_table_shows_partitions_sharing_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = Report([row("layers.0", Status.PARTLY, **SHARED)])
    line = next(line for line in str(report).splitlines() if line.startswith("layers.0 "))
    assert " ".join(line.split()) == "layers.0 Block partly 20/20 1 2 (40 ops) 1 (3 ops) 2 4.75 0.25 1.50 3.00"


def test_a_note_that_modules_share_is_printed_once() -> None:
    report = Report([row(f"layers.{i}", Status.PARTLY, **SHARED) for i in range(12)])
    assert [(note.kind, len(note.names), note.text) for note in report.notes] == [
        ("split", 12, "aten.index_put: not supported by thunder"),
        ("shared", 12, "compiled once, for layers.0"),
    ]
    assert str(report).count("aten.index_put") == 1


def test_what_is_shared_and_not_compiled_is_no_note() -> None:
    eager = row("a", Status.ROUTED, shared_with=2, group="a", graphs=1, routes=["the graph to eager: why"])
    assert [kind for kind, _ in eager.notes()] == ["routed"]


def test_breaks_routes_and_recompiles_are_notes() -> None:
    report = Report(
        [
            row(
                "a",
                Status.ROUTED,
                reason="relu_ mutates its input",
                routes=["relu_ mutates its input"],
                graph_breaks=[("model.py:12", "call to print")],
                recompiles=1,
                recompile_reasons=["x.size()[0] == 4"],
            )
        ]
    )
    assert [(note.kind, str(note)) for note in report.notes] == [
        ("routed", "a: relu_ mutates its input"),
        ("graph break", "a: model.py:12: call to print"),
        ("recompiled", "a: x.size()[0] == 4"),
    ]


def test_a_terminal_gets_colours_and_a_string_gets_none() -> None:
    report = Report([row("a", Status.EAGER, reason="why")])
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    terminal.print(report)
    assert "\x1b[31meager" in terminal.file.getvalue()
    assert "\x1b" not in str(report)


def test_a_report_is_looked_into_by_fqn() -> None:
    report = Report([row("a"), row("", Status.EAGER)])
    assert len(report) == 2 and report["a"].status is Status.COMPILED and report[""] in list(report)
    assert "(model)" in str(report)
    with pytest.raises(KeyError, match="nowhere"):
        report["nowhere"]
