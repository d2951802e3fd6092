"""All that a call of a module does, as named values: outputs, gradients, written inputs, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .calls import Call, Inputs
from .copying import tensors_in
from .masks import Masks
from .preserving import preserved, version

_SEED = 1
_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Outcome:
    """What one call gave, by name; a gradient that did not arrive is None."""

    values: dict[str, Any]
    drew: bool  # whether random numbers were drawn in the forward
    random_state: tuple[Tensor, ...]  # after the forward

    def same_random_numbers(self, other: Outcome) -> bool:
        """Whether both calls, begun at the same random state, drew equally much from it."""
        return all(map(torch.equal, self.random_state, other.random_state))


def run(
    module: nn.Module,
    call: Call,
    *,
    cast: torch.dtype | None = None,
    moved_by: float = 0.0,
    masks: Masks | None = None,
) -> Outcome:
    """Call `module` with fresh copies of the arguments, and backward where the call was in grad mode.

    `cast` and `moved_by` are those of `Call.fresh`. Module and random state are as before.
    """
    with preserved(module), call.modes():
        torch.manual_seed(_SEED)
        inputs = call.fresh(cast, moved_by)
        torch.manual_seed(_SEED)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        outcome = observe(module, inputs, _names(inputs), own, masks)
        outcome.values.update((f"buffer {name}", b.detach().clone()) for name, b in module.named_buffers())
        return outcome


def observe(
    function: Callable[..., Any],
    inputs: Inputs,
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    masks: Masks | None = None,
    backward: bool = True,
) -> Outcome:
    """Call `function` once, and backward where an output requires a gradient, and name all that came of it.

    `names` are those of `inputs.given`; `parameters` are what else gets gradients. The backward starts from
    fixed numbers, the same each time.
    """
    before, versions = random_state(), [version(tensor) for tensor in inputs.given]
    with masks or contextlib.nullcontext():
        result = function(*inputs.args, **inputs.kwargs)
    after = random_state()
    values: dict[str, Any] = {}
    roots: list[Tensor] = []
    for name, value in _named(result, "output"):
        values[name] = value
        if isinstance(value, Tensor):
            values[name] = value.detach().clone()
            values[f"requires_grad of {name}"] = value.requires_grad
            roots.append(value)
    # What the call wrote into an argument is a result as well, with a gradient of its own.
    roots += [t for t, v in zip(inputs.given, versions, strict=True) if version(t) != v]
    wanted = {name: t for name, t in zip(names, inputs.leaves, strict=True) if t.requires_grad}
    if backward:
        values.update(_gradients(roots, {**wanted, **parameters}))
    values.update((f"{name} afterwards", t.detach()) for name, t in zip(names, inputs.given, strict=True))
    drew = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return Outcome(values, drew, after)


def _gradients(results: Sequence[Tensor], wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    roots = list({id(t): t for t in results if t.requires_grad}.values())
    if not roots or not wanted:
        return
    starts = [_start(root, k) for k, root in enumerate(roots)]
    # Not backward(): that would run hooks which react to a parameter's gradient, optimizers among them.
    found = torch.autograd.grad(roots, list(wanted.values()), starts, allow_unused=True)
    for name, gradient in zip(wanted, found, strict=True):
        yield f"gradient of {name}", None if gradient is None else gradient.detach()


def _start(tensor: Tensor, seed: int) -> Tensor:
    """Return numbers to begin a backward with, exact in each floating-point dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, *tensor.shape) if tensor.is_complex() else tensor.shape
    eighths = torch.randint(-16, 17, shape, generator=generator) / 8
    if tensor.is_complex():
        eighths = torch.complex(eighths[0], eighths[1])
    return eighths.to(tensor.device, tensor.dtype)


def _names(inputs: Inputs) -> list[str]:
    """Return a name for each tensor that is handed over, which says where."""
    names = {
        id(value): f"argument {name}"
        for k, argument in [*enumerate(inputs.args), *inputs.kwargs.items()]
        for name, value in _named(argument, str(k))
    }
    return [names.get(id(tensor), f"argument tensor {k}") for k, tensor in enumerate(inputs.given)]


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in a structure, by where they stand."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        place = name + pytree.keystr(path)
        if isinstance(leaf, (Tensor, *_PLAIN)):
            yield place, leaf
        else:
            yield from ((f"{place}:{k}", tensor) for k, tensor in enumerate(tensors_in(leaf)))


def random_state() -> tuple[Tensor, ...]:
    """Return the state of the random generators of CPU and CUDA."""
    in_use = torch.cuda.is_initialized()
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if in_use else ()))
