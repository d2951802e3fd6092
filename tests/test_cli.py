import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty import compiled_wrongly
from scripts import run_scripts

import thunderpatch
from thunderpatch import demo, forms, splitting, verbs
from thunderpatch.cli import VERBS, build_parser, main

ROOT = Path(__file__).parents[1]


class Stub:
    """Stands in for a function of the package: keeps its arguments and returns a result."""

    def __init__(self, ok: bool = True) -> None:
        self.ok, self.calls, self.plots = ok, [], []

    def __call__(self, *args: Any, **kwargs: Any) -> "Stub":
        self.calls.append((args, kwargs))
        return self

    def __str__(self) -> str:
        return "a result"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok}

    def plot(self, path: str) -> None:
        self.plots.append(path)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(name: str, ok: bool = True) -> Stub:
        made = Stub(ok)
        monkeypatch.setattr(thunderpatch, name, made, raising=False)
        return made

    return put


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "models_of_a_cli_test.py"
    path.write_text(
        textwrap.dedent(
            """
            import time

            import torch
            from torch import nn

            def bare():
                return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

            class Halves(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

                def forward(self, *, x):
                    return self.used(x)

            def halves():
                return Halves(), {"x": torch.ones(2, 4)}

            def picky():
                return nn.Linear(4, 4), torch.ones(2, 5)

            class Sorry(nn.Module):
                def forward(self, x):
                    return x.atan() * 2

            def mixed():
                return nn.Sequential(nn.Linear(4, 4), Sorry()), torch.ones(2, 4)

            def interrupted():
                raise KeyboardInterrupt

            def slow():
                print("started", flush=True)
                time.sleep(30)

            def is_good(model):
                return len(model) == 2
            """
        )
    )
    yield str(path)
    sys.modules.pop("models_of_a_cli_test", None)


