"""Pictures of a `benchmark`; the only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gains import Benchmark, Row

_MOST_BARS = 60


def check(path: Path) -> None:
    """Raise what `draw` would: `ImportError` without matplotlib, `OSError` without a folder, `ValueError` by suffix."""
    formats = _figure()().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"{path.suffix or 'no suffix'} is not a format that matplotlib writes: {', '.join(formats)}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.absolute().parent}")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, and no state that the caller shares
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'thunderpatch[plot]'") from error
    return Figure


def draw(result: Benchmark, path: Path) -> None:
    """Draw two panels: patched/eager per module with its quartiles, and the time saved in one step.

    Of more than 60 modules, those that gain and those that lose most are drawn. The suffix of `path` is the
    format. Raises `ImportError` without matplotlib.
    """
    rows = _shown([row for row in result.rows if row.measured])
    bars = [*rows, result.whole]
    figure = _figure()(figsize=(11, 2.2 + 0.26 * len(bars)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(bars))
    left.barh(
        places,
        [row.ratio for row in bars],
        xerr=[row.ratio_spread / 2 for row in bars],
        color=[_colour(row) for row in bars],
    )
    left.axvline(1, color="black", linewidth=0.8)
    left.set(xlabel="patched / eager", title="time of a call", yticks=places)
    left.set_yticklabels([_label(row) for row in bars], fontsize="small")
    left.invert_yaxis()  # what saves most stands on top, as in the table
    right.barh(places, [row.saved * 1e3 for row in bars], color=[_colour(row) for row in bars])
    right.axvline(0, color="black", linewidth=0.8)
    right.set(xlabel="ms", title="saved in one step")
    figure.suptitle(result.verdict, fontsize="medium")
    figure.savefig(path)


def _shown(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= _MOST_BARS:
        return list(rows)
    return [*rows[: _MOST_BARS // 2], *rows[-_MOST_BARS // 2 :]]


def _colour(row: Row) -> str:
    if abs(row.ratio - 1) <= row.ratio_spread / 2:
        return "tab:gray"
    return "tab:green" if row.ratio < 1 else "tab:red"


def _label(row: Row) -> str:
    return row.name if len(row.name) <= 40 else f"...{row.name[-37:]}"
