"""What `verify` found: a row per module, as a table, as data, or as an error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from .errors import DifferenceError
from .tables import Column, Note, page, plain, screen


class Verdict(str, Enum):
    """What came of one module, in the order in which it deserves attention."""

    RAISES = "raises"  # where the original does not
    DIFFERS = "differs"
    NOT_COMPARABLE = "not comparable"
    NEVER_CALLED = "never called"
    EQUAL = "equal"

    __str__ = str.__str__


_ATTENTION = {verdict: rank for rank, verdict in enumerate(Verdict)}
_COLOURS = {Verdict.RAISES: "red", Verdict.DIFFERS: "red", Verdict.EQUAL: "green"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module, or with `whole` the model end to end, patched against original.

    `worst` names the value that is farthest off, measured by its budget; `error` and `budget` are in that
    value's own unit. `differing` are all that exceed theirs, in words. `stage` is where the difference
    enters: "Dynamo's capture", "inductor", "thunder's trace" or "the executors chosen". `note` says what else
    to know.
    """

    fqn: str
    cls: str
    verdict: Verdict
    whole: bool = False
    worst: str = ""
    error: float = 0.0
    budget: float = 0.0
    differing: Sequence[str] = ()
    stage: str = ""
    note: str = ""

    @property
    def ratio(self) -> float:
        """The error as a multiple of the budget."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.budget if self.budget > 0.0 else math.inf

    @property
    def name(self) -> str:
        return "(the whole model)" if self.whole else self.fqn or "(the model itself)"

    def notes(self) -> Iterator[tuple[str, str]]:
        yield from (("differs", words) for words in self.differing[:3])
        if len(self.differing) > 3:
            yield "differs", f"and {len(self.differing) - 3} more values"
        if self.note:
            yield str(self.verdict) if self.verdict is not Verdict.DIFFERS else "note", self.note


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


_COLUMNS: tuple[Column[Row], ...] = (
    Column("module", lambda row: row.name),
    Column("class", lambda row: row.cls, keep=3),
    Column("verdict", lambda row: str(row.verdict), style=lambda row: _COLOURS.get(row.verdict, "yellow")),
    Column("error/budget", lambda row: f"{row.ratio:.2g}" if row.worst else "", keep=1, number=True),
    Column("enters at", lambda row: row.stage, keep=2),
    Column("worst value", lambda row: row.worst, keep=4),
    Column("error", lambda row: _number(row.error) if row.worst else "", keep=5, number=True),
    Column("budget", lambda row: _number(row.budget) if row.worst else "", keep=6, number=True),
)


class Verification:
    """The result of `verify`: rows, what deserves attention first, and in each kind the largest error first.

    Prints as a table; `to_dict()` is plain data; `verification["blocks.0"]` is the row of one FQN.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: (_ATTENTION[row.verdict], -row.ratio))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, fqn: str) -> Row:
        for row in self.rows:
            if row.fqn == fqn and not row.whole:
                return row
        raise KeyError(fqn)

    @property
    def failures(self) -> list[Row]:
        """The rows of modules that differ or raise."""
        return [row for row in self.rows if row.verdict in (Verdict.RAISES, Verdict.DIFFERS)]

    @property
    def ok(self) -> bool:
        """Whether nothing differs or raises. What cannot be compared is no failure; the rows name it."""
        return not self.failures

    @property
    def verdict(self) -> str:
        """One line: how many modules equal their originals, and what the others are."""
        modules = [row for row in self.rows if not row.whole]
        counts = {verdict: sum(row.verdict is verdict for row in modules) for verdict in Verdict}
        equal = counts.pop(Verdict.EQUAL)
        noun = "module equals its original" if len(modules) == 1 else "modules equal their originals"
        line = [f"{equal} of {len(modules)} {noun}"]
        line += [f"{count} {verdict}" for verdict, count in counts.items() if count]
        line += [f"the whole model: {row.verdict}" for row in self.rows if row.whole]
        return "; ".join(line)

    def raise_for_failures(self) -> None:
        """Raise `DifferenceError` if a module differs from its original, or raises where that does not."""
        if self.ok:
            return
        lines = [f"  {row.name} ({row.cls}) {row.verdict}: {_why(row)}" for row in self.failures]
        raise DifferenceError(
            f"{self.verdict}\n" + "\n".join(lines) + "\nLeave these modules out (exclude=) until they agree."
        )

    @property
    def _notes(self) -> list[Note]:
        names: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for note in row.notes():
                names.setdefault(note, []).append(row.name)
        return [Note(kind, fqns, text) for (kind, text), fqns in names.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: `verdict`, `ok`, and `rows` in the order of the table."""
        rows = [{**asdict(row), "verdict": str(row.verdict)} for row in self.rows]
        return {"verdict": self.verdict, "ok": self.ok, "rows": rows}

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield screen(self.verdict, _COLUMNS, self.rows, self._notes, options.max_width)

    def _repr_html_(self) -> str:
        return page(self.verdict, _COLUMNS, self.rows, self._notes)


def _why(row: Row) -> str:
    found = "; ".join(row.differing[:2]) or row.note
    return f"{found} (enters at: {row.stage})" if row.stage else found
