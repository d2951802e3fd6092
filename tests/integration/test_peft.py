"""PEFT swaps the Linears of a model for adapters around them, and switches, merges and saves the adapters."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WIDTH, Net
from torch import nn

import thunderpatch

peft = pytest.importorskip("peft")
pytest.importorskip("peft.helpers")
pytestmark = pytest.mark.integration


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


# What is patched: the blocks, with the adapters inside, or each Linear, adapted or not.
WHAT = {"blocks": {"types": "Block"}, "Linears": {"types": [nn.Linear, "Linear"]}}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


def lora(rank: int, replaced: list[str] | None) -> Any:
    # Weights drawn at random: an adapter that starts at zero changes nothing, applied or not.
    return peft.LoraConfig(r=rank, target_modules=["up", "down"], modules_to_save=replaced, init_lora_weights=False)


def adapted(patch: str = "", what: str = "blocks", replaced: list[str] | None = None) -> Any:
    """Return a model with two adapters, the same numbers each time; patched before they come, after, or not."""
    torch.manual_seed(1)
    model = Net(Block)
    if patch == "before":
        thunderpatch.apply(model, **WHAT[what])
    model = peft.get_peft_model(model, lora(2, replaced))
    model.add_adapter("other", lora(3, replaced))
    if patch == "after":
        thunderpatch.apply(model, **WHAT[what])
    return model


def every_row_ran(model: nn.Module, calls: int) -> None:
    """Whatever was called ran compiled each time, and the blocks or the adapted Linears were called."""
    rows = thunderpatch.report(model).rows
    assert {row.compiled_calls - row.calls for row in rows} == {0}
    assert {row.calls for row in rows if row.fqn.endswith(("blocks.0", "up", "up.base_layer"))} == {calls}
    assert {str(row.status) for row in rows} <= {"compiled", "partly", "inlined", "routed", "never called"}


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


patches = pytest.mark.parametrize("patch", ["before", "after"])
targets = pytest.mark.parametrize("what", WHAT)


@patches
@targets
def test_only_the_active_adapter_is_trained_and_its_gradients_are_eagers(
    x: torch.Tensor, patch: str, what: str
) -> None:
    plain, model = adapted(replaced=["head"]), adapted(patch, what, replaced=["head"])
    for name in ("default", "other", "default"):
        plain.set_adapter(name)
        model.set_adapter(name)
        want, got = gradients(plain, x), gradients(model, x)
        assert want.keys() == got.keys() and {name in key for key in got} == {True}
        torch.testing.assert_close(got, want)
    every_row_ran(model, 3)


@patches
@targets
def test_adapters_are_switched_off_on_and_joined_between_calls(x: torch.Tensor, patch: str, what: str) -> None:
    def outputs(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            found = [model(x)]
            model.set_adapter("other")
            found.append(model(x))
            with model.disable_adapter():
                found.append(model(x))
            found.append(model(x))
            model.base_model.set_adapter(["default", "other"])
            found.append(model(x))
            with peft.helpers.rescale_adapter_scale(model, 0.5):
                found.append(model(x))
            model.set_adapter("default")
            model.delete_adapter("other")
            return [*found, model(x)]

    want, model = outputs(adapted()), adapted(patch, what)
    torch.testing.assert_close(outputs(model), want)
    assert all(not torch.allclose(one, next) for one, next in itertools.pairwise(want))
    every_row_ran(model, 7)


@patches
@targets
def test_adapters_are_merged_unmerged_and_unloaded(x: torch.Tensor, patch: str, what: str) -> None:
    def outputs(model: Any) -> Any:
        with torch.no_grad():
            found = [model(x)]
            model.merge_adapter()
            found.append(model(x))
            model.unmerge_adapter()
            found.append(model(x))
            model = model.merge_and_unload()
            return [*found, model(x)], model

    want, plain = outputs(adapted())
    got, model = outputs(adapted(patch, what))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got[3], got[0])
    assert list(model.state_dict()) == list(plain.state_dict())
    thunderpatch.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in Net(Block).modules()]
    assert not any("forward" in vars(module) for module in model.modules())


@patches
@targets
def test_adapters_saved_from_a_patched_model_load_into_a_plain_one_and_back(
    x: torch.Tensor, patch: str, what: str, tmp_path: Path
) -> None:
    model = adapted(patch, what)
    with torch.no_grad():
        want = model(x)
        model.save_pretrained(tmp_path)
        torch.manual_seed(1)
        plain = peft.PeftModel.from_pretrained(Net(Block), tmp_path)
        torch.testing.assert_close(plain(x), want)
        for p in model.parameters():
            if p.requires_grad:
                p.zero_()
        assert not torch.allclose(model(x), want)
        model.load_adapter(tmp_path, "default")
        torch.testing.assert_close(model(x), want)
        model.load_adapter(tmp_path, "third")
        model.set_adapter("third")
        torch.testing.assert_close(model(x), want)


def test_a_copy_of_an_adapted_patched_model_trains_on_its_own(x: torch.Tensor) -> None:
    model = adapted("before")
    want = gradients(model, x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(gradients(twin, x), want)
    assert thunderpatch.report(twin).rows[0].compiled_calls == 1
