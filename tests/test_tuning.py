from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunderpatch
from thunderpatch import contest, tuning
from thunderpatch.contest import Contest
from thunderpatch.errors import AlreadyPatchedError, ArgumentError, SelectionError
from thunderpatch.plans import ORIGINAL, Trial
from thunderpatch.tuned import Tuned
from thunderpatch.tuning import apply_plan, default_candidates, tune

ONE = {"thunderfx": {}}
TWO = {"thunderfx": {}, "other": {"executors": ["torch"]}}


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block(scale=3.0)])
        self.unused = Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Let measurements give these numbers, the original's first; each side still runs once."""
    given: list[list[float]] = []

    def measured(sides: Sequence[Callable[[], float]], min_run_time: float) -> list[list[float]]:
        for side in sides:
            side()
        return given[: len(sides)]

    monkeypatch.setattr(contest, "in_turn", measured)
    return given


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The FQNs of the modules that were measured."""
    seen: list[str] = []
    choose = Contest.choose

    def spy(self: Contest, fqn: str, *rest: Any) -> Any:
        seen.append(fqn)
        return choose(self, fqn, *rest)

    monkeypatch.setattr(Contest, "choose", spy)
    return seen


def tuned(model: nn.Module, candidates: Any = ONE, **given: Any) -> Tuned:
    return tune(model, torch.randn(3, 4), candidates=candidates, **{"names": "blocks.*", **given})


def test_a_candidate_that_gains_more_than_the_noise_is_patched_in(times: list[list[float]]) -> None:
    times += [[1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.6, 0.5]]
    model = Model()
    result = tuned(model)
    assert all(thunderpatch.is_patched(block) for block in model.blocks)
    assert result["blocks.0"].candidate == "thunderfx" and result["blocks.0"].ratio == 0.5
    assert len(result) == 4 and set(result.modules) == {f"blocks.{k}" for k in range(4)}


@pytest.mark.parametrize("slower", [[0.99, 1.2, 0.7, 0.95], [1.0, 1.0, 1.0, 1.0], [1.5, 1.5, 1.5, 1.5]])
def test_a_gain_within_the_noise_leaves_the_module_as_it_is(times: list[list[float]], slower: list[float]) -> None:
    times += [[1.0, 1.0, 1.0, 1.0], slower]
    model = Model()
    result = tuned(model)
    assert not any(map(thunderpatch.is_patched, model.modules())) and len(result) == 0
    assert result["blocks.0"].candidate == ORIGINAL and "thunderfx" in result["blocks.0"].why


def test_the_fastest_candidate_wins(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.8] * 4, [0.6] * 4]
    assert tuned(Model(), TWO)["blocks.0"].candidate == "other"


def test_a_candidate_that_verify_rejects_is_passed_over_for_the_next(
    times: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times += [[1.0] * 4, [0.8] * 4, [0.6] * 4]
    verify = contest.verify

    def doubtful(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = verify(module, *args, **kwargs)
        record = contest.registry.active(module)
        assert record is not None, "verify has to see the module patched"
        if "executors" in record.compiler.options.thunder:
            monkeypatch.setattr(type(found), "ok", False)
        else:
            monkeypatch.undo()
        return found

    monkeypatch.setattr(contest, "verify", doubtful)
    choice = tuned(Model(), TWO, names="blocks.0")["blocks.0"]
    assert choice.candidate == "thunderfx"
    assert choice.trials[1].refused.startswith("verify: ") and not choice.trials[0].refused


def test_a_candidate_that_does_not_compile_is_refused_with_the_reason(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]

    class Break(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    model = nn.Sequential(Break())
    result = tuned(model, {"whole": {"fullgraph": True}}, names="0")
    assert result["0"].candidate == ORIGINAL and "could not be compiled" in result["0"].trials[0].refused
    assert "could not be compiled" in str(result)


def test_equal_modules_are_measured_once_and_unequal_ones_apart(times: list[list[float]], measured: list[str]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    result = tuned(Model())
    # Equal classes and shapes do not make blocks.3 equal: another constant is in its graph.
    assert measured == ["blocks.0", "blocks.3"]
    assert result["blocks.2"].measured_on == "blocks.0" and result["blocks.2"].candidate == "thunderfx"


def test_a_module_that_the_model_does_not_call_keeps_its_original(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    choice = tuned(Model(), names="unused")["unused"]
    assert choice.candidate == ORIGINAL and "did not call" in choice.why


@pytest.mark.parametrize("backward", [False, True])
def test_tuning_changes_nothing_but_the_patches(times: list[list[float]], backward: bool) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    model = Model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own, x = [dict(vars(m)) for m in model.modules()], torch.randn(3, 4)
    random = torch.get_rng_state()
    result = tune(model, x, names="blocks.*", backward=backward, candidates=ONE)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.restore() == 4 and result.restore() == 0
    assert [dict(vars(m)) for m in model.modules()] == own


def test_what_was_tuned_computes_what_the_original_computes(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    model, x = Model(), torch.randn(3, 4)
    expected = model(x)
    with tuned(model) as result:
        torch.testing.assert_close(model(x), expected)
        with result.disabled():
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert not any(map(thunderpatch.is_patched, model.modules()))


def test_a_plan_saved_as_json_is_applied_again_without_measuring(
    times: list[list[float]], measured: list[str], tmp_path: Path
) -> None:
    times += [[1.0] * 4, [0.8] * 4, [0.5] * 4]
    model = Model()
    with tuned(model, TWO, names="blocks.[0-2]") as result:
        result.save(tmp_path / "plan.json")
    before = list(measured)
    again = apply_plan(model, tmp_path / "plan.json")
    assert measured == before and set(again.modules) == {"blocks.0", "blocks.1", "blocks.2"}
    assert again.to_dict() == result.to_dict() == json.loads((tmp_path / "plan.json").read_text())
    record = contest.registry.active(model.blocks[0])
    assert record is not None and record.compiler.options.thunder == {"executors": ["torch"]}


def test_a_plan_can_be_applied_to_another_model_of_the_same_make(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    plan = tuned(Model()).to_dict()
    assert len(apply_plan(Model(), plan)) == 4


def test_options_that_json_cannot_hold_are_found_by_name(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    mine = {"mine": {"transforms": [_transform()]}}
    model = Model()
    with tuned(model, mine) as result:
        plan = json.loads(json.dumps(result.to_dict()))
    with pytest.raises(ArgumentError, match="'mine'"):
        apply_plan(model, plan)
    assert not any(map(thunderpatch.is_patched, model.modules()))
    assert len(apply_plan(model, plan, candidates=mine)) == 4


def _transform() -> Any:
    thunderpatch.compat.load_thunder()
    from thunder.core.transform_common import Transform

    class Nothing(Transform):
        pass

    return Nothing()


def test_a_plan_for_another_model_is_refused_whole(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    plan = tuned(Model()).to_dict()
    for other in (nn.Sequential(Block()), Model()):
        if isinstance(other, Model):
            other.blocks[2] = nn.Linear(4, 4)
        with pytest.raises(SelectionError, match="another model"):
            apply_plan(other, plan)
        assert not any(map(thunderpatch.is_patched, other.modules()))


@pytest.mark.parametrize("plan", [{}, {"format": 99}, {"format": 1, "modules": 3}, 5])
def test_what_is_no_plan_is_an_error(plan: Any) -> None:
    with pytest.raises(ArgumentError, match="plan"):
        apply_plan(Model(), plan)


def test_a_patched_module_is_not_tuned() -> None:
    model = Model()
    thunderpatch.apply(model, names="blocks.0")
    with pytest.raises(AlreadyPatchedError, match=r"blocks\.0 \(Block\)"):
        tuned(model)


@pytest.mark.parametrize("candidates", [{}, {"original": {}}])
def test_candidates_need_names_of_their_own(candidates: Any) -> None:
    with pytest.raises(ArgumentError, match="candidates"):
        tuned(Model(), candidates)


def test_common_options_are_added_to_each_candidate(times: list[list[float]]) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    model = Model()
    tuned(model, thunderfx_options={"dynamic": False})
    record = contest.registry.active(model.blocks[0])
    assert record is not None and record.compiler.options.dynamic is False


def test_the_default_candidates_of_a_cpu_are_thunderfx_and_its_torch_compile_executor() -> None:
    candidates = default_candidates("cpu")
    assert candidates["thunderfx"] == {}
    assert candidates["torch_compile"]["executors"][0] == "torchcompile"
    assert list(candidates) == ["thunderfx", "torch_compile"]


def test_the_default_candidates_of_cuda_hold_the_cuda_graph_transform() -> None:
    transforms = default_candidates("cuda")["cuda graphs"]["transforms"]
    assert [type(transform).__name__ for transform in transforms] == ["CUDAGraphTransform"]


def test_the_table_says_what_each_module_runs_and_why(
    times: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    times += [[1.0] * 4, [0.5] * 4]
    text = str(tuned(Model()))
    for shown in ("4 run with 'thunderfx'", "blocks.0", "0.50", "takes 0.50 times as long"):
        assert shown in text


def test_a_trial_gains_only_beyond_the_noise_and_unrefused() -> None:
    assert Trial("a", ratio=0.9, noise=0.05).gains
    assert not Trial("a", ratio=0.9, noise=0.2).gains
    assert not Trial("a", ratio=0.9, noise=0.05, refused="differs").gains
    assert not Trial("a").gains


def test_when_a_part_of_a_plan_cannot_be_patched_nothing_stays(
    times: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times += [[1.0] * 4, [0.5] * 4]
    model = Model()
    plan = tuned(model).to_dict()
    thunderpatch.restore(model)
    plan["modules"][3]["candidate"] = "broken"
    plan["candidates"]["broken"] = {"no_such_option": 1}
    with pytest.raises(ArgumentError, match="no_such_option"):
        apply_plan(model, plan)
    assert not any(map(thunderpatch.is_patched, model.modules()))


def test_a_real_measurement_chooses_without_help() -> None:
    result = tune(Model(), torch.randn(3, 4), names="blocks.*", candidates=ONE, min_run_time=0.001)
    choice = result["blocks.1"]
    assert choice.original > 0 and choice.trials[0].seconds > 0 and choice.trials[0].first_call > 0
    assert tuning.ORIGINAL == "original" and len(result) in (0, 1, 3, 4)
