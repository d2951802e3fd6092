"""Tables for screens of any width, for pipes, and for notebooks.

A table is a sequence of columns over rows of any kind, with a verdict above it and notes below it. A narrow
screen shows fewer columns; only the names in the first column fold. What a cell has no room for is a note.
"""

from __future__ import annotations

import html
import io
import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.box import Box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

R = TypeVar("R")

# A rule under the header and no more, all of it ASCII: it must survive every pipe, log and encoding.
PLAIN = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
GAP = 2
SHOWN_NAMES = 3


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column: its title, its text for a row, and how long a narrowing screen keeps it (0: always)."""

    title: str
    cell: Callable[[R], str]
    keep: int = 0
    number: bool = False
    style: Callable[[R], str] = lambda row: ""


@dataclass(frozen=True)
class Note:
    """A remark on some rows: its kind, the names of the rows, the text."""

    kind: str
    names: Sequence[str]
    text: str

    @property
    def where(self) -> str:
        """The names, shortened where there are many."""
        names = list(self.names)
        if len(names) <= SHOWN_NAMES:
            return ", ".join(names)
        return f"{', '.join([*names[: SHOWN_NAMES - 1], '...', names[-1]])} ({len(names)} modules)"

    @property
    def brief(self) -> str:
        """The first line of the text."""
        return _first_line(self.text)

    def __str__(self) -> str:
        return f"{self.where}: {self.brief}"


def gathered(told: Iterable[tuple[str, str, str]]) -> list[Note]:
    """Turn remarks (name of a row, kind, text) into notes, by kind, each text once.

    Texts that differ by an index alone, such as that of a layer in a guard, are one: `layers[*]` stands in it.
    """
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, kind, text in told:
        similar = found.setdefault(kind, {}).setdefault(_INDEX.sub("[*]", _first_line(text)), {})
        similar.setdefault(_first_line(text), []).append(name)
    return [
        Note(
            kind, list(dict.fromkeys(itertools.chain(*texts.values()))), anyone if len(texts) > 1 else next(iter(texts))
        )
        for kind, by_text in found.items()
        for anyone, texts in by_text.items()
    ]


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())


_INDEX = re.compile(r"\[\d+\]")


def fold(name: str, width: int) -> str:
    """Break a dotted name into lines of at most `width` characters, where a single segment is not longer."""
    lines = [""]
    for segment in name.replace(".", ".\n").splitlines():
        if lines[-1].strip() and len(lines[-1] + segment) > width:
            lines.append("  ")
        lines[-1] += segment
    return "\n".join(lines)


def fit(columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> dict[str, list[str]]:
    """Choose the columns that have something to say and fit into `width` characters side by side.

    Returns the cells by the title of the column. Where not all fit, the first column folds at two fifths of the
    width.
    """
    cells = {column.title: [column.cell(row) for row in rows] for column in columns}
    cells = {title: texts for title, texts in cells.items() if any(texts)}
    if _total_width(cells) <= width:
        return cells
    if (names := columns[0].title) in cells:
        cells[names] = [fold(text, max(24, width * 2 // 5)) for text in cells[names]]
    chosen: dict[str, list[str]] = {}
    for column in sorted(columns, key=lambda column: column.keep):
        if column.title not in cells:
            continue
        wider = {**chosen, column.title: cells[column.title]}
        if column.keep and _total_width(wider) > width:
            break
        chosen = wider
    return {title: texts for title, texts in cells.items() if title in chosen}


def _total_width(cells: Mapping[str, Sequence[str]]) -> int:
    lines = ([title, *(line for text in texts for line in text.split("\n"))] for title, texts in cells.items())
    return sum(GAP + max(map(len, column)) for column in lines) - GAP


def table(columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> Table:
    """Build the table that fits into `width` characters."""
    # The divider of the box is half of the gap.
    built = Table(box=PLAIN, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_edge=False, header_style="bold")
    cells = fit(columns, rows, width)
    shown = [column for column in columns if column.title in cells]
    for index, column in enumerate(shown):
        justify: JustifyMethod = "right" if column.number else "left"
        built.add_column(Text(column.title), justify=justify, overflow="fold", no_wrap=index > 0)
    for row, *texts in zip(rows, *cells.values(), strict=True):
        styles = (column.style(row) for column in shown)
        built.add_row(*(Text(text, style=style) for text, style in zip(texts, styles, strict=True)))
    return built


def screen(
    verdict: str, columns: Sequence[Column[R]], rows: Sequence[R], notes: Sequence[Note], width: int
) -> RenderableType:
    """Build what rich prints on a console of `width` characters: the verdict, the table, the notes."""
    parts: list[RenderableType] = [Text(verdict, style="bold")]
    if rows:
        parts += [Text(), table(columns, rows, width)]
    if notes:
        listing = Table.grid(padding=(0, GAP, 0, 0))
        listing.add_column(no_wrap=True)
        listing.add_column(overflow="fold")
        for (kind, where), several in itertools.groupby(notes, key=lambda note: (note.kind, note.where)):
            texts = [note.brief for note in several]
            listing.add_row(Text(kind), Text(f"{where}: {texts[0]}" if len(texts) == 1 else f"{where}:"))
            for text in texts if len(texts) > 1 else ():
                listing.add_row(Text(), Text(f"- {text}"))
        parts += [Text(), listing]
    return Group(*parts)


def plain(renderable: Any) -> str:
    """Render for whoever reads a string: as wide as the terminal (80 without one), without colour codes."""
    width = shutil.get_terminal_size((80, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def page(verdict: str, columns: Sequence[Column[R]], rows: Sequence[R], notes: Sequence[Note]) -> str:
    """Build HTML with every column that has something to say."""
    cells = fit(columns, rows, width=1_000_000)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in cells)
    lines = ("".join(f"<td>{html.escape(text)}</td>" for text in texts) for texts in zip(*cells.values(), strict=True))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    grid = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    items = "".join(f"<li><b>{html.escape(note.kind)}</b> {html.escape(str(note))}</li>" for note in notes)
    return f"<p><b>{html.escape(verdict)}</b></p>{grid}" + (f"<ul>{items}</ul>" if items else "")