def shell(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thunderpatch", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **settings)


# Reading the command line


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


def test_without_arguments_it_is_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(verbs, "demo", lambda args: ran.append(args) or True)
    assert main([]) == 0
    assert ran[0].steps == 20


def test_selectors_are_handed_over_and_those_not_given_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(thunderpatch, "select", lambda model, **selectors: seen.append(selectors) or {})
    line = "list gpt --types ReLU,GELU --types Linear --names blocks.*.mlp,head --exclude blocks.0.** --repeated"
    assert main([*line.split(), "--nested", "all"]) == main(["list", "gpt"]) == 0
    assert seen == [
        {
            "types": ["ReLU", "GELU", "Linear"],
            "names": ["blocks.*.mlp", "head"],
            "exclude": ["blocks.0.**"],
            "repeated": True,
            "nested": "all",
        },
        {"nested": "outermost"},
    ]


def test_options_are_python_literals_or_bare_words(stub: Any) -> None:
    verify = stub("verify")
    options = ["dynamic=True", "executors=['torch_compile']", "mode=max-autotune", "options={'a.b': 1}"]
    assert main(["verify", "gpt", *(word for option in options for word in ("--option", option))]) == 0
    ((_, kwargs),) = verify.calls
    assert kwargs["thunderfx_options"] == {
        "dynamic": True,
        "executors": ["torch_compile"],
        "mode": "max-autotune",
        "options": {"a.b": 1},
    }


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


# The verbs


def test_list_shows_what_would_be_patched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "gpt", "--names", "blocks.*.mlp", "--exclude", "blocks.0.mlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "11 of 126 modules selected"
    assert lines[4].split() == ["blocks.1.mlp", "Sequential", "33,088"] and len(lines) == 15


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "resnet", "--types", "Linear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"fqn": "head", "cls": "Linear", "parameters": 650}]


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_verify_hands_over_model_inputs_and_settings_and_its_verdict_is_the_status(
    ok: bool, status: int, stub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = stub("verify", ok)
    assert main(["verify", "gpt", "--repeated", "--eval", "--input", "2x16:int64:0..128"]) == status
    ((args, kwargs),) = verify.calls
    assert type(args[0]).__name__ == "GPT" and not args[0].training and args[1].shape == (2, 16)
    assert kwargs == {"nested": "outermost", "repeated": True, "grad": True}
    assert capsys.readouterr().out == "a result\n"


def test_verify_leaves_gradients_out_on_request(stub: Any) -> None:
    verify = stub("verify")
    main(["verify", "gpt", "--no-backward", "--input", "ids=2x16:int64:0..128"])
    ((args, kwargs),) = verify.calls
    assert len(args) == 1 and kwargs["ids"].shape == (2, 16) and kwargs["grad"] is False


def test_an_input_that_is_called_like_a_setting_is_refused(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stub("verify")
    assert main(["verify", "gpt", "--input", "grad=2x16"]) == 2
    assert "'grad' is also a setting of verify" in capsys.readouterr().err


def test_weights_and_inputs_follow_the_seed(stub: Any) -> None:
    verify = stub("verify")
    for seed in ("1", "1", "2"):
        main(["verify", "gpt", "--seed", seed])
    (one, same, other) = (args for args, _ in verify.calls)
    assert torch.equal(one[1], same[1]) and not torch.equal(one[1], other[1])
    assert torch.equal(one[0].head.weight, same[0].head.weight)
    assert not torch.equal(one[0].head.weight, other[0].head.weight)


def test_bench_prints_and_plots(stub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = stub("benchmark")
    checked: list[Path] = []
    monkeypatch.setattr("thunderpatch.plotting.check", checked.append)  # it would ask for matplotlib
    assert main(["bench", "gpt", "--backward", "--plot", "bench.png", "--json"]) == 0
    assert checked == [Path("bench.png")] and bench.plots == ["bench.png"] and bench.calls[0][1]["backward"] is True
    assert json.loads(capsys.readouterr().out) == {"ok": True}


def test_tune_prints_its_choice(stub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tune = stub("tune")
    assert main(["tune", "gpt", "--repeated"]) == 0
    assert tune.calls[0][1] == {"nested": "outermost", "repeated": True, "backward": False}
    assert capsys.readouterr().out == "a result\n"


def test_culprits_asks_the_check_of_the_user(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(model: Any, check: Any, **selectors: Any) -> list[str]:
        assert check() is True
        del model[1]
        assert check() is False
        return ["0", "1"]

    monkeypatch.setattr(thunderpatch, "find_culprits", search, raising=False)
    assert main(["culprits", f"{models}:bare", "--check", f"{models}:is_good"]) == 1
    assert capsys.readouterr().out == "0\n1\n"


@pytest.mark.parametrize("backward", [(), ("--backward",)])
def test_culprits_compares_with_the_unpatched_model_by_default(
    backward: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(model: Any, check: Any, **selectors: Any) -> list[str]:
        assert check()
        # Leaves the output as it is and changes the gradient alone.
        handle = model.head.bias.register_hook(lambda gradient: gradient * 2)
        assert bool(check()) is not bool(backward)
        handle.remove()
        with torch.no_grad():
            model.head.bias.add_(1e-7)
            assert check()
            model.head.bias.add_(1e-3)
            assert not check()
        return []

    monkeypatch.setattr(thunderpatch, "find_culprits", search, raising=False)
    assert main(["culprits", "vit", *backward]) == 0
    assert capsys.readouterr().out == "no module breaks the model\n"


def test_report_of_equal_blocks_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "gpt", "--repeated", "--backward", "--calls", "3", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["ok"] and plain["verdict"] == "12 of 12 modules compiled"
    assert [(row["fqn"], row["calls"], row["compiled_calls"]) for row in plain["rows"]] == [
        (f"blocks.{i}", 3, 3) for i in range(12)
    ]


def test_report_of_a_file_of_the_user_names_what_was_never_called(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", f"{models}:halves", "--types", "Linear"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 2 modules compiled; 1 never called"
    assert any(line.startswith("unused ") and "never called" in line for line in lines)


def test_report_of_activations_in_place_says_that_they_are_routed_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "resnet", "--types", "ReLU", "--backward", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 17 and {row["status"] for row in rows} == {"routed"}
    assert all("in place" in " ".join([row["reason"], *row["routes"]]) for row in rows)


def test_a_model_that_fails_only_when_patched_is_a_finding(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def breaking(model: Any, **_: Any) -> Iterator[None]:
        model.used = None
        yield

    monkeypatch.setattr(thunderpatch, "patched", breaking)
    assert main(["report", f"{models}:halves"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("thunderpatch: error: patched, the model raises TypeError, though unpatched it runs")


def test_a_region_that_cannot_be_compiled_is_reported_with_the_others_and_has_a_script(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = splitting.split

    def failing(gm: Any, *rest: Any) -> Any:
        if any("atan" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("cannot be had")
        return split(gm, *rest)

    monkeypatch.setattr(splitting, "split", failing)
    folder = tmp_path / "scripts"
    assert main(["report", f"{models}:mixed", "--types", "Linear,Sorry", "--reproducers", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 of 2 modules compiled; 1 failed\n") and "cannot be had" in out
    assert f"2 scripts written to {folder}\n" in err
    assert "thunderpatch: error: 1 (Sorry): the region could not be compiled" in err.splitlines()[-1]
    assert "It runs uncompiled after CompileError" in (folder / "1.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("data", [(), ("--data",)])
def test_report_writes_reproducers_that_run(
    data: tuple[str, ...], models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["report", f"{models}:halves", "--names", "used", "--backward", "--reproducers", str(tmp_path / "scripts")]
    assert main([*line, *data]) == 0
    assert f"1 script written to {tmp_path / 'scripts'}\n" in capsys.readouterr().err
    written = {path.name for path in (tmp_path / "scripts").iterdir()}
    assert written == {"used.py", "used.pt"} if data else {"used.py"}
    (ran,) = run_scripts([tmp_path / "scripts" / "used.py"])
    assert ran.status == 0 and "values agree" in ran.output


@pytest.mark.slow
def test_verify_writes_reproducers_of_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scripts"
    line = f"verify faulty:Model --names first,middle,last --input 3x4 --data --reproducers {folder}"
    with compiled_wrongly("output"):
        assert main(line.split()) == 1
    assert capsys.readouterr().err == f"1 script written to {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["middle.pt", "middle.py"]
    assert "middle: differs: output[1] is off by" in (folder / "middle.py").read_text()


@pytest.mark.parametrize(
    "verb", ["list", "report", "verify", "culprits", pytest.param("bench", marks=pytest.mark.slow), "tune"]
)
def test_each_verb_does_its_work_on_a_file_of_the_user(
    verb: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, f"{models}:mixed", "--types", "Linear,Sorry", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    rows = plain if isinstance(plain, list) else plain["modules" if verb == "tune" else "rows"]
    assert {row["fqn"] for row in rows} - {""} == (set() if verb == "culprits" else {"0", "1"})


def test_backward_without_a_gradient_to_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "torch.nn:Identity", "--input", "2x3", "--backward"]) == 2
    assert "no output of the model requires a gradient" in capsys.readouterr().err


# Completion


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
