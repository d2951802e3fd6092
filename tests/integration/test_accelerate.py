"""accelerate wraps the forward of modules, moves their weights in and out, and unwraps what it has wrapped."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WIDTH, Block, Net, ran
from torch import nn

import thunderpatch

accelerate = pytest.importorskip("accelerate")
from accelerate import hooks, utils  # noqa: E402  # there is no accelerate without the line above

pytestmark = pytest.mark.integration


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


@pytest.fixture(autouse=True)
def _one_accelerator_a_test() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


# Training. What is patched is the blocks, or the model as a whole.

WHAT = {"blocks": {"types": Block}, "whole": {}}


def trained(model: nn.Module, x: torch.Tensor, precision: str, patch: str = "", what: str = "") -> Any:
    """Losses and final weights of two steps with accumulated gradients."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = copy.deepcopy(model)
    if patch == "before":
        thunderpatch.apply(model, **WHAT[what])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.stack([x[:2], x[2:], x[:2], x[2:]]), batch_size=None)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if patch == "after":
        thunderpatch.apply(model, **WHAT[what])
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    if patch:
        ran(model, 4)
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("patch", ["before", "after"])
def test_a_prepared_model_trains_as_plain(model: Net, x: torch.Tensor, patch: str, precision: str, what: str) -> None:
    want = trained(model, x, precision)
    got = trained(model, x, precision, patch, what)
    rough = {"rtol": 2e-2, "atol": 2e-2} if precision == "bf16" else {}
    torch.testing.assert_close(got, want, **rough)


def test_unwrapping_keeps_patched_blocks_and_takes_off_the_patch_of_what_accelerate_has_wrapped(
    model: Net, x: torch.Tensor
) -> None:
    want = model(x)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    thunderpatch.apply(model, types=[Net, Block], nested="all")
    prepared = accelerator.prepare(model)
    prepared(x)
    assert thunderpatch.is_patched(model)
    assert accelerator.unwrap_model(prepared) is model
    assert thunderpatch.is_patched(model)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    # It walks down to the function of the class, past whatever is on the instance.
    assert str(thunderpatch.report(model)[""].status) == "displaced"
    torch.testing.assert_close(model(x), want)
    assert thunderpatch.report(model)["blocks.0"].compiled_calls == 1


def test_extracting_from_a_parallel_wrapper_keeps_patches(model: Net, x: torch.Tensor) -> None:
    want = model(x)
    thunderpatch.apply(model, types=Block)
    wrapped = torch.nn.DataParallel(model)
    assert utils.extract_model_from_parallel(wrapped) is model
    assert utils.extract_model_from_parallel(nn.Sequential(model), recursive=True)[0] is model
    torch.testing.assert_close(model(x), want)
    ran(model, 1)


# Regional compilation: an outer compiler, which takes the originals in.


@pytest.mark.parametrize("patch", ["before", "after"])
def test_compile_regions_takes_patched_blocks_in(model: Net, x: torch.Tensor, patch: str) -> None:
    want = model(x)
    if patch == "before":
        thunderpatch.apply(model, types=Block)
    compiled = utils.compile_regions(model, backend="aot_eager")
    if patch == "after":
        thunderpatch.apply(compiled, types=Block)
    torch.testing.assert_close(compiled(x), want)
    # accelerate 1.16 compiles copies of the blocks, which take no patch with them; before, it compiled the blocks.
    copied = {id(module) for module in model.modules()}.isdisjoint(id(block._orig_mod) for block in compiled.blocks)
    # Dynamo does not look into a proxy before torch 2.12: there a block that is compiled by itself stays in thunder.
    old = "recompile_limit" not in inspect.signature(torch.compile).parameters
    status = "never called" if copied and patch == "before" else "compiled" if old else "inlined"
    assert {str(row.status) for row in thunderpatch.report(model if patch == "before" else compiled)} == {status}
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    torch.testing.assert_close(model(x), want)
    if patch == "before" or not copied:
        ran(model, 2 if old and not copied else 1)


# Hooks that hold a module's weights elsewhere until it is called.


def offloaded(model: nn.Module, patch: str, **select: Any) -> nn.Module:
    model = copy.deepcopy(model)
    if patch == "before":
        thunderpatch.apply(model, **select)
    accelerate.cpu_offload(model, execution_device="cpu")
    if patch == "after":
        thunderpatch.apply(model, **select)
    return model


