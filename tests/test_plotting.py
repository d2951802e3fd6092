from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thunderpatch.gains import Benchmark, Row
from thunderpatch.plotting import _shown


def row(number: int, ratio: float = 0.5) -> Row:
    return Row(
        fqn=f"blocks.{number}",
        cls="Block",
        eager=1.0,
        patched=ratio,
        ratio=ratio,
        ratio_spread=0.1,
        first_call=2.0,
    )


def result(count: int = 3) -> Benchmark:
    whole = Row(fqn="", cls="M", whole=True, eager=3.0, patched=2.0, ratio=0.7, ratio_spread=0.0, first_call=1.0)
    return Benchmark([*map(row, range(count)), Row(fqn="unused", cls="Block")], whole, False)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_the_format_of_the_suffix(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{suffix}"
    result().plot(path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_plot_names_each_measured_module_and_no_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib as mpl

    path = tmp_path / "picture.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # text as text
        result().plot(str(path))
    text = path.read_text()
    assert all(name in text for name in ("blocks.0", "blocks.2", "(the whole model)"))
    assert "unused" not in text


def test_plot_leaves_pyplot_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    result().plot(tmp_path / "picture.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_of_many_modules_the_best_and_the_worst_are_drawn() -> None:
    shown = _shown([row(number) for number in range(100)])
    assert [r.fqn for r in (shown[0], shown[29], shown[30], shown[-1])] == [
        "blocks.0",
        "blocks.29",
        "blocks.70",
        "blocks.99",
    ]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"thunderpatch\[plot\]"):
        result().plot(tmp_path / "picture.png")
