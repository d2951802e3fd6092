"""Public reports, from the trackers of libraries that replace or compile forwards, of patches that went unseen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blocks import ran
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import thunderpatch

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    given = x.clone().requires_grad_()
    model(given).square().sum().backward()
    return [given.grad, *(p.grad.clone() for p in model.parameters())]


class Adapted(nn.Linear):
    """A Linear with a low-rank term that a context manager switches off, and PEFT's kind of constructor."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features)
        self.weight, self.bias = source.weight, source.bias
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.disabled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.disabled else out + x @ self.a.t() @ self.b.t()


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.disabled = True
    yield
    for module in adapted:
        module.disabled = False


def adapt(model: nn.Module, names: list[str]) -> None:
    """Put adapters in the place of modules that are looked up by their full names, as PEFT does."""
    known = dict(model.named_modules())
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(known[parent], last, Adapted(known[name]))


@pytest.mark.parametrize("what", [Block, Adapted])
def test_adapters_can_be_switched_off_after_compiling(model: nn.Sequential, x: torch.Tensor, what: type) -> None:
    """meta-pytorch/torchtune#721: a compiled layer went on adding its adapter's term when told not to."""
    plain = model(x)
    adapt(model, ["0.up", "1.down"])
    adapted = model(x)
    thunderpatch.apply(model, types=what)
    for _ in range(2):
        torch.testing.assert_close(model(x), adapted)
        with without_adapters(model):
            torch.testing.assert_close(model(x), plain)
    ran(model, 4)


def test_modules_of_a_compiled_model_are_found_by_the_names_that_they_had(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    """huggingface/peft#2957: compiling put a prefix before each name, and no adapter found its target any more."""
    thunderpatch.apply(model, types=Block)
    before = model(x)
    adapt(model, ["0.up", "1.down"])
    got = model(x)
    with thunderpatch.disabled(model):
        torch.testing.assert_close(got, model(x))
    assert not torch.allclose(got, before)
    ran(model, 2)


def test_a_compiled_model_is_still_of_its_class_and_has_its_methods(model: nn.Sequential, x: torch.Tensor) -> None:
    """huggingface/diffusers#11408: after compiling, a pipeline refused a model that was none of its classes by then."""

    class Net(nn.Sequential):
        def set_scale(self, scale: float) -> None:
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    net = Net(*model)
    thunderpatch.apply(net)
    for scale in (1.0, 0.5):
        net.set_scale(scale)
        torch.testing.assert_close(net(x), model(x) * scale)
    assert type(net) is Net
    ran(net, 2)


def test_a_child_whose_forward_is_replaced_after_compiling_runs_the_new_one(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    """pytorch/pytorch#131505: of two equal layers one got another forward; what ran then was not compiled, unsaid."""
    thunderpatch.apply(model, types=Block)
    model(x)
    model[1].up.forward = lambda x: x + 1  # type: ignore[method-assign]  # as users do
    first = model[0](x)
    torch.testing.assert_close(model(x), first + model[1].down(torch.tanh(first + 1)))
    rows = thunderpatch.report(model).rows
    assert [(row.calls, row.compiled_calls) for row in rows] == [(3, 3), (2, 2)]


def test_a_forward_that_a_forward_replaces_is_the_one_that_runs() -> None:
    """pytorch/pytorch#167400: a compiled function gave a module another forward, called it and got the old one."""

    class Patching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.inner.forward
            self.inner.forward = lambda x: old(x) * 10  # type: ignore[method-assign]  # the point
            out = self.inner(x)
            self.inner.forward = old  # type: ignore[method-assign]
            return out + self.inner(x)

    module, x = Patching(), torch.randn(2, WIDTH)
    want = module.inner(x) * 11
    thunderpatch.apply(module)
    for _ in range(2):
        torch.testing.assert_close(module(x), want)
    ran(module, 2)  # before torch 2.12 in pieces, since Dynamo misses it


def test_blocks_below_a_wrapped_root_run_compiled_and_not_their_originals(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    """huggingface/accelerate#4253: a hook on the root held on to the blocks as they were before compiling."""
    want, old = model(x), model.forward
    model.forward = functools.update_wrapper(functools.partial(lambda module, x: old(x) * 2, model), old)
    thunderpatch.apply(model, types=Block)
    torch.testing.assert_close(model(x), want * 2)
    ran(model, 1)


@pytest.mark.parametrize("patch_first", [True, False])
def test_a_caster_around_the_forward_and_the_patch_both_work_in_either_order(
    model: nn.Sequential, x: torch.Tensor, patch_first: bool
) -> None:
    """pytorch/pytorch#95641: accelerate set the forward of a compiled model, and what it set was not compiled."""

    def wrap(forward: Any) -> Any:
        cast = torch.autocast("cpu", torch.bfloat16)(forward)

        @functools.wraps(forward)
        def in_float32(*args: Any) -> torch.Tensor:
            return cast(*args).float()

        return in_float32

    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
    if patch_first:
        thunderpatch.apply(model)
    model.forward = wrap(model.forward)
    if not patch_first:
        thunderpatch.apply(model)
    got = model(x)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, want.float(), rtol=2e-2, atol=2e-2)
    ran(model, 1)


def test_a_wrapper_made_of_the_bare_function_keeps_the_patch(model: nn.Sequential, x: torch.Tensor) -> None:
    """huggingface/accelerate#4255: what binds a forward again has to find a function, not a bound callable."""
    want = model(x)
    thunderpatch.apply(model)
    function = model.forward.__func__

    def doubled(module: nn.Module, *args: Any) -> torch.Tensor:
        return function(module, *args) * 2

    model.forward = doubled.__get__(model)
    torch.testing.assert_close(model(x), want * 2)
    ran(model, 1)
    other = nn.Sequential(Block())
    torch.testing.assert_close(function(other, x), other(x))  # and it is anybody's function
    ran(model, 1)


def test_blocks_that_are_recomputed_with_a_compiled_part_inside_save_what_they_saved(x: torch.Tensor) -> None:
    """pytorch/pytorch#144637: recomputing a block with a compiled part inside counted other tensors."""
    blocks = [checkpoint_wrapper(Block(), checkpoint_impl=CheckpointImpl.NO_REENTRANT) for _ in range(2)]
    model = nn.Sequential(*blocks)
    want = gradients(model, x)
    thunderpatch.apply(model, names="*._checkpoint_wrapped_module.up")
    for _ in range(2):
        torch.testing.assert_close(gradients(model, x), want)
    ran(model, 4)


def test_saved_tensors_are_kept_where_the_caller_wants_them(x: torch.Tensor) -> None:
    """pytorch/pytorch#147565: hooks for saved tensors around a checkpoint were called for others, when compiled."""

    class Recomputed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    def kept(model: nn.Module) -> tuple[list[torch.Tensor], int]:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            packed.append(tensor.clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            found = gradients(model, x)
        return found, len(packed)

    model = nn.Sequential(Block(), Recomputed())
    want, _ = kept(model)
    thunderpatch.apply(model, types=Block)
    for _ in range(2):
        got, packed = kept(model)
        torch.testing.assert_close(got, want)
        assert packed > 0
    ran(model, 2)
