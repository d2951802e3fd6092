"""The package itself: what it offers, and that asking for it is what imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thunderpatch

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_is_cheap_and_torch_comes_with_the_first_name() -> None:
    python(
        "import sys, thunderpatch\n"
        "assert not hasattr(thunderpatch, '__nothing__') and 'torch' not in sys.modules\n"
        "thunderpatch.apply\n"
        "assert 'torch' in sys.modules"
    )


def test_every_public_name_is_there_however_it_is_asked_for() -> None:
    names = python("from thunderpatch import *\nprint(*sorted(name for name in dir() if name[0] != '_'))").split()
    assert names == sorted(thunderpatch.__all__)
    assert set(names) <= set(dir(thunderpatch))
    with pytest.raises(AttributeError, match="module 'thunderpatch' has no attribute 'aply'"):
        thunderpatch.aply  # noqa: B018


def test_a_submodule_can_be_imported_before_the_public_names_and_hides_none() -> None:
    """A module called like a public function would stand in its place."""
    modules = sorted(path.stem for path in (ROOT / "thunderpatch").glob("*.py") if not path.stem.startswith("__"))
    assert not set(modules) & set(thunderpatch.__all__)
    python("import thunderpatch.selection\nimport thunderpatch\nassert callable(thunderpatch.report)")


def test_the_reference_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    command = [sys.executable, "-W", "error", "-m", "pdoc", "thunderpatch", "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "thunderpatch.html").read_text()
    assert all(f'id="{name}"' in page for name in thunderpatch.__all__)


def _public() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in thunderpatch.__all__:
        thing = getattr(thunderpatch, name)
        found.append((name, thing))
        if isinstance(thing, type):
            members = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
            found += [(f"{name}.{key}", value) for key, value in members.items() if callable(value)]
    return found


@pytest.mark.parametrize(("name", "thing"), _public())
def test_every_public_thing_has_a_docstring_that_begins_with_a_sentence(name: str, thing: object) -> None:
    first = (thing.__doc__ or "").strip().partition("\n\n")[0]
    assert first.rstrip().endswith((".", ":")) and first[0].isupper(), f"{name}: {first!r}"
