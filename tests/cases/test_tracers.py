"""Public reports of tools that look into a model and meet a compiled forward instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import thunderpatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).tanh()


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


@pytest.mark.parametrize("called", [False, True])
def test_jit_and_fx_trace_the_original(model: nn.Sequential, called: bool) -> None:
    """facebookresearch/fvcore#150"""
    x = torch.randn(2, 3)
    want = model(x)
    thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
    if called:
        model(x)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), want)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), want)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    thunderpatch.restore(model)
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", [Net, nn.Conv2d])
def test_export_captures_the_original(kind: type, called: bool) -> None:
    """pytorch/pytorch#153086"""
    model, x = Net().eval(), torch.randn(1, 2, 6, 6)
    want = model(x)
    with thunderpatch.patched(model, types=kind):
        if called:
            model(x)
        program = torch.export.export(model, (x,))
        assert sum(node.op == "call_function" for node in program.graph.nodes) == 2
        torch.testing.assert_close(program.module()(x), want)


def test_functional_call_and_per_sample_gradients_use_the_parameters_given(model: nn.Sequential) -> None:
    """pytorch/pytorch#97909"""
    x = torch.randn(5, 3)
    thunderpatch.apply(model, types=nn.Linear)
    model(x)
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    torch.testing.assert_close(functional_call(model, ones, x), (x.sum(1, keepdim=True) + 1).tanh().expand(5, 4))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, row[None]).sum()

    got = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    thunderpatch.restore(model)
    torch.testing.assert_close(got, vmap(grad(loss), in_dims=(None, 0))(parameters, x))


def test_an_ensemble_of_patched_models_runs_under_vmap() -> None:
    """torch.func's model ensembling stacks the parameters of several models and maps over them."""
    models = [nn.Sequential(nn.Linear(3, 2), nn.Tanh()) for _ in range(3)]
    x = torch.randn(4, 3)
    want = torch.stack([each(x) for each in models])
    for each in models:
        thunderpatch.apply(each, types=nn.Linear)
        each(x)
    parameters, buffers = torch.func.stack_module_state(models)

    def one(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(models[0], (parameters, buffers), (x,))

    torch.testing.assert_close(vmap(one)(parameters, buffers), want)


def test_a_flop_counter_counts_what_eager_does(model: nn.Sequential) -> None:
    x = torch.randn(2, 3)
    with FlopCounterMode(display=False) as plain:
        model(x)
    thunderpatch.apply(model, types=nn.Linear)
    model(x)
    with FlopCounterMode(display=False) as patched:
        model(x)
    assert patched.get_total_flops() == plain.get_total_flops() == 2 * 2 * 3 * 4


def test_an_outer_compile_takes_the_original_in_whole(model: nn.Sequential) -> None:
    x, graphs = torch.randn(2, 3), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    want = model(x)
    thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
    outer = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(outer(x), want)
    assert len(graphs) == 1
