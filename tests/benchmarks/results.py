"""What a measurement leaves: cells in rows and columns, as text, JSON and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thunderpatch.tables import Column, Note, screen


@dataclass
class Cell:
    """A number, from `samples` by the median, or in `note` the reason why there is none."""

    samples: Sequence[float] = ()
    note: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float:
        """The distance of the quartiles."""
        if len(self.samples) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return high - low


@dataclass
class Result:
    """One table: rows are cases, columns are peers; the first peer is what the others are compared with."""

    name: str
    title: str
    unit: str
    peers: Sequence[str]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def put(self, row: str, peer: str, cell: Cell) -> None:
        self.cells.setdefault(row, {})[peer] = cell

    def to_dict(self) -> dict[str, Any]:
        rows = {
            row: {peer: {**asdict(cell), "median": cell.value, "iqr": cell.spread} for peer, cell in cells.items()}
            for row, cells in self.cells.items()
        }
        return {"title": self.title, "unit": self.unit, "rows": rows}

    def table(self, width: int) -> Any:
        # Turned round, peers go down: their names are long and there are many.
        rows = [peer for peer in self.peers if any(peer in cells for cells in self.cells.values())]
        columns: list[Column[str]] = [Column("", lambda peer: peer)]
        for row in self.cells:
            columns.append(Column(row, lambda peer, row=row: self._text(row, peer), number=True))  # type: ignore[misc]  # a lambda with a default
        notes: dict[str, list[str]] = {}
        for row, cells in self.cells.items():
            for peer, cell in cells.items():
                if cell.note:
                    notes.setdefault(f"{peer}: {cell.note}", []).append(row)
        listed = [Note("note", rows_of, text) for text, rows_of in notes.items()]
        return screen(f"{self.title} ({self.unit})", columns, rows, listed, width)

    def _text(self, row: str, peer: str) -> str:
        cell = self.cells[row].get(peer)
        if cell is None:
            return ""
        if cell.value is None:
            return "none"
        text = _number(cell.value)
        if cell.spread:
            text += f" ±{_number(cell.spread / 2)}"
        first = self.cells[row].get(self.peers[0])
        if peer != self.peers[0] and first is not None and first.value:
            text += f" ({_number(cell.value / first.value)}x)"
        return text

    def draw(self, path: Path) -> None:
        """Draw a group of bars for each row, on a logarithmic scale."""
        from matplotlib.figure import Figure

        peers = [peer for peer in self.peers if any(peer in cells for cells in self.cells.values())]
        figure = Figure(figsize=(1.5 + 2.2 * max(3, len(self.cells)), 4.5), layout="constrained")
        axes = figure.subplots()
        for index, peer in enumerate(peers):
            for place, cells in enumerate(self.cells.values()):
                value = cells[peer].value if peer in cells else None
                label = peer if place == 0 else None
                position = place + (index - len(peers) / 2) / (len(peers) + 1)
                axes.bar(position, value or 0, width=1 / (len(peers) + 1), color=f"C{index}", label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(self.cells)), list(self.cells))
        axes.set(title=self.title, ylabel=self.unit)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
