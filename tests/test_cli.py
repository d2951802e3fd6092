from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import thunderpatch
from thunderpatch import splitting, verbs
from thunderpatch.cli import main

ROOT = Path(__file__).parents[1]


def shell(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thunderpatch", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **settings)


def test_without_arguments_it_is_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(verbs, "demo", lambda args: ran.append(args) or True)
    assert main([]) == 0
    assert ran[0].steps == 20


@pytest.mark.parametrize(
    "arguments", [["--help"], ["report", "--help"], ["frobnicate"], ["report", "gpt", "--calls", "0"]]
)
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom thunderpatch.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules\nelse:\n    raise AssertionError"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Errors and findings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("list gtp", "no target is called 'gtp'; did you mean gpt?"),
        ("list nowhere.py:make", "there is no file nowhere.py"),
        ("list gpt --types Relu", "Relu"),
        ("list gpt --names block.*", "matches no module"),
        ("list gpt --dtype flot32", "torch has no dtype 'flot32'; did you mean float32?"),
        ("report gpt --input 2x16", "unpatched, the model raises"),
        ("report gpt --input 2y16", "cannot read the input '2y16'"),
        ("report gpt --option dynamics=True", "dynamics"),
        ("report {models}:bare", "gives no inputs: return (model, inputs) from it, or add --input"),
        ("report {models}:picky", "unpatched, the model raises RuntimeError on its inputs"),
        ("culprits gpt --check math:pi", "--check math:pi is no function"),
        ("report gpt --reproducers {models}", "--reproducers {models}: File exists"),
        ("report gpt --data", "--data belongs to --reproducers FOLDER"),
        ("verify gpt --data", "--data belongs to --reproducers FOLDER"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_status_2(
    line: str, message: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(models=models).split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("thunderpatch: error: ") and message.format(models=models) in err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/a.png", "--plot nowhere/a.png: there is no folder"),
        ("a.unknown", "--plot a.unknown: .unknown is not a format that matplotlib writes"),
    ],
)
def test_a_picture_that_cannot_be_written_is_told_before_any_work(
    path: str, message: str, stub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    bench = stub("benchmark")
    assert main(["bench", "gpt", "--plot", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"thunderpatch: error: {message}") and err.count("\n") == 1 and bench.calls == []


def test_a_missing_extra_is_told_before_any_work(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = stub("benchmark")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "gpt", "--plot", "a.png"]) == 2
    assert capsys.readouterr().err == (
        "thunderpatch: error: --plot a.png: plot needs matplotlib: pip install 'thunderpatch[plot]'\n"
    )
    assert bench.calls == []


def test_a_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "gtp", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "UsageError: no target is called 'gtp'" in err


def test_an_unforeseen_error_says_its_kind_and_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("lost\nand more")

    monkeypatch.setattr(thunderpatch, "select", fail)
    assert main(["list", "gpt"]) == 2
    assert capsys.readouterr().err == "thunderpatch: error: KeyError: 'lost\\nand more' (--traceback shows where)\n"


def test_a_region_that_does_not_compile_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise thunderpatch.CompileError("blocks.0 (Block)\ncannot be compiled")

    monkeypatch.setattr(thunderpatch, "select", fail)
    assert main(["list", "gpt"]) == 1
    assert capsys.readouterr().err == "thunderpatch: error: blocks.0 (Block) cannot be compiled\n"


def test_our_warnings_are_one_line_and_others_are_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(*_: Any, **__: Any) -> dict[str, Any]:
        warnings.warn("head is never called", thunderpatch.ThunderPatchWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return {}

    monkeypatch.setattr(thunderpatch, "select", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["list", "gpt"]) == 0
    err = capsys.readouterr().err
    assert "thunderpatch: warning: head is never called\n" in err
    assert "UserWarning: something else" in err


def test_an_interruption_that_becomes_another_error_on_its_way_is_one(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def split(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise UnboundLocalError("cannot clean up")  # as inductor does

    monkeypatch.setattr(splitting, "split", split)
    assert main(["report", f"{models}:mixed", "--types", "Sorry", "--option", "on_error=eager"]) == 130
    assert capsys.readouterr().err == "thunderpatch: interrupted\n"


def test_an_interruption_is_status_130_without_a_traceback(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", f"{models}:interrupted"]) == 130
    assert capsys.readouterr().err == "thunderpatch: interrupted\n"


# As a process of its own


def test_a_pipe_gets_plain_text_of_80_columns() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    done = shell("list", "gpt", "--types", "Linear", env=environment)
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_a_reader_who_stops_reading_sees_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "thunderpatch", "list", "gpt"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_ends_a_long_run_clean(models: str) -> None:
    command = [sys.executable, "-m", "thunderpatch", "list", f"{models}:slow"]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "thunderpatch: interrupted\n")


def test_ctrl_c_while_torch_is_imported_ends_clean(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\nprint('started', flush=True)\ntry:\n    time.sleep(30)\nexcept BaseException:\n    pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "thunderpatch", "list", "gpt"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "thunderpatch: interrupted\n")


@pytest.mark.slow  # and the README's first command
def test_the_demo_shows_that_all_is_well() -> None:
    done = shell("demo", "--steps", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "12 of 12 modules compiled" in lines and lines[-1] == "all is well"
    assert any(line.startswith("Restored: the attributes of every module") for line in lines)
    assert done.stderr == ""
