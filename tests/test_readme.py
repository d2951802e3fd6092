"""Each block of the README runs, in order, and prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from thunderpatch.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def without_seconds(text: str) -> str:
    """Leave out what differs from run to run."""
    return re.sub(r" +\d+\.\d\d\b", " 0.00", text)


def test_the_programs_print_what_is_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "112")
    namespace: dict[str, object] = {"__name__": "readme"}
    shown = printed = 0
    for i, (language, text) in enumerate(BLOCKS):
        if language != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, f"README.md, block {i}", "exec"), namespace)
        if "print(" in text:
            following = BLOCKS[i + 1]
            assert following[0] == "text"
            assert without_seconds(following[1]) == without_seconds(out.getvalue()), (
                f"block {i} printed:\n{out.getvalue()}"
            )
            printed += 1
        shown += 1
    assert shown == printed == sum(language == "text" for language, _ in BLOCKS)


def test_every_block_is_a_program_or_what_it_prints():
    assert {language for language, _ in BLOCKS} == {"python", "text"}


COMMANDS = [line.strip() for line in README.splitlines() if re.match(r" {4}thunderpatch ", line)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_are_understood(command, capsys, tmp_path, monkeypatch):
    """Each example parses; those on built-in models run."""
    (tmp_path / "my_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.LayerNorm(4)), torch.randn(2, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
