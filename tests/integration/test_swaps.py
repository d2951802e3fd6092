"""Libraries that put another class, forward or weight where a model had its own: below patches, on top, beside."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from blocks import Block, ran
from torch import nn

import thunderpatch

pytestmark = pytest.mark.integration

WIDTH = 32  # torchao's groups


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, 2))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


patches = pytest.mark.parametrize("patch", ["before", "after", "called"])
WHAT = {"blocks": {"types": Block}, "Linears": {"types": nn.Linear}}
targets = pytest.mark.parametrize("what", WHAT)


# torchao: weights become tensors of a class of its own.


def quantizations() -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "int8 weights": quantization.Int8WeightOnlyConfig(),
        "int8 throughout": quantization.Int8DynamicActivationInt8WeightConfig(),
    }


@patches
@targets
@pytest.mark.parametrize("kind", ["int8 weights", "int8 throughout"])
def test_quantized_weights_are_followed(model: nn.Module, x: torch.Tensor, patch: str, what: str, kind: str) -> None:
    config, quantize = quantizations()[kind], pytest.importorskip("torchao.quantization").quantize_
    full = model(x)
    plain = copy.deepcopy(model)
    quantize(plain, config)
    with torch.no_grad():
        want = plain(x)
        if patch != "after":
            thunderpatch.apply(model, **WHAT[what])
        if patch == "called":
            model(x)
        quantize(model, config)
        if patch == "after":
            thunderpatch.apply(model, **WHAT[what])
        for _ in range(2):
            torch.testing.assert_close(model(x), want)
    assert not torch.equal(want, full)
    ran(model, 3 if patch == "called" else 2)


# bitsandbytes: a module of another class in the place of each Linear, with a function of its own for the product.


class Rounded(torch.autograd.Function):
    """Multiplies with weights of 8 bits; its gradient is that of the rounded weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weight = codes.to(x.dtype) * scale
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, None


class Linear8bit(nn.Module):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        scale = source.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (source.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(x, self.codes, self.scale) + self.bias


def swap(model: nn.Module) -> None:
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, Linear8bit(child))
        else:
            swap(child)


@patches
def test_modules_of_another_class_are_followed(model: nn.Sequential, x: torch.Tensor, patch: str) -> None:
    def outcome(model: nn.Module) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        out = model(given)
        out.square().sum().backward()
        return [out.detach(), given.grad, *(p.grad.clone() for p in model.parameters())]

    plain = copy.deepcopy(model)
    swap(plain)
    want = outcome(plain)
    if patch != "after":
        thunderpatch.apply(model, types=Block)
    if patch == "called":
        model(x)
    swap(model)
    if patch == "after":
        thunderpatch.apply(model, types=[Block, Linear8bit])
    torch.testing.assert_close(outcome(model), want)
    rows = thunderpatch.report(model).rows
    assert {row.compiled_calls - row.calls for row in rows} == {0}
    assert [row.fqn for row in rows] == ["0", "1", "2"][: len(rows)] and len(rows) == (3 if patch == "after" else 2)


def test_a_patched_module_that_is_swapped_out_is_in_no_report_and_in_no_handle(model: nn.Sequential) -> None:
    patch = thunderpatch.apply(model, types=nn.Linear)
    swap(model)
    gc.collect()
    assert thunderpatch.report(model).rows == []
    assert len(patch) == 0 and thunderpatch.restore(model) == 0


# kernels: a forward from elsewhere, bound to the module.


class Doubled(nn.Module):
    """A layer as the hub has them: without state, for the members of the module that it is bound to."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * torch.tanh(self.linear(self.norm(x)))


class Local:
    """Gives the layer as a repository of the hub would."""

    layer_name = "Doubled"

    def load(self) -> type[nn.Module]:
        return Doubled


@pytest.fixture
def kernelize(model: nn.Sequential) -> Any:
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("Block")
    class Layer(Block):
        pass

    for index in range(2):
        model[index] = Layer(WIDTH)

    def kernelize() -> None:
        with kernels.use_kernel_mapping({"Block": {"cpu": Local()}}, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")

    return kernelize


def test_a_kernel_below_a_patch_is_what_is_compiled(model: nn.Sequential, x: torch.Tensor, kernelize: Any) -> None:
    kernelize()
    want, kernel = model(x).detach(), vars(model[0])["forward"]
    with thunderpatch.patched(model, types=Block), torch.no_grad():
        torch.testing.assert_close(model(x), want)
    ran(model, 1)
    assert {row.shared_with for row in thunderpatch.report(model)} == {1}
    assert vars(model[0])["forward"] is kernel


def test_a_kernel_that_replaces_a_patched_forward_runs_and_the_report_says_so(
    model: nn.Sequential, x: torch.Tensor, kernelize: Any
) -> None:
    thunderpatch.apply(model, types=Block)
    plain = model(x)
    kernelize()
    assert not torch.allclose(model(x), plain)
    assert {str(row.status) for row in thunderpatch.report(model)} == {"displaced"}
    assert len(thunderpatch.apply(model, types=Block)) == 2  # again, for the kernel
    assert not torch.allclose(model(x), plain)
    ran(model, 2)