def on_disk(model: nn.Module, folder: Path) -> nn.Module:
    places = {"blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "head": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


LEAVES_AND_BLOCKS = {"leaves": {"types": [nn.Linear, nn.LayerNorm]}, "blocks": {"types": Block}}


@pytest.mark.parametrize("what", LEAVES_AND_BLOCKS)
@pytest.mark.parametrize("patch", ["before", "after"])
def test_offloaded_weights_come_in_for_each_call_and_leave(model: Net, x: torch.Tensor, patch: str, what: str) -> None:
    with torch.no_grad():
        want = model(x)
        patched = offloaded(model, patch, **LEAVES_AND_BLOCKS[what])
        for _ in range(3):
            torch.testing.assert_close(patched(x), want)
            assert {p.device.type for p in patched.parameters()} == {"meta"}
    ran(patched, 3)


@pytest.mark.parametrize("what", LEAVES_AND_BLOCKS)
@pytest.mark.parametrize("patch", ["before", "after"])
def test_a_dispatched_model_reads_its_weights_from_disk(
    model: Net, x: torch.Tensor, patch: str, what: str, tmp_path: Path
) -> None:
    with torch.no_grad():
        want = model(x)
        if patch == "before":
            thunderpatch.apply(model, **LEAVES_AND_BLOCKS[what])
        on_disk(model, tmp_path)
        if patch == "after":
            thunderpatch.apply(model, **LEAVES_AND_BLOCKS[what])
        for _ in range(2):
            torch.testing.assert_close(model(x), want)
    ran(model, 2)
    assert model.blocks[1].linear.weight.is_meta and not model.blocks[0].linear.weight.is_meta


def test_weights_kept_in_another_dtype_are_cast_for_each_call(model: Net, x: torch.Tensor) -> None:
    def stored_as_halves(model: nn.Module) -> nn.Module:
        accelerate.big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
        return model

    with torch.no_grad():
        want = stored_as_halves(copy.deepcopy(model))(x)
        thunderpatch.apply(stored_as_halves(model), types=[nn.Linear, Block], nested="all")
        for _ in range(2):
            torch.testing.assert_close(model(x), want)
    assert model.blocks[0].linear.weight.dtype is torch.bfloat16
    assert {(row.calls, row.compiled_calls) for row in thunderpatch.report(model).rows if row.cls == "Block"} == {
        (2, 2)
    }


class Counting(hooks.ModelHook):
    def __init__(self) -> None:
        self.calls = 0

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


def test_hooks_put_on_a_patched_module_come_off_and_leave_the_patch(model: Net, x: torch.Tensor) -> None:
    want, before, hook = model(x), [dict(vars(module)) for module in model.modules()], Counting()
    patch = thunderpatch.apply(model, types=Block)
    for block in model.blocks:
        hooks.add_hook_to_module(block, hook)
        hooks.add_hook_to_module(block, Counting(), append=True)
    torch.testing.assert_close(model(x), want)
    hooks.remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(x), want)
    assert hook.calls == 3
    ran(model, 2)
    assert patch.restore() == 3
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_patch_on_top_of_hooks_runs_them_compiled_and_leaves_them_when_restored(model: Net, x: torch.Tensor) -> None:
    want, hook = model(x), Counting()
    for block in model.blocks:
        hooks.add_hook_to_module(block, hook)
    own = [vars(block)["forward"] for block in model.blocks]
    with thunderpatch.patched(model, types=Block):
        torch.testing.assert_close(model(x), want)
        ran(model, 1)
    assert [vars(block)["forward"] for block in model.blocks] == own
    torch.testing.assert_close(model(x), want)
    assert hook.calls == 6


def test_hooks_that_come_off_from_below_a_patch_take_it_with_them_and_the_report_says_so(
    model: Net, x: torch.Tensor
) -> None:
    """accelerate sets the forward that it has found, whatever stands there by now."""
    want = model(x)
    hooks.add_hook_to_module(model.blocks[0], Counting())
    thunderpatch.apply(model, types=Block)
    hooks.remove_hook_from_module(model.blocks[0])
    row = thunderpatch.report(model)["blocks.0"]
    assert (str(row.status), row.reason) == ("displaced", "its forward was replaced by a method")
    assert len(thunderpatch.apply(model, types=Block)) == 1  # again
    torch.testing.assert_close(model(x), want)
    ran(model, 1)


def test_the_patch_of_a_hooked_module_is_restored_below_the_hook(model: Net, x: torch.Tensor) -> None:
    want, hook = model(x), Counting()
    thunderpatch.apply(model, names="head")
    hooks.add_hook_to_module(model.head, hook)
    model(x)
    with pytest.warns(thunderpatch.ThunderPatchWarning, match="below another wrapper"):
        assert thunderpatch.restore(model) == 1
    torch.testing.assert_close(model(x), want)
    assert hook.calls == 2


def test_a_copy_of_a_dispatched_patched_model_computes_with_its_own_weights(model: Net, x: torch.Tensor) -> None:
    """huggingface/accelerate#1835: the copy's forward was the original's hook, for the original's weights."""
    thunderpatch.apply(model, types=Block)
    for block in model.blocks:
        hooks.add_hook_to_module(block, Counting())
    with torch.no_grad():
        want = model(x)
        twin = copy.deepcopy(model)
        for p in model.parameters():
            p.zero_()
        torch.testing.assert_close(twin(x), want)
    assert [block._hf_hook.calls for block in twin.blocks] == [2] * 3
    ran(twin, 1)
