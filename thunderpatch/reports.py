"""What ran where, per FQN: the data of a report and its text, HTML and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from .tables import Column, Note, gathered, page, plain, screen


class Status(str, Enum):
    """How the calls of a patched module ran, in the order in which they deserve attention."""

    FAILED = "failed"  # could not be compiled, which its caller was told by an error
    LATCHED = "latched"  # failed, and runs its original since
    EAGER = "eager"  # at least one call ran the original
    DISPLACED = "displaced"  # a foreign wrapper took our place
    BYPASSED = "bypassed"  # a fused path of PyTorch computes the module without calling it
    NEVER_CALLED = "never called"
    INLINED = "inlined"  # an outer torch.compile took the original in
    ROUTED = "routed"  # sent elsewhere because thunder is known to get it wrong
    DISABLED = "disabled"
    RESTORED = "restored"
    PARTLY = "partly"  # some partitions not in thunder: in inductor, or as captured
    COMPILED = "compiled"

    __str__ = str.__str__


ATTENTION = {status: rank for rank, status in enumerate(Status)}
COLOURS = {
    Status.FAILED: "red",
    Status.LATCHED: "red",
    Status.EAGER: "red",
    Status.COMPILED: "green",
    Status.PARTLY: "green",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module of a report.

    What belongs to compiled code (graphs, graph breaks, partitions, operations) is told for the code that this
    module runs. `shared_with` is the number of other modules of the model that run some of it, and `group` the FQN
    of the first that does; totals count it once. Recompiles and seconds are those in this module's own calls:
    `seconds` is what they waited for compiling, by stage ("dynamo", "thunder", "inductor"), so that of modules that
    share code the first has most of them. Inductor's backward is among them, but for torch 2.9, which compiles it
    in the first backward. Operations of eager partitions run as captured, inside a compiled graph. `graph_breaks`
    holds pairs of source line and cause.
    """

    fqn: str
    cls: str
    status: Status
    reason: str = ""
    calls: int = 0
    compiled_calls: int = 0
    graphs: int = 0
    graph_breaks: Sequence[tuple[str, str]] = ()
    thunder_partitions: int = 0
    inductor_partitions: int = 0
    eager_partitions: int = 0
    ops_thunder: int = 0
    ops_inductor: int = 0
    ops_eager: int = 0
    split_reasons: Sequence[str] = ()
    routes: Sequence[str] = ()
    recompiles: int = 0
    recompile_reasons: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    shared_with: int = 0
    group: str = ""

    def notes(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, text) of all that a table cell has no room for."""
        # What is routed, and where to, says more than the reason alone.
        if self.reason and not (self.status in (Status.ROUTED, Status.PARTLY) and self.routes):
            yield str(self.status), self.reason
        yield from (("routed", route) for route in self.routes)
        yield from (("graph break", f"{where}: {why}") for where, why in self.graph_breaks)
        yield from (("split", reason) for reason in self.split_reasons)
        yield from (("recompiled", reason) for reason in self.recompile_reasons)
        if self.shared_with and self.thunder_partitions + self.inductor_partitions:
            yield "shared", f"compiled once, for {self.group}"


# The fields of a row that tell of compiled code.
OF_CODE = (
    "graphs",
    "graph_breaks",
    "thunder_partitions",
    "inductor_partitions",
    "eager_partitions",
    "ops_thunder",
    "ops_inductor",
    "ops_eager",
)


def _partitions(count: int, ops: int) -> str:
    return f"{count} ({ops} {'op' if ops == 1 else 'ops'})" if count else ""


def _seconds(row: Row, stage: str) -> str:
    return f"{row.seconds[stage]:.2f}" if row.seconds.get(stage) else ""


def _total(row: Row) -> str:
    return f"{sum(row.seconds.values()):.2f}" if any(row.seconds.values()) else ""


COLUMNS: tuple[Column[Row], ...] = (
    Column("module", lambda row: row.fqn or "(model)"),
    Column("class", lambda row: row.cls, keep=3),
    Column("status", lambda row: str(row.status), style=lambda row: COLOURS.get(row.status, "yellow")),
    Column("compiled/calls", lambda row: f"{row.compiled_calls}/{row.calls}", keep=1, number=True),
    Column("graphs", lambda row: str(row.graphs), keep=2, number=True),
    Column("thunder", lambda row: _partitions(row.thunder_partitions, row.ops_thunder), keep=4, number=True),
    Column("inductor", lambda row: _partitions(row.inductor_partitions, row.ops_inductor), keep=5, number=True),
    Column("eager", lambda row: _partitions(row.eager_partitions, row.ops_eager), keep=5, number=True),
    Column("shared with", lambda row: str(row.shared_with or ""), keep=6, number=True),
    Column("compile s", _total, keep=5, number=True),
    Column("breaks", lambda row: str(len(row.graph_breaks) or ""), keep=7, number=True),
    Column("recompiles", lambda row: str(row.recompiles or ""), keep=8, number=True),
    Column("dynamo s", lambda row: _seconds(row, "dynamo"), keep=9, number=True),
    Column("thunder s", lambda row: _seconds(row, "thunder"), keep=10, number=True),
    Column("inductor s", lambda row: _seconds(row, "inductor"), keep=11, number=True),
)


class Report:
    """What happened to each selected module, sorted by what deserves attention.

    Prints as a table that fits the terminal, shows as a table in a notebook, and turns into plain data with
    `to_dict` and `to_json`. `report["blocks.0"]` is the row of one FQN.
    """

    def __init__(self, rows: Sequence[Row], code: Mapping[str, Any] | None = None) -> None:
        self.rows = sorted(rows, key=lambda row: ATTENTION[row.status])
        self._code = code  # what the rows' fields for compiled code are for all of it, where rows share some

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, fqn: str) -> Row:
        for row in self.rows:
            if row.fqn == fqn:
                return row
        raise KeyError(fqn)

    @property
    def ok(self) -> bool:
        """Whether no module ran its original where it should not: none is failed, latched, eager or displaced."""
        bad = (Status.FAILED, Status.LATCHED, Status.EAGER, Status.DISPLACED)
        return not any(row.status in bad for row in self.rows)

    @property
    def totals(self) -> dict[str, Any]:
        """The sums over all rows. Code that modules share is counted once."""

        def total(name: str) -> int:
            values = [self._code[name]] if self._code is not None else [getattr(row, name) for row in self.rows]
            return sum(value if isinstance(value, int) else len(value) for value in values)

        stages = sorted({stage for row in self.rows for stage in row.seconds})
        return {
            "modules": len(self.rows),
            "statuses": dict(Counter(str(row.status) for row in self.rows)),
            "calls": sum(row.calls for row in self.rows),
            "compiled_calls": sum(row.compiled_calls for row in self.rows),
            **{name: total(name) for name in OF_CODE},
            "recompiles": sum(row.recompiles for row in self.rows),
            "seconds": {stage: sum(row.seconds.get(stage, 0.0) for row in self.rows) for stage in stages},
        }

    @property
    def verdict(self) -> str:
        """One line: how many modules are compiled, and what the others are."""
        if not self.rows:
            return "no module is patched"
        routed = sum(row.status is Status.ROUTED and 0 < row.calls == row.compiled_calls for row in self.rows)
        count = Counter(row.status for row in self.rows)
        count[Status.ROUTED] -= routed  # what is left are those of which nothing runs compiled
        partly = count.pop(Status.PARTLY, 0)
        compiled = count.pop(Status.COMPILED, 0) + partly + routed
        noun = "module" if len(self.rows) == 1 else "modules"
        line = f"{compiled} of {len(self.rows)} {noun} compiled"
        parts = [f"{partly} partly outside thunder"] if partly else []
        parts += [f"{routed} with operations routed around thunder"] if routed else []
        line += f" ({', '.join(parts)})" if parts else ""
        others = sorted((+count).items(), key=lambda item: ATTENTION[item[0]])
        return "; ".join([line, *(f"{number} {status}" for status, number in others)])

    @property
    def notes(self) -> list[Note]:
        """Reasons, graph breaks, splits, routes, recompiles and what shares code; what modules share is one note."""
        told = ((row.fqn or "(model)", kind, text) for row in self.rows for kind, text in row.notes())
        return gathered(told)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: `verdict`, `ok`, `totals`, and `rows` in the order of the table."""
        rows = [{**asdict(row), "status": str(row.status)} for row in self.rows]
        return {"verdict": self.verdict, "ok": self.ok, "totals": self.totals, "rows": rows}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__  # what an interactive prompt shows is the table too

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield screen(self.verdict, COLUMNS, self.rows, self.notes, options.max_width)

    def _repr_html_(self) -> str:
        return page(self.verdict, COLUMNS, self.rows, self.notes)
