"""Public reports of wrong values, wrong gradients and wrong state; eager is right by definition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import thunderpatch
from thunderpatch import CompileError


class Block(nn.Module):
    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x).tanh())


class Shown(nn.Module):
    """Returns what its activation was given as well as what it made of it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(5, 5), act

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.linear(x)
        return before, self.act(before)


def gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_checkpointing_recomputes_the_same_cold_and_warm(by_keyword: bool) -> None:
    """pytorch/pytorch#144035"""
    block, x = Block(), torch.randn(3, 6)
    thunderpatch.apply(block, types=Block)

    def run(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        call = block if not by_keyword else lambda x: block(x=x)
        return gradients(block, lambda: (checkpoint(call, x, use_reentrant=False) if recompute else call(x)).sum())

    for _ in range(2):
        torch.testing.assert_close(run(recompute=True), run(recompute=False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments_of_patched_blocks_equal_eager(reentrant: bool) -> None:
    model = nn.Sequential(*[Block(p=0.0) for _ in range(4)])
    twin = copy.deepcopy(model)
    thunderpatch.apply(model, types=Block)
    found = []
    for each in (model, twin):
        x = torch.ones(3, 6, requires_grad=True)
        found.append(
            gradients(each, lambda m=each, x=x: checkpoint_sequential(m, 2, x, use_reentrant=reentrant).pow(2).sum())
        )
    torch.testing.assert_close(found[0], found[1])


def test_autocast_of_this_and_of_another_device_gives_eagers_dtypes() -> None:
    """Lightning-AI/lightning-thunder#709"""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), torch.randn(3, 6)

    def seen() -> list[torch.dtype]:
        found = [model(x).dtype]
        for device, dtype, on in (
            ("cpu", torch.bfloat16, True),
            ("cuda", torch.float16, True),
            ("cpu", None, False),
        ):
            with torch.autocast(device, dtype, enabled=on and (device == "cpu" or torch.cuda.is_available())):
                found += [model[0](x).dtype, model(x).dtype]
        return [*found, model(x).dtype]

    want = seen()
    thunderpatch.apply(model, types=[nn.Linear, nn.LayerNorm])
    assert seen() == want
    assert want[1] is torch.bfloat16


def test_gradients_under_autocast_reach_float32_weights() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)), torch.randn(3, 6)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().pow(2).mean()

    want = gradients(model, loss)
    thunderpatch.apply(model, types=[nn.Linear, nn.GELU])
    got = gradients(model, loss)
    assert {g.dtype for g in got} == {torch.float32}
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("whole", [False, True])
def test_running_statistics_are_written_back_in_train_and_left_alone_in_eval(whole: bool) -> None:
    """Lightning-AI/lightning-thunder#584"""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.3))
    twin = copy.deepcopy(model)
    thunderpatch.apply(model, types=[nn.BatchNorm2d, nn.Sequential] if whole else nn.BatchNorm2d)
    for _ in range(4):
        x = torch.randn(3, 2, 6, 6)
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-4)
    assert int(model[1].num_batches_tracked) == 4
    for each in (model, twin):
        each.eval()
    x = torch.randn(3, 2, 6, 6)
    torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-4)
    assert int(model[1].num_batches_tracked) == 4
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var)


def test_statistics_reset_between_calls_start_again() -> None:
    module = nn.BatchNorm1d(4)
    twin = copy.deepcopy(module)
    thunderpatch.apply(module)
    for _ in range(2):
        x = torch.randn(5, 4)
        torch.testing.assert_close(module(x), twin(x))
        for each in (module, twin):
            each.reset_running_stats()
            each.momentum = 0.6
    x = torch.randn(5, 4)
    torch.testing.assert_close(module(x), twin(x))
    torch.testing.assert_close(module.running_var, twin.running_var)


def test_a_gradient_penalty_keeps_its_term() -> None:
    """pytorch/pytorch#91469"""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1)), torch.randn(3, 4)

    def penalty() -> torch.Tensor:
        v = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(v).sum(), v, create_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).mean() + model(v).mean()

    want = gradients(model, penalty)
    thunderpatch.apply(model, types=[nn.Linear, nn.Softplus])
    torch.testing.assert_close(gradients(model, penalty), want)


