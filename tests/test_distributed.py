"""Patched models under torch.distributed, on two ranks: losses and gradients of the unpatched distributed run."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from world import RankFailed, World

import thunderpatch

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, leave_out: int | None = None) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i != leave_out:
                x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    ranks = World()
    yield ranks
    ranks.close()


def rows(step: int) -> torch.Tensor:
    """Data of this rank alone."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model: nn.Module, loss: Callable[[int], torch.Tensor], steps: int = 3) -> list[Any]:
    """Train, and return each step's loss and gradients, and the weights at the end."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        grads = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((value.detach(), grads))
        optimizer.step()
    return [*found, {name: full(value).detach().clone() for name, value in model.state_dict().items()}]


def ran_compiled(model: nn.Module, count: int) -> None:
    called = [row for row in thunderpatch.report(model) if row.calls]
    assert len(called) == count and all(row.compiled_calls == row.calls for row in called), str(called)


# Data parallel: DDP averages over ranks, bucket by bucket while the backward runs.


def ddp_steps(model: nn.Module, patch: str, **options: Any) -> list[Any]:
    model = copy.deepcopy(model)
    skipped = 1 if options.get("find_unused_parameters") else None
    if patch == "before":
        thunderpatch.apply(model, repeated=True)
    ddp = DDP(model, bucket_cap_mb=0.0005, **options)  # several buckets, one for two or three parameters
    if patch == "after":
        thunderpatch.apply(ddp, repeated=True)
    elif patch == "whole":
        thunderpatch.apply(ddp)

    def loss(step: int) -> torch.Tensor:
        if options:
            return ddp(rows(step), skipped).square().mean()
        with ddp.no_sync():
            ddp(rows(step)).square().mean().backward()
        return ddp(rows(step + 10)).square().mean()

    found = trained(model, loss)
    if patch in ("before", "after"):
        ran_compiled(ddp, 2 if skipped else 3)
    return found


def check_ddp(**options: Any) -> None:
    model = Net()
    want = ddp_steps(model, "", **options)
    for patch in ("before", "after"):
        torch.testing.assert_close(ddp_steps(model, patch, **options), want)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_trains_patched_blocks_as_plain_ones(world: World, options: dict[str, Any]) -> None:
    world.run(functools.partial(check_ddp, **options))


def check_ddp_itself() -> None:
    model = Net()
    want = ddp_steps(model, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thunderpatch.ThunderPatchWarning)
        torch.testing.assert_close(ddp_steps(model, "whole"), want)


@pytest.mark.slow
def test_patching_ddp_itself_trains_right(world: World) -> None:
    world.run(check_ddp_itself)


def check_one_rank_patched() -> None:
    model = Net()
    want = ddp_steps(model, "")
    patch = "before" if dist.get_rank() else ""
    torch.testing.assert_close(ddp_steps(model, patch), want)


def test_ranks_that_patch_differently_still_agree(world: World) -> None:
    """What is sent between ranks are gradients, and those are the same."""
    world.run(check_one_rank_patched)


# FSDP2: the parameters of a patched block are whole only while it runs.


def fsdp_steps(model: nn.Module, patch: str, policy: MixedPrecisionPolicy) -> list[Any]:
    model = copy.deepcopy(model)
    if patch == "before":
        thunderpatch.apply(model, repeated=True)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if patch == "after":
        thunderpatch.apply(model, repeated=True)
    elif patch == "norms":
        thunderpatch.apply(model, types=nn.LayerNorm)
    elif patch == "whole":
        thunderpatch.apply(model)
    found = trained(model, lambda step: model(rows(step)).square().mean())
    if patch not in ("", "whole"):
        ran_compiled(model, 3)
    return found


def check_fsdp(patches: Sequence[str], **policy: Any) -> None:
    model = Net()
    want = fsdp_steps(model, "", MixedPrecisionPolicy(**policy))
    for patch in patches:
        got = fsdp_steps(model, patch, MixedPrecisionPolicy(**policy))
        # bfloat16 keeps 8 bits: a sum in another order is off by one of them.
        torch.testing.assert_close(got, want, **({"rtol": 2e-2, "atol": 1e-3} if policy else {}))


def test_fsdp_trains_patched_blocks_as_plain_ones(world: World) -> None:
    world.run(functools.partial(check_fsdp, ["before", "after", "norms"]))


def test_fsdp_with_mixed_precision_trains_patched_blocks_as_plain_ones(world: World) -> None:
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    world.run(functools.partial(check_fsdp, ["before", "after"], **mixed))


def test_patching_the_root_of_fsdp_trains_right(world: World) -> None:
    world.run(functools.partial(check_fsdp, ["whole"]))


# Tensor parallel: parameters, and inputs where the plan says so, are DTensors.

PLANS = {
    "columns and rows": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def tensor_parallel_steps(model: nn.Module, patch: str, plan: str) -> list[Any]:
    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
    if patch == "before":
        thunderpatch.apply(model, repeated=True)
    for block in model.blocks:
        parallelize_module(block, mesh, PLANS[plan])
    if patch == "after":
        thunderpatch.apply(model, repeated=True)

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        if plan == "columns and rows":
            return model(x).square().mean()
        x = distribute_tensor(x, mesh, [Shard(1)])
        for block in model.blocks:
            x = block(x)
        return full(x).square().mean()

    found = trained(model, loss)
    if patch in ("before", "after"):
        ran_compiled(model, 3)
    return found


def check_tensor_parallel(plan: str) -> None:
    model = Net()
    want = tensor_parallel_steps(model, "", plan)
    for patch in ("before", "after"):
        torch.testing.assert_close(tensor_parallel_steps(model, patch, plan), want)


@pytest.mark.integration  # inductor's C++ compiler takes a minute on two ranks
@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallel_trains_patched_blocks_as_plain_ones(plan: str) -> None:
    # Each plan in processes of its own: after another plan with the same sizes, torch 2.13's own
    # `block.compile()` fails on this one ("Node tangents_2 was invalid, but is output").
    with contextlib.closing(World()) as fresh:
        fresh.run(functools.partial(check_tensor_parallel, plan))


# Activation checkpointing runs a block's forward a second time, in the backward.


def checkpointed_steps(model: nn.Module, patch: str, sharded: bool) -> list[Any]:
    model, wrapper = (
        copy.deepcopy(model),
        functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    )
    if patch == "before":
        thunderpatch.apply(model, types=Block)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: type(module) is Block)
    for block in model.blocks if sharded else ():
        fully_shard(block)
    whole = fully_shard(model) if sharded else DDP(model)
    if patch == "after":
        thunderpatch.apply(whole, types=Block)
    elif patch == "wrappers":
        thunderpatch.apply(whole, types="CheckpointWrapper")
    found = trained(whole, lambda step: whole(rows(step)).square().mean())
    if patch in ("before", "after"):
        ran_compiled(whole, 3)
    return found


def check_checkpointed(sharded: bool) -> None:
    model = Net()
    want = checkpointed_steps(model, "", sharded)
    for patch in ("before", "after", "wrappers"):
        torch.testing.assert_close(checkpointed_steps(model, patch, sharded), want)


@pytest.mark.parametrize("sharded", [False, True])
def test_checkpointed_blocks_train_patched_as_plain(world: World, sharded: bool) -> None:
    world.run(functools.partial(check_checkpointed, sharded))


# Pipeline parallel: each rank has a stage.


def pipeline_steps(model: Net, patch: bool) -> list[Any]:
    model = copy.deepcopy(model)
    rank, first = dist.get_rank(), dist.get_rank() == 0
    part = nn.Sequential(*model.blocks[:2]) if first else nn.Sequential(model.blocks[2], model.head)
    if patch:
        thunderpatch.apply(part, types=Block)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    x, target, losses = torch.ones(4, WIDTH), torch.zeros(4, 2), list[torch.Tensor]()
    for _ in range(2):
        schedule.step(x) if first else schedule.step(target=target, losses=losses)
    if patch:
        ran_compiled(part, 2 if first else 1)
    return [[loss.detach() for loss in losses], [p.grad for p in part.parameters()]]


def check_pipeline() -> None:
    model = Net()
    torch.testing.assert_close(pipeline_steps(model, patch=True), pipeline_steps(model, patch=False))


def test_pipeline_stages_train_patched_as_plain(world: World) -> None:
    world.run(check_pipeline)


# Checkpoints hold what the plain model holds, under the same names.


def sharded(patch: bool) -> nn.Module:
    model = Net()
    if patch:
        thunderpatch.apply(model, repeated=True)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def check_distributed_checkpoint(folder: str) -> None:
    for saved_patched in (True, False):
        source, path = sharded(saved_patched), str(Path(folder, f"patched-{saved_patched}"))
        want = source(rows(0)).detach()
        checkpoint.save(get_model_state_dict(source), checkpoint_id=path)
        target = sharded(not saved_patched)
        target(rows(0))
        with torch.no_grad():
            for p in target.parameters():
                p.zero_()
        state = get_model_state_dict(target)
        checkpoint.load(state, checkpoint_id=path)
        set_model_state_dict(target, state)
        torch.testing.assert_close(target(rows(0)).detach(), want)


def test_a_distributed_checkpoint_goes_from_patched_to_plain_and_back_and_to_one_process(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world.run(functools.partial(check_distributed_checkpoint, folder))
        torch.manual_seed(0)
        one = Net()  # the ranks' first model, by the same seed
        want = {name: value.clone() for name, value in one.state_dict().items()}
        thunderpatch.apply(one, repeated=True)
        state = {name: torch.zeros_like(value) for name, value in one.state_dict().items()}
        checkpoint.load(state, checkpoint_id=str(Path(folder, "patched-True")), no_dist=True)
        one.load_state_dict(state)
        torch.testing.assert_close(dict(one.state_dict()), want)


# A rank that fails says so, and the others do not wait for ever.


class Refused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


def check_one_rank_fails() -> None:
    model = Net()
    model.blocks[1].norm = nn.Sequential(model.blocks[1].norm, Refused())  # type: ignore[assignment]
    ddp = DDP(model)
    thunderpatch.apply(ddp, types=Block, fullgraph=dist.get_rank() == 1)
    ddp(rows(0)).sum().backward()


def test_a_rank_that_cannot_compile_is_an_error_on_every_rank() -> None:
    with contextlib.closing(World(collective_timeout=5)) as own:
        (waited, other), (failed, text) = own.outcomes(check_one_rank_fails, timeout=120)
    assert not failed and "CompileError: module.blocks.1 (Block)" in text
    assert not waited and "hangs" not in other and "RuntimeError" in other and "imed out" in other


def test_a_check_that_fails_is_told_with_its_rank(world: World) -> None:
    with pytest.raises(RankFailed, match=r"rank 1[\s\S]*nobody is home"):
        world.run(check_nobody)


def check_nobody() -> None:
    assert dist.get_rank() == 0, "nobody is home"
