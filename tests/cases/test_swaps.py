"""What torch itself swaps under a patched model: classes, weights and whole checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WIDTH, Block, ran
from torch import nn
from torch.distributed import checkpoint
from torch.nn.utils import parametrizations, parametrize, prune

import thunderpatch


class Skew(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu(1) - weight.triu(1).t()


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


def outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def skewed(linear: nn.Module) -> None:
    parametrize.register_parametrization(linear, "weight", Skew())


def unskewed(linear: nn.Module) -> None:
    parametrize.remove_parametrizations(linear, "weight")


def pruned(linear: nn.Module) -> None:
    prune.l1_unstructured(linear, "weight", amount=0.5)


def unpruned(linear: nn.Module) -> None:
    prune.remove(linear, "weight")


def normed(linear: nn.Module) -> None:
    parametrizations.weight_norm(linear)


PAIRS = {"parametrize": (skewed, unskewed), "prune": (pruned, unpruned), "weight norm": (normed, unskewed)}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "what", [pytest.param({"types": Block}, marks=pytest.mark.slow), {"types": nn.Linear}], ids=["blocks", "Linears"]
)
def test_what_is_put_on_a_weight_and_taken_off_between_calls_is_followed_and_restored(
    model: nn.Sequential, x: torch.Tensor, pair: str, what: dict[str, Any]
) -> None:
    plain, (put_on, take_off) = copy.deepcopy(model), PAIRS[pair]
    classes = [type(module) for module in model.modules()]
    thunderpatch.apply(model, **what)
    torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    for change in (put_on, take_off):
        for each in (model, plain):
            change(each[0].linear)
            change(each[1].linear)
        torch.testing.assert_close(outcome(model, x), outcome(plain, x))
    ran(model, 3)
    thunderpatch.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_value_that_is_cached_for_several_modules_is_followed(model: nn.Sequential, x: torch.Tensor) -> None:
    """`parametrize.cached` holds what it has computed in a dict outside of the modules."""
    skewed(model[0].linear)
    want = outcome(model, x)
    thunderpatch.apply(model, types=Block)
    for _ in range(2):
        with parametrize.cached():
            torch.testing.assert_close(outcome(model, x), want)
    ran(model, 2)


@pytest.mark.parametrize("buffers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_averaged_models_of_a_patched_one_train_and_evaluate_as_plain(buffers: bool) -> None:
    averaged = torch.optim.swa_utils.AveragedModel
    average_of = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)

    def losses(patch: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block())
        if patch:
            thunderpatch.apply(model, types=[Block, nn.BatchNorm1d])
        average = averaged(model, multi_avg_fn=average_of, use_buffers=buffers)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            found.append(loss.detach())
        if not buffers:
            torch.optim.swa_utils.update_bn([torch.randn(4, WIDTH)], average)
        if patch:
            assert all(thunderpatch.is_patched(average.module[k]) for k in range(3))
            average.module[0].linear.weight.grad = None
        found.append(average.eval()(torch.ones(2, WIDTH)).detach())
        if patch:
            ran(average, 1 if buffers else 2)
        return found

    torch.testing.assert_close(losses(True), losses(False))


def test_a_checkpoint_on_disk_goes_from_patched_to_plain_and_back(
    model: nn.Sequential, x: torch.Tensor, tmp_path: Path
) -> None:
    want, plain = model(x), nn.Sequential(Block(), Block())
    thunderpatch.apply(model, types=Block)
    model(x)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "patched", no_dist=True)
    for target, source in ((plain, "patched"), (model, "plain")):
        state = {"model": {name: torch.zeros_like(value) for name, value in target.state_dict().items()}}
        checkpoint.load(state, checkpoint_id=tmp_path / source, no_dist=True)
        target.load_state_dict(state["model"])
        torch.testing.assert_close(target(x), want)
        if target is plain:
            checkpoint.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain", no_dist=True)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            assert not torch.allclose(model(x), want)
    ran(model, 3)