def test_a_hessian_vector_product_equals_eager_or_is_refused() -> None:
    """An activation's input is gone by then in an ordinary step; asked again, it has been kept."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(3, 4)
    direction = [torch.randn_like(p) for p in model.parameters()]

    def product() -> list[torch.Tensor]:
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(model(x).pow(2).sum(), parameters, create_graph=True)
        along = sum((s * d).sum() for s, d in zip(slopes, direction, strict=True))
        return list(torch.autograd.grad(along, parameters))

    want = product()
    thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
    for _ in range(len(model)):
        try:
            got = product()
            break
        except CompileError as error:
            assert "from now on they are" in str(error) and "double backward" in str(error)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.Hardtanh(-0.1, 0.1, inplace=True), nn.SiLU(inplace=True)])
def test_an_inplace_activation_shows_its_write_and_keeps_the_gradient(act: nn.Module) -> None:
    """Lightning-AI/lightning-thunder#720"""
    model, x = Shown(act), torch.randn(4, 5)
    before, after = (value.detach() for value in model(x))
    want = gradients(model, lambda: model(x)[1].pow(2).sum())
    thunderpatch.apply(model, types=type(act))
    for _ in range(2):
        shown, result = model(x)
        assert shown.data_ptr() == result.data_ptr()
        torch.testing.assert_close(result, after)
        torch.testing.assert_close(shown, before)
        torch.testing.assert_close(gradients(model, lambda: model(x)[1].pow(2).sum()), want)


def test_writing_to_a_leaf_that_wants_a_gradient_fails_as_in_eager() -> None:
    """Lightning-AI/lightning-thunder#1284"""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    module = Twice()
    thunderpatch.apply(module)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        module(x)
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_weight_norm_is_derived_anew_at_each_call() -> None:
    """pytorch/pytorch#121304"""
    model, x = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4))), torch.randn(3, 5)
    keys, kinds = list(model.state_dict()), [type(child) for child in model]
    thunderpatch.apply(model, types=nn.Linear)
    for factor in (1.0, 3.0, 0.5):
        with torch.no_grad():
            model[0].parametrizations.weight.original0.mul_(factor)
        got = model(x)
        with thunderpatch.disabled(model):
            torch.testing.assert_close(got, model(x))
    assert list(model.state_dict()) == keys and [type(child) for child in model] == kinds


def test_spectral_norm_iterates_in_train_and_stands_still_in_eval() -> None:
    model, x = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4))), torch.randn(3, 5)
    twin = copy.deepcopy(model)
    thunderpatch.apply(model, types=nn.Linear)
    norm, wanted = (each[0].parametrizations.weight for each in (model, twin))
    for train in (True, False, True):
        change = torch.rand(4, 5)
        for each, kept in ((model, norm), (twin, wanted)):
            each.train(train)
            kept.original.data *= change  # so that the iteration has somewhere to go
        start = norm[0]._u.clone()
        torch.testing.assert_close(model(x), twin(x))
        torch.testing.assert_close(norm[0]._u, wanted[0]._u)
        assert torch.equal(start, norm[0]._u) is not train


def test_a_parametrization_that_comes_after_the_first_call_is_followed() -> None:
    module, x = nn.Linear(5, 4), torch.randn(3, 5)
    thunderpatch.apply(module)
    module(x)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus(), unsafe=True)
    torch.testing.assert_close(module(x), nn.functional.linear(x, module.weight, module.bias))
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    torch.testing.assert_close(module(x), nn.functional.linear(x, module.weight, module.bias))
    thunderpatch.restore(module)
    assert "forward" not in vars(module)


def test_checkpointing_of_a_block_with_relu_and_dropout_recomputes_what_it_saved_at_the_first_call() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(11, 11), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.linear(x).relu())  # type: ignore[no-any-return]  # modules return Any

    block, x = Dropped(), torch.randn(4, 11)
    thunderpatch.apply(block, types=[Dropped])

    def run(recompute: bool) -> Any:
        torch.manual_seed(0)
        block.zero_grad()
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.sum().backward()
        return y.detach(), block.linear.weight.grad

    for _ in range(2):
        torch.testing.assert_close(run(True), run(False))
