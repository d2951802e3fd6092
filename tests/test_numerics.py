from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from faulty import OFF, Marked, Model, compiled_wrongly
from torch import Tensor, nn

import thunderpatch
from thunderpatch import DifferenceError, SelectionError, graphs, stages, verify
from thunderpatch.verification import Verdict


def test_modules_that_are_right_are_equal_and_so_is_the_whole_model() -> None:
    result = verify(Model(), torch.randn(6, 4), names="*")
    assert result.ok and [row.verdict for row in result] == [Verdict.EQUAL] * 4
    assert result.verdict == "3 of 3 modules equal their originals; the whole model: equal"
    result.raise_for_failures()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("output", "output[1]"),
        pytest.param("gradient", "gradient of argument 0", marks=pytest.mark.slow),
        pytest.param("buffer", "buffer seen", marks=pytest.mark.slow),
    ],
)
def test_the_one_wrong_module_is_named_with_what_differs_and_the_stage(fault: str, what: str) -> None:
    with compiled_wrongly(fault):
        result = verify(Model(), torch.randn(6, 4), names="*")
    differing = [row for row in result if row.verdict is Verdict.DIFFERS and not row.whole]
    assert [row.fqn for row in differing] == ["middle"]
    (row,) = differing
    assert any(words.startswith(what) for words in row.differing) and row.stage == stages.TRACE
    assert row.error == pytest.approx(OFF, rel=5) and row.ratio > 100
    assert result["first"].verdict is result["last"].verdict is Verdict.EQUAL
    with pytest.raises(DifferenceError, match=r"middle \(Marked\) differs(.|\n)*exclude="):
        result.raise_for_failures()


def test_a_fault_of_capturing_is_told_apart() -> None:
    class Differs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + OFF if torch.compiler.is_compiling() else x.sin()

    (row,) = verify(Differs(), torch.randn(3)).failures
    assert row.stage == stages.CAPTURE and row.worst == "output"


def test_a_fault_of_an_executor_is_told_apart() -> None:
    import thunder

    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    executor = thunder.extend.OperatorExecutor("wrong")
    wrong = executor.register_operator("wrong_tanh", like=thunder.core.prims.tanh, fn=lambda x: x.tanh() + OFF)
    executor.register_implementation(thunder.core.prims.tanh, wrong)
    model = nn.Sequential(nn.Linear(4, 4), Tanh(), nn.Linear(4, 4))
    options = {"executors": [executor, *thunder.get_default_executors()]}
    result = verify(model, torch.randn(2, 4), names="*", thunderfx_options=options)
    assert [(row.name, row.stage) for row in result.failures if not row.whole] == [("1", stages.EXECUTORS)]


