"""Runs of a target of the command line, unpatched and patched, and what they come to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .errors import CompileError, ThunderPatchError
from .targets import Target, UsageError
from .tolerance import Yardstick


def run(target: Target, backward: bool) -> dict[str, Tensor]:
    """Call the model with the same random numbers each time; return outputs and, with backward, gradients."""
    with torch.random.fork_rng(), torch.set_grad_enabled(backward):
        torch.manual_seed(0)
        leaves = tree_leaves(target.model(*target.args, **target.kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        if not backward:
            return found
        differentiable = [output.sum().abs() for output in outputs if output.requires_grad]
        if not differentiable:
            raise UsageError("--backward: no output of the model requires a gradient")
        target.model.zero_grad()
        torch.autograd.backward(differentiable)
    graded = ((name, p.grad) for name, p in target.model.named_parameters() if p.grad is not None)
    return found | {f"gradient of {name}": gradient.clone() for name, gradient in graded}


def run_unpatched(target: Target, backward: bool) -> dict[str, Tensor]:
    try:
        return run(target, backward)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"unpatched, the model raises {type(error).__name__} on its inputs: {error}") from error


def run_patched(target: Target, backward: bool) -> None:
    try:
        run(target, backward)
    except ThunderPatchError:
        raise
    except Exception as error:
        raise CompileError(
            f"patched, the model raises {type(error).__name__}, though unpatched it runs: {error}"
        ) from error


def equals_unpatched(target: Target, backward: bool) -> Callable[[nn.Module], bool]:
    """Return a check that what the model computes is what it computes now, up to the rounding of its dtype."""
    expected = run_unpatched(target, backward)
    args, kwargs = tree_map(_in_float64, (target.args, target.kwargs))
    exact = run(Target(copy.deepcopy(target.model).double(), args, kwargs), backward)
    yardstick = Yardstick(exact, exact)

    def check(model: nn.Module) -> bool:
        return all(difference.ok for difference in yardstick.differences(expected, run(target, backward)))

    return check


def _in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
