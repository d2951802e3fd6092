from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import compiled_wrongly
from scripts import run_scripts

import thunderpatch
from thunderpatch import splitting
from thunderpatch.cli import main


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