def test_a_fault_of_inductor_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch._inductor.compile

    def wrong(*args: Any, **kwargs: Any) -> Any:
        call = compile_(*args, **kwargs)
        return lambda *inputs: torch.utils._pytree.tree_map_only(Tensor, lambda t: t + OFF, call(*inputs))

    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.airy_ai(x.sin()).cos()

    monkeypatch.setattr(torch._inductor, "compile", wrong)
    (row,) = verify(Mixed(), torch.randn(8), grad=False).failures
    assert row.stage == stages.INDUCTOR


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(6, 4, requires_grad=True)
    model(x).sum().backward()
    state, attributes = copy.deepcopy(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    gradients = [(p.grad, p.grad.clone()) for p in [*model.parameters(), x] if p.grad is not None]
    random = torch.get_rng_state()
    verify(model, x, names="*")
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert [dict(vars(m)) for m in model.modules()] == attributes
    now = [p.grad for p in [*model.parameters(), x]]
    assert all(a is b and torch.equal(b, c) for a, (b, c) in zip(now, gradients, strict=True))


def test_what_is_patched_already_is_verified_as_it_is_and_stays() -> None:
    model = Model()
    patch = thunderpatch.apply(model, names="middle")
    result = verify(model, torch.randn(6, 4))
    assert [row.fqn for row in result if not row.whole] == ["middle"]
    assert len(patch) == 1


def test_without_selectors_the_model_itself_is_compared_once() -> None:
    result = verify(Marked(), torch.randn(6, 4))
    assert [(row.name, row.whole) for row in result] == [("(the model itself)", False)]


def test_a_module_that_the_model_does_not_call_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    result = verify(Half(), torch.randn(2, 4), types=nn.Linear)
    assert result["unused"].verdict is Verdict.NEVER_CALLED and result.ok


def test_dropout_is_compared_with_the_masks_of_thunder_and_a_fault_beside_it_is_found() -> None:
    class Dropping(Marked):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one, two = super().forward(nn.functional.dropout(x, 0.5, self.training))
            return one, two

    x = torch.randn(6, 4, requires_grad=True)
    result = verify(Dropping(), x)
    assert result.ok and "same dropout masks" in result[""].note
    with compiled_wrongly("gradient"):
        result = verify(Dropping(), x)
    assert result[""].verdict is Verdict.DIFFERS


def test_random_numbers_drawn_in_another_way_are_named_as_not_comparable() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.alpha_dropout(nn.functional.dropout(x, 0.5), 0.5, training=True)

    result = verify(Noisy(), torch.randn(6, 4, requires_grad=True))
    assert result[""].verdict is Verdict.NOT_COMPARABLE and result.ok


def test_tolerances_that_are_given_decide() -> None:
    with compiled_wrongly("output"):
        assert verify(Marked(), torch.randn(6, 4), atol=2 * OFF).ok
        assert not verify(Marked(), torch.randn(6, 4), atol=OFF / 2).ok


def test_without_gradients_none_is_compared() -> None:
    with compiled_wrongly("gradient"):
        assert verify(Marked(), torch.randn(6, 4), grad=False).ok


def test_keywords_and_nested_arguments_reach_the_modules() -> None:
    class Inner(nn.Module):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Tensor]:
            return {"sum": pair[0] + pair[1]["other"] * scale}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, *, factor: float) -> Tensor:
            result: dict[str, Tensor] = self.inner((x, {"other": x * 2}), scale=factor)
            return result["sum"]

    result = verify(Outer(), torch.randn(3), names="inner", factor=0.5)
    assert result.ok and result["inner"].verdict is Verdict.EQUAL


def test_a_module_that_raises_patched_is_a_failure_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no such op")

    monkeypatch.setattr("thunderpatch.splitting.split", refuse)
    monkeypatch.setattr(graphs, "structure", lambda gm: None)  # what other tests compiled is not found again
    result = verify(Model(), torch.randn(6, 4), names="middle")
    assert result["middle"].verdict is Verdict.RAISES and "no such op" in result["middle"].note


def test_what_the_model_raises_unpatched_is_raised() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="shapes"):
        verify(model, torch.randn(6, 5), names="*")
    with pytest.raises(SelectionError):
        verify(model, torch.randn(6, 4), names="nothing")
    assert not any(map(thunderpatch.is_patched, model.modules()))


def test_a_fault_in_bfloat16_is_seen_against_the_error_of_bfloat16() -> None:
    model, x = Model().bfloat16(), torch.randn(6, 4, dtype=torch.bfloat16)
    assert verify(model, x, names="*").ok


def test_in_place_modules_are_compared_with_what_they_write() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    result = verify(model, torch.randn(6, 4), types=nn.ReLU)
    assert result.ok and result["1"].verdict is Verdict.EQUAL


def test_the_result_is_a_table_worst_first_and_plain_data() -> None:
    with compiled_wrongly("output"):
        result = verify(Model(), torch.randn(6, 4), names="*")
    lines = str(result).splitlines()
    assert lines[0].startswith("2 of 3 modules equal their originals; 1 differs")
    assert {lines[4].split()[0], lines[5].split()[0]} == {"middle", "(the"}
    rows = result.to_dict()["rows"]
    assert rows[0]["verdict"] == "differs" and rows[0]["error"] > rows[0]["budget"] > 0
    assert "<td>differs</td>" in result._repr_html_()
