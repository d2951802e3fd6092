from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunderpatch
from thunderpatch.calls import Call
from thunderpatch.capturing import capture_inputs
from thunderpatch.preserving import preserved


class Cache:
    """An object that torch knows nothing of, as KV caches are."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, *, cache: Cache, scale: float = 1.0) -> Tensor:
        x = self.norm(self.linear(x)) * scale
        cache.layers.append(x)
        return nn.functional.dropout(x, 0.5, self.training).relu_()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = Layer(), Layer(), Layer()
        self.calls, self.seen = 0, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        cache = Cache()
        x = self.one(x, cache=cache, scale=2.0)
        x = self.two(x, cache=cache)
        return self.two(x, cache=cache)  # type: ignore[no-any-return]


def modules(model: nn.Module) -> dict[str, nn.Module]:
    return {fqn: module for fqn, module in model.named_modules() if fqn and not fqn.count(".")}


def test_each_modules_first_call_is_captured_with_keywords_and_objects() -> None:
    model, x = Model(), torch.randn(3, 4)
    calls = capture_inputs(model, modules(model), (x,), {})
    assert list(calls) == ["one", "two"]
    assert torch.equal(calls["one"].args[0], x) and calls["one"].args[0] is not x
    assert calls["one"].kwargs["scale"] == 2.0 and calls["one"].kwargs["cache"].layers == []
    assert len(calls["two"].kwargs["cache"].layers) == 1  # as it was before the call, and not after


def test_the_model_is_as_before() -> None:
    model, x = Model(), torch.randn(3, 4)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    attributes = [dict(vars(m)) for m in model.modules()]
    gradients = [p.grad for p in model.parameters()]
    random, hooks = torch.get_rng_state(), [len(m._forward_pre_hooks) for m in model.modules()]
    capture_inputs(model, modules(model), (x,), {})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert model.calls == 1 and len(model.seen) == 1
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_the_arguments_are_as_before_when_the_model_writes_to_them() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: list[Tensor]) -> Tensor:
            y.append(x)
            return x.add_(1)

    x, y = torch.zeros(2), list[Tensor]()
    call = capture_inputs(model := Writes(), {"": model}, (x,), {"y": y})[""]
    assert not x.any() and not y and not call.args[0].any() and call.kwargs["y"] == []


def test_an_error_of_the_model_is_raised_and_no_hook_stays() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="shapes"):
        capture_inputs(model, modules(model), (torch.randn(3, 5),), {})
    assert not any(m._forward_pre_hooks for m in model.modules()) and model.calls == 0


def test_a_patched_model_runs_unpatched_meanwhile() -> None:
    model = Model()
    thunderpatch.apply(model, types=Layer)
    capture_inputs(model, modules(model), (torch.randn(3, 4),), {})
    assert all(row.calls == 0 for row in thunderpatch.report(model))


def test_fresh_arguments_can_be_used_up_and_made_again() -> None:
    x = torch.ones(2, requires_grad=True)
    call = Call.of((x.exp(),), {})
    for _ in range(2):
        inputs = call.fresh()
        (given,), (leaf,) = inputs.args, inputs.leaves
        given.mul_(2).sum().backward()  # would be refused on a leaf
        assert torch.equal(leaf.grad, torch.full((2,), 2.0)) and torch.equal(leaf, torch.ones(2).exp())
    assert x.grad is None


def test_leaves_stay_leaves_and_what_needs_no_gradient_needs_none() -> None:
    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    inputs = Call.of((leaf, plain, leaf * 2), {}).fresh()
    assert [t.requires_grad for t in inputs.given] == [True, False, True]
    assert [t.is_leaf for t in inputs.given] == [True, True, False]
    assert inputs.leaves[0] is inputs.given[0] and inputs.leaves[2] is not inputs.given[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda base: (base, base),
        lambda base: (base, base[1:]),
        lambda base: (base[::2], base.t()[1]),
        lambda base: (base[:1].expand(3, 4), base[0]),
    ],
)
def test_what_shares_memory_shares_it_in_the_copy_with_its_strides(make: Any) -> None:
    one, two = make(torch.arange(12.0).view(3, 4))
    a, b = Call.of((one, two), {}).fresh().args
    assert a.stride() == one.stride() and b.stride() == two.stride()
    assert torch.equal(a, one) and torch.equal(b, two)
    assert (a is b) == (one is two)
    a.data[0].fill_(-7)
    one[0].fill_(-7)
    assert torch.equal(b, two)


def test_parameters_and_modules_and_code_are_shared() -> None:
    linear = nn.Linear(2, 2)
    call = Call.of((linear.weight, linear, torch.relu, [linear.bias]), {})
    assert call.args[0] is linear.weight and call.args[1] is linear and call.args[3][0] is linear.bias
    assert call.fresh().args[2] is torch.relu and call.fresh().given == []


def test_what_cannot_be_copied_is_shared() -> None:
    generator = (k for k in range(3))
    call = Call.of((generator, {"deep": [generator]}), {})
    assert call.fresh().args[0] is generator and call.fresh().args[1]["deep"][0] is generator


def test_numbers_can_be_cast_and_moved_by_a_relative_step() -> None:
    call = Call.of((torch.ones(50), torch.arange(3), torch.ones(2, dtype=torch.complex64)), {})
    real, whole, complex_ = call.fresh(torch.float64).args
    assert (real.dtype, whole.dtype, complex_.dtype) == (torch.float64, torch.int64, torch.complex128)
    moved, same, _ = call.fresh(torch.float64, moved_by=1e-3).args
    assert 0 < (moved - 1).abs().max() <= 1e-3 and torch.equal(same, whole)


def test_grad_mode_and_autocast_of_the_call_are_set_again() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        call = Call.of((torch.ones(2, 2),), {})
    with call.modes():
        assert not torch.is_grad_enabled() and (call.args[0] @ call.args[0]).dtype == torch.bfloat16
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_captured_calls_keep_no_model_alive() -> None:
    model = Model()
    calls = capture_inputs(model, modules(model), (torch.randn(3, 4),), {})
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and calls


def test_preserved_puts_back_after_an_exception_too() -> None:
    model = Model()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError), preserved(model):
        model(torch.randn(3, 4)).sum().backward()
        raise ValueError
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert model.calls == 0 and all(p.grad is None for p in model.parameters())
