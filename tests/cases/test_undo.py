"""Public reports of patches that were not undone, undone twice, or undone in the wrong order."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import ThunderPatchWarning


class Scale(nn.Module):
    """Chooses its code path in the constructor, as nnsight and others do."""

    def __init__(self, variant: str | None = None) -> None:
        super().__init__()
        if variant is not None:
            self.forward = getattr(self, variant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 3

    def triple(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def hook(module: nn.Module, log: list[int]) -> None:
    """Wrap a module's forward as hook libraries do, and remember what was there."""
    old = module.forward
    module._old = old  # type: ignore[assignment]  # as foreign wrappers do

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Any:
        log.append(1)
        return old(*args, **kwargs)

    module.forward = forward


def unhook(module: nn.Module) -> None:
    module.forward = module.__dict__.pop("_old")


def test_an_instance_forward_is_what_is_compiled_and_what_comes_back() -> None:
    """ndif-team/nnsight#723"""
    model = nn.Sequential(Scale("triple"), Scale())
    own = vars(model[0])["forward"]
    x = torch.full((2, 5), 4.0)
    with thunderpatch.patched(model, types=Scale):
        assert torch.equal(model[0](x), torch.full((2, 5), 12.0))
        assert torch.equal(model[1](x), torch.full((2, 5), 7.0))
    assert vars(model[0])["forward"] is own
    assert "forward" not in vars(model[1])


def test_a_constructor_that_replaces_forward_by_a_closure_keeps_it() -> None:
    class Clamped(nn.Module):
        def __init__(self, low: float) -> None:
            super().__init__()
            self.forward = lambda x: x.clamp(min=low)  # type: ignore[assignment]  # set on the instance

    model = nn.Sequential(Clamped(-1.0), Clamped(0.5))
    own = [vars(module)["forward"] for module in model]
    x = torch.tensor([-2.0, 0.0, 2.0])
    with thunderpatch.patched(model, types=Clamped):
        assert model(x).tolist() == [0.5, 0.5, 2.0]
        assert model[0](x).tolist() == [-1.0, 0.0, 2.0]
    assert [vars(module)["forward"] for module in model] == own


def test_nothing_stays_behind_in_any_module() -> None:
    """huggingface/accelerate#858"""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    before = [dict(vars(module)) for module in model.modules()]
    with thunderpatch.patched(model, types=[nn.Linear, nn.Sigmoid]):
        model(torch.randn(5, 3))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model[0].forward.__func__ is nn.Linear.forward
    pickle.loads(pickle.dumps(model))


def test_nothing_stays_behind_when_the_body_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), thunderpatch.patched(model, types=nn.Linear):
        raise ZeroDivisionError
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_forward_added_to_the_class_later_is_seen_after_restore() -> None:
    """pytest-dev/pytest#10644: undoing left the inherited value on the instance, where it hid the class's."""

    class Base(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - 1

    class Derived(Base):
        pass

    module, x = Derived(), torch.zeros(3)
    with thunderpatch.patched(module):
        assert module(x).tolist() == [-1.0] * 3
    Derived.forward = lambda self, x: x + 9  # type: ignore[method-assign,assignment]  # as patching libraries do
    assert module(x).tolist() == [9.0] * 3
    with thunderpatch.patched(module):
        assert module(x).tolist() == [9.0] * 3


def test_applying_twice_patches_once_and_one_restore_clears() -> None:
    """anishathalye/dotbot#370"""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.randn(2, 3)
    want = model(x)
    thunderpatch.apply(model, types=nn.Linear)
    first = shared.forward
    thunderpatch.apply(model, types=nn.Linear)
    thunderpatch.apply(model[2:], types=nn.Linear)
    assert shared.forward is first
    torch.testing.assert_close(model(x), want)
    assert thunderpatch.restore(model) == 1
    assert "forward" not in vars(shared)
    assert thunderpatch.restore(model) == 0
    torch.testing.assert_close(model(x), want)


def test_leaving_an_inner_context_does_not_undo_the_outer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with thunderpatch.patched(model, types=nn.Linear):
        with thunderpatch.patched(model, types=[nn.Linear, nn.Tanh]):
            assert thunderpatch.is_patched(model[1])
        assert thunderpatch.is_patched(model[0]) and not thunderpatch.is_patched(model[1])
    assert not thunderpatch.is_patched(model[0])


def test_leaving_contexts_out_of_order_clears_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    first = thunderpatch.apply(model, types=nn.Linear)
    second = thunderpatch.apply(model, types=nn.Tanh)
    first.restore()
    assert not thunderpatch.is_patched(model[0]) and thunderpatch.is_patched(model[1])
    second.restore()
    assert not any("forward" in vars(module) for module in model)


def test_restore_below_a_foreign_wrapper_keeps_the_wrapper() -> None:
    """NVIDIA/Model-Optimizer#824"""
    module, log, x = nn.Linear(3, 2), [], torch.randn(4, 3)
    want = module(x)
    thunderpatch.apply(module)
    hook(module, log)
    torch.testing.assert_close(module(x), want)
    with pytest.warns(ThunderPatchWarning, match="below another wrapper"):
        assert thunderpatch.restore(module) == 1
    torch.testing.assert_close(module(x), want)
    assert log == [1, 1]
    unhook(module)  # puts our callable back, after it was restored
    torch.testing.assert_close(module(x), want)
    assert not thunderpatch.is_patched(module)
    assert thunderpatch.restore(module) == 1
    assert "forward" not in vars(module)


def test_a_callable_of_ours_that_comes_back_is_not_wrapped_again() -> None:
    module, log, x = nn.Linear(3, 2), [], torch.randn(4, 3)
    want = module(x)
    thunderpatch.apply(module)
    hook(module, log)
    with pytest.warns(ThunderPatchWarning):
        thunderpatch.restore(module)
    unhook(module)
    with thunderpatch.patched(module) as patch:
        assert len(patch) == 1
        torch.testing.assert_close(module(x), want)
        assert type(module.forward.__wrapped__) is type(nn.Linear.forward.__get__(module))
    assert "forward" not in vars(module)


def test_patched_below_and_on_top_of_a_wrapper_runs_the_wrapper_once() -> None:
    module, log, x = nn.Linear(3, 2), [], torch.randn(4, 3)
    hook(module, log)
    wrapper = vars(module)["forward"]
    thunderpatch.apply(module)
    for _ in range(3):
        module(x)
    assert log == [1] * 3
    thunderpatch.restore(module)
    assert vars(module)["forward"] is wrapper


def test_a_forward_that_replaces_ours_is_the_one_that_runs() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    thunderpatch.apply(module)
    module.forward = lambda x: x.sum()  # type: ignore[assignment]  # as patching libraries do
    assert torch.equal(module(x), x.sum())
    assert not thunderpatch.is_patched(module)
    thunderpatch.apply(module)
    assert thunderpatch.is_patched(module)
    torch.testing.assert_close(module(x), x.sum())
