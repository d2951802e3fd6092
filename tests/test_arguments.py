from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from thunderpatch import demo, forms, verbs
from thunderpatch.arguments import VERBS, build_parser
from thunderpatch.cli import main


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_every_verb_can_be_parsed_and_is_in_its_help(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = VERBS[verb][1]
    assert callable(getattr(verbs, build_parser().parse_args(shlex.split(example)).run))
    for arguments in (["--help"], [verb, "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0 and f"thunderpatch {example}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: TARGET"),
        ("--option dynamic gpt", "expected KEY=VALUE, not 'dynamic'"),
        ("--train --eval gpt", "not allowed with argument"),
        ("--calls 0 gpt", "expected a whole number of at least 1, not '0'"),
        ("--nested both gpt", "invalid choice: 'both'"),
    ],
)
def test_wrong_usage_is_status_2_with_the_reason(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *line.split()])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_demo_needs_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "1"])
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)])
def test_the_help_fits_80_columns(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_help_names_the_built_in_models() -> None:
    assert tuple(demo.MODELS) == forms.BUILT_IN


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", "bash"])
    assert stopped.value.code == 2 and "pip install 'thunderpatch[completion]'" in capsys.readouterr().err


def test_completion_is_made_for_the_shell_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shtab = SimpleNamespace(complete=lambda parser, shell: f"{parser.prog} for {shell}")
    monkeypatch.setitem(sys.modules, "shtab", shtab)
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", "zsh"])
    assert stopped.value.code == 0 and capsys.readouterr().out == "thunderpatch for zsh\n"


@pytest.mark.parametrize("shell_name", ["bash", "zsh"])
def test_the_completion_is_a_script_that_the_shell_can_read(
    shell_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    if shutil.which(shell_name) is None:
        pytest.skip(f"there is no {shell_name}")
    with pytest.raises(SystemExit):
        main(["--print-completion", shell_name])
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    assert "culprits" in script.read_text() and "--reproducers" in script.read_text()
    subprocess.run([shell_name, "-n", str(script)], check=True)
