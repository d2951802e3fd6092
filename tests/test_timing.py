from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunderpatch
from thunderpatch import stopwatch
from thunderpatch.calls import Call
from thunderpatch.gains import Benchmark, Row, seconds
from thunderpatch.stopwatch import Repeated, in_turn, noise, ratios
from thunderpatch.timing import benchmark


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.unused = nn.BatchNorm1d(4), Block()

    def forward(self, x: Tensor, *, again: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if again:
            x = self.blocks[0](x)
        out: Tensor = self.norm(x)
        return out


def measure(model: nn.Module, **given: Any) -> Benchmark:
    return benchmark(model, torch.randn(3, 4), min_run_time=0.001, **given)


def repeated(module: nn.Module, *args: Any, backward: bool = False) -> Repeated:
    with torch.set_grad_enabled(backward):
        return Repeated(module, Call.of(args, {}), backward)


def row(**values: Any) -> Row:
    numbers = {"eager": 4.0, "patched": 2.0, "ratio": 0.5, "ratio_spread": 0.1, "first_call": 10.0}
    return Row(**{"fqn": "a", "cls": "Block", **numbers, **values})


def test_each_selected_module_and_the_whole_model_are_timed_both_ways() -> None:
    result = measure(Model(), names="blocks.*")
    assert {row.fqn for row in result.rows} == {"blocks.0", "blocks.1"}
    for row in [*result.rows, result.whole]:
        assert row.measured and row.eager > 0 and row.patched > 0 and row.first_call > 0
    assert result["blocks.0"].cls == "Block" and result.whole.whole


def test_calls_of_one_step_are_counted() -> None:
    result = measure(Model(), names="blocks.*", again=True)
    assert (result["blocks.0"].calls, result["blocks.1"].calls) == (2, 1)


def test_a_module_that_the_model_never_calls_is_named_and_saves_nothing() -> None:
    result = measure(Model(), names="unused")
    assert not result["unused"].measured and result["unused"].saved == 0.0
    assert "the model did not call it" in str(result)


def test_eager_and_patched_times_are_of_eager_and_compiled_calls() -> None:
    originals: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                originals.append(1)
            return x + 1

    model = Spy()
    patch = thunderpatch.apply(model)
    benchmark(model, torch.randn(3), min_run_time=0.001)
    row = patch.report()[""]
    assert len(originals) > 10 and row.compiled_calls > 10
    # The capture of the inputs is the one call of the original that goes through the proxy.
    assert row.compiled_calls >= row.calls - 1


@pytest.mark.parametrize("backward", [False, True])
def test_model_gradients_buffers_arguments_and_random_state_are_as_before(backward: bool) -> None:
    model, x = Model(), torch.randn(3, 4)
    model.blocks[0].linear.weight.grad = torch.ones(4, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random, given, own = torch.get_rng_state(), x.clone(), [set(vars(m)) for m in model.modules()]
    benchmark(model, x, repeated=True, backward=backward, min_run_time=0.001)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(x, given)
    assert torch.equal(model.blocks[0].linear.weight.grad, torch.ones(4, 4))
    assert model.blocks[1].linear.weight.grad is None
    assert [set(vars(m)) for m in model.modules()] == own and torch.is_grad_enabled()


def test_backward_runs_only_when_it_is_asked_for() -> None:
    model, ran = Model(), []
    model.blocks[0].linear.weight.register_hook(lambda grad: ran.append(1))
    measure(model, names="blocks.1")
    assert not ran
    measure(model, names="blocks.1", backward=True)
    assert ran


def test_without_selectors_what_is_patched_is_measured_and_stays_patched() -> None:
    model = Model()
    thunderpatch.apply(model, names="blocks.0")
    result = measure(model)
    assert [row.fqn for row in result.rows] == ["blocks.0"]
    assert thunderpatch.is_patched(model.blocks[0])


def test_options_of_thunderfx_are_a_dict_and_unknown_ones_an_error() -> None:
    with pytest.raises(thunderpatch.ArgumentError, match="executorz"):
        measure(Model(), thunderfx_options={"executorz": []})


@pytest.mark.parametrize("backward", [False, True])
def test_a_module_that_works_in_place_gets_fresh_arguments_for_each_call(backward: bool) -> None:
    seen: list[float] = []

    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().sum().item())
            return x.mul_(2.0)

    x = torch.ones(3, requires_grad=backward) * 1
    step = repeated(InPlace(), x, backward=backward)
    step.calibrate(1e-3)
    step.seconds()
    assert len(seen) > 3 and set(seen) == {3.0}


def test_a_module_that_grows_an_argument_gets_a_fresh_one_for_each_call() -> None:
    lengths: list[int] = []

    class Cache:
        def __init__(self) -> None:
            self.kept: list[Tensor] = []

    class Appends(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            lengths.append(len(cache.kept))
            cache.kept.append(x + 0)
            return x

    step = repeated(Appends(), torch.ones(2), Cache())
    step.calibrate(1e-3)
    step.seconds()
    assert len(lengths) > 3 and set(lengths) == {0}


def test_arguments_that_stay_as_they_are_are_not_copied_again() -> None:
    ids: set[int] = set()

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ids.add(x.data_ptr())
            return x + 1

    step = repeated(Reads(), torch.ones(2))
    step.calibrate(1e-3)
    step.seconds()
    assert len(ids) == 1


def test_backward_starts_from_the_loss_where_there_is_one() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = x * 3
            return {"loss": logits.sum(), "logits": logits}

    x = torch.ones(2, requires_grad=True)
    step = repeated(Loss(), x, backward=True)
    leaf = step._inputs.leaves[0]
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full((2,), 3.0))


def test_sides_are_measured_in_turn_and_the_order_alternates() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> Any:
        def measured() -> float:
            order.append(name)
            return value

        return measured

    one, other = in_turn([side("a", 2.0), side("b", 1.0)], min_run_time=0.0)
    assert "".join(order[:4]) == "abba" and len(one) == len(other) >= 9
    assert ratios(one, other) == [0.5] * len(one)


def test_a_noisy_ratio_is_measured_for_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopwatch.torch.utils.benchmark, "timer", lambda: now[0])

    def rounds(values: list[float]) -> int:
        calls = [0]

        def other() -> float:
            now[0] += 0.5
            calls[0] += 1
            return values[calls[0] % len(values)]

        in_turn([lambda: 1.0, other], min_run_time=5.0)
        return calls[0]

    calm, noisy = rounds([1.0]), rounds([0.5, 1.0, 2.0, 1.5])
    assert calm == 21 and noisy == 121


