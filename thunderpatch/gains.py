"""What `benchmark` found: a row per module and one for the whole model, as a table, as data, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from .tables import Column, Note, page, plain, screen


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module, or the whole model where `fqn` is empty and `whole` is set.

    Times are seconds, the median of many short blocks; a `_spread` is the distance of the quartiles. `ratio`
    is patched / eager, the median over blocks measured side by side. `calls` is how often the module runs in
    one step of the model, `first_call` the seconds of the first patched call, compilation included (of
    modules that share their code, the first one pays). Peak memory, in bytes, is known on CUDA only.
    """

    fqn: str
    cls: str
    whole: bool = False
    calls: int = 1
    eager: float = math.nan
    eager_spread: float = math.nan
    patched: float = math.nan
    patched_spread: float = math.nan
    ratio: float = math.nan
    ratio_spread: float = math.nan
    first_call: float = math.nan
    peak_eager: int | None = None
    peak_patched: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return "(the whole model)" if self.whole else self.fqn or "(the model itself)"

    @property
    def measured(self) -> bool:
        return not math.isnan(self.ratio)

    @property
    def gain(self) -> float:
        """The seconds that patching saves in one call; negative where it costs."""
        return self.eager * (1.0 - self.ratio)  # the ratio is measured side by side, and surer than a difference

    @property
    def saved(self) -> float:
        """The seconds that patching saves in one step of the model."""
        return self.calls * self.gain if self.measured else 0.0

    @property
    def break_even(self) -> float:
        """The calls after which the first call has paid off; infinite where patching does not gain."""
        return math.ceil(max(self.first_call - self.eager, 0.0) / self.gain) if self.gain > 0.0 else math.inf


def seconds(value: float) -> str:
    """Write seconds with three digits and the unit that suits them."""
    if math.isnan(value):
        return ""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _break_even(row: Row) -> str:
    if not row.measured:
        return ""
    return "never" if math.isinf(row.break_even) else f"{row.break_even:,.0f}"


def _ratio(row: Row) -> str:
    return f"{row.ratio:.2f} ±{row.ratio_spread / 2:.2f}" if row.measured else ""


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f} MiB"


def _colour(row: Row) -> str:
    if not row.measured or abs(row.ratio - 1) <= row.ratio_spread / 2:
        return "yellow"
    return "green" if row.ratio < 1 else "red"


_COLUMNS: tuple[Column[Row], ...] = (
    Column("module", lambda row: row.name),
    Column("class", lambda row: row.cls, keep=5),
    Column("eager", lambda row: seconds(row.eager), keep=1, number=True),
    Column("patched", lambda row: seconds(row.patched), keep=1, number=True),
    Column("patched/eager", _ratio, number=True, style=_colour),
    Column("calls", lambda row: str(row.calls), keep=7, number=True),
    Column("saved per step", lambda row: seconds(row.saved), keep=2, number=True),
    Column("first call", lambda row: seconds(row.first_call), keep=3, number=True),
    Column("pays after calls", _break_even, keep=4, number=True),
    Column("peak eager", lambda row: _bytes(row.peak_eager), keep=6, number=True),
    Column("peak patched", lambda row: _bytes(row.peak_patched), keep=6, number=True),
)


class Benchmark:
    """The result of `benchmark`: a row per module, what saves most first, and `whole`, the model end to end.

    Prints as a table; `to_dict()` is plain data; `plot(path)` draws it; `result["blocks.0"]` is one row.
    """

    def __init__(self, rows: Sequence[Row], whole: Row, backward: bool) -> None:
        self.rows = sorted(rows, key=lambda row: -row.saved)
        self.whole, self.backward = whole, backward

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, fqn: str) -> Row:
        for row in self.rows:
            if row.fqn == fqn:
                return row
        raise KeyError(fqn)

    @property
    def verdict(self) -> str:
        """One line: what a step of the whole model takes both ways."""
        step = "forward and backward" if self.backward else "forward"
        whole = self.whole
        return (
            f"a step ({step}) takes {seconds(whole.eager)} eager and {seconds(whole.patched)} patched, "
            f"{_ratio(whole)} times as long"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: `verdict`, `backward`, `whole`, and `rows` in the order of the table.

        What was not measured is None, and so is the break-even point where there is none.
        """
        rows = [_as_dict(row) for row in self.rows]
        return {
            "verdict": self.verdict,
            "backward": self.backward,
            "whole": _as_dict(self.whole),
            "rows": rows,
        }

    def plot(self, path: str | Path) -> None:
        """Draw the ratio of each module and the time it saves per step; the suffix of `path` is the format.

        Needs matplotlib (`pip install 'thunderpatch[plot]'`), else raises `ImportError`.
        """
        from .plotting import draw

        draw(self, Path(path))

    @property
    def _table(self) -> tuple[list[Row], list[Note]]:
        rows = [*self.rows, self.whole]
        return rows, [Note("note", [row.name], row.note) for row in rows if row.note]

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, notes = self._table
        yield screen(self.verdict, _COLUMNS, rows, notes, options.max_width)

    def _repr_html_(self) -> str:
        rows, notes = self._table
        return page(self.verdict, _COLUMNS, rows, notes)


def _as_dict(row: Row) -> dict[str, Any]:
    values = {**asdict(row), "saved": row.saved, "break_even": row.break_even}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
