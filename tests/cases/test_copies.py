"""Public reports of copies that compute with the original's weights, cannot be saved, or are never freed."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import thunderpatch


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def fill(module: nn.Linear, bias: float) -> None:
    with torch.no_grad():
        module.weight.zero_()
        module.bias.fill_(bias)


def test_a_deep_copy_computes_with_its_own_weights_and_is_restored_on_its_own() -> None:
    """facebookresearch/fairscale#816"""
    model, x = build(), torch.randn(5, 3)
    thunderpatch.apply(model, types=nn.Linear)
    want = model(x)
    clone = copy.deepcopy(model)
    fill(clone[0], bias=0.0)
    assert torch.equal(clone(x), torch.zeros(5, 2))
    torch.testing.assert_close(model(x), want)
    assert thunderpatch.restore(clone) == 1
    assert torch.equal(clone(x), torch.zeros(5, 2))
    assert thunderpatch.is_patched(model[0])
    thunderpatch.restore(model)
    assert "forward" not in vars(model[0]) and "forward" not in vars(clone[0])


def test_an_averaged_model_that_was_copied_when_patched_follows_its_own_average() -> None:
    """A weight average is a deep copy that lives beside the model that it was made from."""
    model, x = build(), torch.randn(5, 3)
    thunderpatch.apply(model, types=nn.Linear)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)  # the first one copies
    fill(model[0], bias=1.0)
    average.update_parameters(model)
    plain = copy.deepcopy(average)
    thunderpatch.restore(plain)
    assert thunderpatch.is_patched(average.module[0])
    torch.testing.assert_close(average(x), plain(x))
    assert not torch.allclose(average(x), model(x))


@pytest.mark.parametrize("bind", [functools.partial, lambda forward, module: forward.__get__(module)])
def test_a_copy_of_a_module_with_an_instance_forward_uses_the_copy(bind) -> None:
    module = nn.Linear(3, 2)
    module.forward = bind(nn.Linear.forward, module)
    thunderpatch.apply(module)
    module(torch.ones(1, 3))
    clone = copy.deepcopy(module)
    fill(clone, bias=7.0)
    assert clone(torch.ones(1, 3)).tolist() == [[7.0, 7.0]]
    thunderpatch.restore(clone)
    assert clone(torch.ones(1, 3)).tolist() == [[7.0, 7.0]]


def test_a_copy_that_is_made_while_disabled_runs_compiled() -> None:
    model, x = build(), torch.randn(5, 3)
    thunderpatch.apply(model, types=nn.Linear)
    with thunderpatch.disabled(model):
        clone = copy.deepcopy(model)
    clone(x)
    row = thunderpatch.report(clone)["0"]
    assert (row.calls, row.compiled_calls) == (1, 1)


@pytest.mark.parametrize("called", [False, True])
def test_a_patched_model_is_saved_and_loads_as_an_independent_plain_one(called: bool) -> None:
    """huggingface/accelerate#866"""
    model, x = build(), torch.randn(5, 3)
    want = model(x)
    thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
    if called:
        model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(x), want)
    fill(loaded[0], bias=0.0)
    assert torch.equal(loaded(x), torch.zeros(5, 2))
    assert not any(thunderpatch.is_patched(module) for module in loaded.modules())
    assert thunderpatch.restore(loaded) == 0
    torch.testing.assert_close(model(x), want)


def test_the_callable_itself_can_be_copied_pickled_hashed_and_compared() -> None:
    """GrahamDumpleton/wrapt#86"""
    model, x = build(), torch.randn(5, 3)
    want = model(x)
    thunderpatch.apply(model, types=nn.Linear)
    forward = model[0].forward
    torch.testing.assert_close(copy.copy(forward)(x), model[0](x))
    torch.testing.assert_close(copy.deepcopy(forward)(x), model[0](x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(forward))(x), model[0](x))
    torch.testing.assert_close(copy.deepcopy(model)(x), want)
    assert forward == model[0].forward and hash(forward) == hash(model[0].forward)
    assert len({forward, model[0].forward}) == 1


def closure(module: nn.Linear) -> None:
    inner = module.forward
    module.forward = lambda x: inner(x) * 2


def partial(module: nn.Linear) -> None:
    module.forward = functools.partial(nn.Linear.forward, module)


@pytest.mark.parametrize("own_forward", [None, closure, partial])
@pytest.mark.parametrize("restored", [True, False])
def test_model_weights_and_inputs_are_freed(restored: bool, own_forward) -> None:
    """Lightning-AI/lightning-thunder#2458"""

    def use() -> list[weakref.ref]:
        model, x = nn.Sequential(nn.Linear(17, 3), nn.Tanh()), torch.randn(5, 17)
        if own_forward is not None:
            own_forward(model[0])
        thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
        model(x).sum().backward()
        if restored:
            thunderpatch.restore(model)
        return [weakref.ref(thing) for thing in (model, model[0], model[0].weight, x)]

    refs = use()
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * 4


def test_an_error_of_the_forward_keeps_neither_model_nor_input_alive() -> None:
    class Fussy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if len(y) == 7:
                raise ValueError("seven")
            return y

    def use() -> list[weakref.ref]:
        model, x = nn.Sequential(Fussy(3, 2)), torch.randn(7, 3)
        thunderpatch.apply(model, types=Fussy)
        with pytest.raises(ValueError, match="seven"):
            model(x)
        return [weakref.ref(thing) for thing in (model, model[0].weight, x)]

    refs = use()
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * 3
