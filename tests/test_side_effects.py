"""What thunderpatch does to a model, it does to that model: the process is what it was."""

from __future__ import annotations

import copy
import importlib
import logging
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import nn

import thunderpatch
from thunderpatch.compat import load_thunder

CONFIGS = [torch._dynamo.config, torch._inductor.config, torch._functorch.config]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def use(model: nn.Module, **options: Any) -> None:
    """Do what there is: patch, call in several states, fail, copy, report, disable, restore."""
    x = torch.randn(3, 4)
    with thunderpatch.patched(model, types=Block, **options) as patch:
        model(x).sum().backward()
        with torch.no_grad():
            model(x[:2])
        with pytest.raises(RuntimeError):
            model(x[:, :3])
        with thunderpatch.disabled(model):
            model(x)
        copy.deepcopy(model)(x)
        str(patch.report())
    with pytest.raises(thunderpatch.ThunderPatchError):
        thunderpatch.apply(model, types="Nothing")


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def values() -> dict[str, Any]:
    return {f"{config.__name__}.{k}": v for config in CONFIGS for k, v in config.get_config_copy().items()}


def global_state() -> dict[str, Any]:
    return {
        "torch.compile": torch.compile,
        "nn.Module.__call__": nn.Module.__call__,
        "nn.Module.__setattr__": nn.Module.__setattr__,
        "Linear.forward": nn.Linear.forward,
        "Block.forward": Block.forward,
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "lazy graphs": torch.fx._lazy_graph_module._use_lazy_graph_module_flag,
        "log level": logging.getLogger("torch").level,
        "recursion": sys.getrecursionlimit(),
        "filters": list(warnings.filters),
        "excepthook": sys.excepthook,
    }


def test_no_configuration_value_of_the_compilers_changes(model: nn.Sequential) -> None:
    load_thunder()
    before = values()
    use(model)
    after = values()
    assert {
        name: after[name] for name in after if after[name] is not before[name] and after[name] != before[name]
    } == {}
    assert len(before) > 100


def test_no_function_or_switch_of_the_process_changes(model: nn.Sequential) -> None:
    load_thunder()
    before = global_state()
    use(model)
    assert global_state() == before


def test_thunders_own_names_are_what_they_were(model: nn.Sequential) -> None:
    thunder = load_thunder()
    dynamo = importlib.import_module("thunder.dynamo")
    before = dynamo.thunderfx, dynamo.ThunderCompiler, thunder.jit, thunder.get_default_executors()
    use(model)
    assert (dynamo.thunderfx, dynamo.ThunderCompiler, thunder.jit, thunder.get_default_executors()) == before


def test_random_numbers_are_those_of_eager(model: nn.Sequential) -> None:
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    thunderpatch.apply(model, types=Block)
    assert torch.equal(torch.get_rng_state(), state)
    model(x)
    model(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_options_of_the_caller_are_not_written_to(model: nn.Sequential) -> None:
    options = {"transforms": [], "options": {"epilogue_fusion": True}, "executors": ["sdpa"]}
    given = copy.deepcopy(options)
    use(model, **options)
    assert options == given


def test_another_model_of_the_same_classes_is_left_alone(model: nn.Sequential) -> None:
    other, compiled = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    theirs = torch.compile(compiled, backend=backend)
    x = torch.randn(3, 4)
    want, wanted = other(x), theirs(x)
    before, count = [dict(vars(module)) for module in other.modules()], len(graphs)
    use(model)
    assert [dict(vars(module)) for module in other.modules()] == before
    torch.testing.assert_close(other(x), want)
    torch.testing.assert_close(theirs(x), wanted)
    assert len(graphs) == count  # what others had compiled is still there


def test_a_reset_of_dynamo_by_others_does_no_harm(model: nn.Sequential) -> None:
    x = torch.randn(3, 4)
    thunderpatch.apply(model, types=Block)
    want = model(x)
    torch._dynamo.reset()
    torch.testing.assert_close(model(x), want)
    assert [row.compiled_calls for row in thunderpatch.report(model)] == [2, 2]


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_it_imports_neither_thunder_nor_dynamo_and_touches_no_logger() -> None:
    program = """
import sys, logging, torch
before, handlers = set(sys.modules), list(logging.root.handlers)
import thunderpatch
new = set(sys.modules) - before
print("thunder" in new, "torch._inductor.compile_fx" in new, logging.root.handlers == handlers)
"""
    assert run(program) == "False False True"


def test_an_error_before_patching_leaves_no_thunder_half_imported() -> None:
    program = """
import sys, torch, thunderpatch
try:
    thunderpatch.apply(torch.nn.Linear(1, 1), types="Nowhere")
except thunderpatch.SelectionError:
    pass
import thunder
tensor, base = torch.Tensor, torch._C.TensorBase
print(thunder.jit is sys.modules["thunder"].jit, hasattr(tensor, "rename") == hasattr(base, "rename"))
"""
    assert run(program) == "True True"