def test_noise_shrinks_with_the_number_of_samples_and_ignores_outliers() -> None:
    few = [0.9, 1.0, 1.1, 1.0] * 3
    assert noise(few * 4) < noise(few)
    assert noise([1.0] * 20 + [100.0]) == 0.0


def test_rows_are_sorted_by_time_saved_per_step() -> None:
    rows = [row(fqn="small"), row(fqn="often", calls=5), row(fqn="loses", ratio=2.0)]
    assert [r.fqn for r in Benchmark(rows, row(whole=True), False).rows] == ["often", "small", "loses"]


def test_break_even_counts_the_calls_that_pay_for_the_first_one() -> None:
    assert row().break_even == 3  # (10 - 4) seconds at a gain of 2 a call
    assert math.isinf(row(ratio=1.0).break_even) and math.isinf(row(ratio=1.2).break_even)


def test_to_dict_is_json_without_infinities() -> None:
    result = Benchmark([row(ratio=2.0), row(fqn="b", ratio=math.nan)], row(whole=True), True)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["rows"][1]["break_even"] is None and data["whole"]["ratio"] == 0.5 and data["backward"]


def test_the_table_shows_both_times_and_the_ratio_with_its_spread() -> None:
    text = str(Benchmark([row(eager=4e-6, patched=2e-6)], row(whole=True), False))
    for shown in ("4 us", "2 us", "0.50 ±0.05", "(the whole model)", "a step (forward)"):
        assert shown in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (-4e-6, "-4 us"), (5e-8, "50 ns"), (0.0, "0 ns"), (math.nan, "")],
)
def test_seconds_are_written_with_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text
