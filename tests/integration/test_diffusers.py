"""diffusers puts hooks on a model, casts its weights for each layer, and swaps how it attends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunderpatch

pytest.importorskip("diffusers")
from diffusers import hooks  # there is no diffusers without the line above

from .architectures import ZOO

pytestmark = pytest.mark.integration

SELECT = {"repeated": True}


def made() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(1)
    model, inputs = ZOO["PixArt"].make()
    return model.eval(), inputs


def outputs(model: Any, inputs: dict[str, Any], changes: list[Callable[[Any], None]], patch: str) -> list[torch.Tensor]:
    """Run a model after each change; patched at first, after the first change, or not at all."""
    found = []
    with torch.no_grad():
        if patch == "before":
            thunderpatch.apply(model, **SELECT)
            found.append(model(**inputs).sample)
        for change in changes:
            change(model)
            if patch == "after":
                thunderpatch.apply(model, **SELECT)
            found.append(model(**inputs).sample)
    if patch:
        rows = thunderpatch.report(model).rows
        assert {(row.calls, row.compiled_calls) for row in rows} == {(len(found), len(found))}
    return found[-len(changes) :]


def cast(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def fuse(model: Any) -> None:
    model.fuse_qkv_projections()
    for block in model.transformer_blocks:
        block.attn1.to_qkv.weight.mul_(2)  # so that it shows which projections are used


def unfuse(model: Any) -> None:
    model.unfuse_qkv_projections()


CHANGES = {"weights kept in bfloat16": [cast], "projections fused and apart again": [fuse, unfuse]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("patch", ["before", "after"])
def test_changes_to_a_model_are_followed(change: str, patch: str) -> None:
    model, inputs = made()
    plain = outputs(copy.deepcopy(model), inputs, CHANGES[change], "")
    assert len(plain) == 1 or not torch.allclose(plain[0], plain[1])
    torch.testing.assert_close(outputs(model, inputs, CHANGES[change], patch), plain, rtol=1e-4, atol=1e-5)


class Counting(hooks.ModelHook):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @torch.compiler.disable
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


def test_hooks_put_on_a_patched_block_come_off_and_leave_the_patch() -> None:
    model, inputs = made()
    with torch.no_grad():
        want = model(**inputs).sample
        thunderpatch.apply(model, **SELECT)
        registries = [hooks.HookRegistry.check_if_exists_or_initialize(b) for b in model.transformer_blocks]
        counting = [Counting() for _ in registries]
        for registry, hook in zip(registries, counting, strict=True):
            registry.register_hook(hook, "counting")
        torch.testing.assert_close(model(**inputs).sample, want, rtol=1e-4, atol=1e-5)
        for registry in registries:
            registry.remove_hook("counting")
        torch.testing.assert_close(model(**inputs).sample, want, rtol=1e-4, atol=1e-5)
    assert [hook.calls for hook in counting] == [1] * len(counting)
    assert {(row.calls, row.compiled_calls) for row in thunderpatch.report(model)} == {(2, 2)}
    thunderpatch.restore(model)
    assert not any("forward" in vars(block) for block in model.transformer_blocks)
