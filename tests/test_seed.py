"""The script of Lightning-AI/lightning-thunder#2757, retold: the part that did not work works."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import thunderpatch
from thunderpatch import registry, thunderfx


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def replace(
    module: nn.Module,
    replacement: Callable[[nn.Module, str], nn.Module],
    matches: Callable[[nn.Module, str], bool],
    prefix: str = "",
) -> nn.Module:
    """Swap each module that matches for what `replacement` makes of it, as torchao's quantize_ does."""
    name = prefix[:-1]
    if matches(module, name):
        return replacement(module, name)
    for child_name, child in list(module.named_children()):
        new = replace(child, replacement, matches, f"{prefix}{child_name}.")
        if new is not child:
            setattr(module, child_name, new)
    return module


def is_relu(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.ReLU)


def test_the_result_is_a_module_of_its_own_class_with_a_forward() -> None:
    model, x = build(), torch.randn(2, 6)
    want = model(x)
    compiled = thunderfx(model)
    assert type(compiled) is nn.Sequential and compiled is model
    assert compiled.forward.__self__ is model and compiled.forward.__name__ == "forward"
    torch.testing.assert_close(compiled(x), want)
    assert len(compiled.forward.last_traces) == 1


def test_replacing_submodules_by_what_thunderfx_returns_works() -> None:
    model, x = build(), torch.randn(2, 6)
    want, relu = model(x), model[1]
    replace(model, lambda module, name: thunderfx(module), is_relu)
    assert model[1] is relu and thunderpatch.is_patched(relu)
    torch.testing.assert_close(model(x), want)
    assert len(relu.forward.last_traces) == 1
    assert [name for name, module in model.named_modules() if thunderpatch.is_patched(module)] == ["1"]


def test_it_works_beside_submodules_that_torch_compile_has_wrapped() -> None:
    model, x = build(), torch.randn(2, 6)
    want = model(x)
    replace(model, lambda module, name: torch.compile(module, backend="eager"), is_relu)
    replace(model, lambda module, name: thunderfx(module), lambda module, name: isinstance(module, nn.Linear))
    torch.testing.assert_close(model(x), want)
    assert thunderpatch.restore(model) == 2


def test_gradients_reach_the_parameters_of_the_model() -> None:
    model, x = build(), torch.randn(2, 6)
    want = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    replace(model, lambda module, name: thunderfx(module), is_relu)
    torch.testing.assert_close(torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters())), want)
    assert list(model.state_dict()) == list(build().state_dict())


def test_options_are_handed_on() -> None:
    model = build()
    thunderfx(model, fullgraph=True, executors=["sdpa"])
    assert registry.active(model).compiler.options.fullgraph is True
