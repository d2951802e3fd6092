from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from faulty import FAULTS, Marked, Model, compiled_wrongly
from torch import Tensor, nn

import thunderpatch
from thunderpatch import CompileError, DifferenceError, ThunderPatchWarning, registry


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Train in the ordinary way; return losses, parameters, buffers and the random state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def test_what_is_right_trains_as_if_nothing_had_been_compared() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))

    model, expected = make(), trained(make())
    thunderpatch.apply(model, names=["0", "1", "2"], check=True)
    torch.testing.assert_close(trained(model), expected)
    assert all(row.compiled_calls == 3 for row in thunderpatch.report(model))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_value_is_caught_at_the_first_call_and_nobody_sees_it(fault: str) -> None:
    model = Model()
    thunderpatch.apply(model, names="*", check=True)
    x = torch.randn(6, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    what = {"output": r"output\[1\]", "gradient": "gradient of", "buffer": "afterwards"}[fault]
    with compiled_wrongly(fault), pytest.raises(CompileError, match=rf"middle \(Marked\)(.|\n)*{what}") as raised:
        model(x)
    assert isinstance(raised.value.__cause__, DifferenceError)
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("fault", FAULTS)
def test_with_on_error_eager_the_module_trains_on_its_original_from_the_first_step(fault: str) -> None:
    torch.manual_seed(0)
    model = Model()
    expected = trained(copy.deepcopy(model))
    thunderpatch.apply(model, names="*", check=True, on_error="eager")
    with compiled_wrongly(fault), pytest.warns(ThunderPatchWarning, match="middle .*DifferenceError"):
        got = trained(model)
    torch.testing.assert_close(got, expected)
    report = thunderpatch.report(model)
    assert str(report["middle"].status) == "latched" and "DifferenceError" in report["middle"].reason
    assert [str(report[name].status) for name in ("first", "last")] == ["compiled", "compiled"]


def test_a_checked_graph_runs_once_on_copies_and_once_a_call_from_then_on() -> None:
    model, calls = Marked(), list[Any]()
    thunderpatch.apply(model, check=True)
    x = torch.randn(6, 4)
    with compiled_wrongly("output", calls), pytest.raises(CompileError):
        model(x)
    assert len(calls) == 1 and all(given is not x for given in calls[0])

    right = Marked()
    thunderpatch.apply(right, check=True)
    right(x)
    (graph,) = registry.active(right).graphs  # type: ignore[union-attr]
    ran = list[Any]()
    compiled = graph.call
    graph.call = lambda *inputs: ran.append(inputs) or compiled(*inputs)
    right(x)
    assert len(ran) == 1 and any(given is x for given in ran[0])
    assert "check" not in getattr(compiled, "__qualname__", "")


def test_without_check_nothing_is_compared() -> None:
    model, calls = Marked(), list[Any]()
    thunderpatch.apply(model)
    with compiled_wrongly("output", calls):
        model(torch.randn(6, 4))
    assert len(calls) == 1


def test_dropout_is_checked_with_the_masks_that_thunder_draws(caplog: pytest.LogCaptureFixture) -> None:
    class Dropping(Marked):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one, two = super().forward(nn.functional.dropout(x, 0.5, self.training))
            return one, two

    model = Dropping()
    thunderpatch.apply(model, check=True)
    x = torch.randn(6, 4)
    with compiled_wrongly("output"), pytest.raises(CompileError, match=r"output\[1\]"):
        model(x)
    with caplog.at_level(logging.WARNING, "thunderpatch"):
        model(x)
    assert not [record for record in caplog.records if record.name == "thunderpatch"]


def test_random_numbers_that_cannot_be_compared_are_logged_and_let_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.alpha_dropout(nn.functional.dropout(x, 0.5), 0.5, training=True)

    model = Noisy()
    thunderpatch.apply(model, check=True)
    with caplog.at_level(logging.WARNING, "thunderpatch"):
        # With a gradient thunder draws the first mask in its own way, and alpha_dropout is not thunder's.
        assert model(torch.randn(6, 4, requires_grad=True)).shape == (6, 4)
    assert any("was not checked" in record.message for record in caplog.records)


def test_an_error_of_the_caller_is_the_callers() -> None:
    model = nn.Embedding(4, 2)
    thunderpatch.apply(model, check=True)
    with pytest.raises(IndexError):
        model(torch.tensor([7]))


def test_inference_is_checked_too() -> None:
    model = Marked().eval()
    thunderpatch.apply(model, check=True)
    with torch.no_grad(), compiled_wrongly("output"), pytest.raises(CompileError, match=r"output\[1\]"):
        model(torch.randn(6, 4))


def test_a_graph_whose_gradient_cannot_be_had_is_checked_by_its_values() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise NotImplementedError("no backward")

    class Forward(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(x).atan()  # type: ignore[no-any-return]

    model = Forward()
    thunderpatch.apply(model, check=True, on_error="eager")
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(model(x), (x * 2).atan())
