"""All that a call of a module does, as named values: outputs, gradients, written inputs, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capturing import Call, Inputs
from .copying import tensors_in
from .masks import Masks
from .preserving import preserved

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

    The backward starts from fixed numbers, the same for each run. Module and random state are as before.
    `cast` and `moved_by` are those of `Call.fresh`.
    """
    with preserved(module), call.modes():
        torch.manual_seed(_SEED)
        inputs = call.fresh(cast, moved_by)
        torch.manual_seed(_SEED)
        before = _random_state()
        with masks or contextlib.nullcontext():
            result = module(*inputs.args, **inputs.kwargs)
        after = _random_state()
        values: dict[str, Any] = {}
        roots: list[Tensor] = []
        for name, value in _named(result, "output"):
            if isinstance(value, Tensor):
                values[name] = value.detach().clone()
                values[f"requires_grad of {name}"] = value.requires_grad
                roots.append(value)
            else:
                values[name] = value
        values.update(_gradients(module, inputs, roots))
        for name, tensor in _given(inputs):
            values[f"{name} afterwards"] = tensor.detach()
        for name, buffer in module.named_buffers():
            values[f"buffer {name}"] = buffer.detach().clone()
    drew = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return Outcome(values, drew, after)


def _gradients(module: nn.Module, inputs: Inputs, outputs: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    # What the call wrote into an argument is a result as well, with a gradient of its own.
    written = [t for t in inputs.given if t.requires_grad and not t.is_leaf]
    roots = list({id(t): t for t in [*outputs, *written] if t.requires_grad}.values())
    wanted = [
        (name, leaf)
        for (name, _), leaf in zip(_given(inputs), inputs.leaves, strict=True)
        if leaf.requires_grad
    ]
    wanted += [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not roots or not wanted:
        return
    starts = [_start(root, k) for k, root in enumerate(roots)]
    found = torch.autograd.grad(roots, [tensor for _, tensor in wanted], starts, allow_unused=True)
    for (name, _), gradient in zip(wanted, found, strict=True):
        yield f"gradient of {name}", None if gradient is None else gradient.detach()


def _start(tensor: Tensor, seed: int) -> Tensor:
    """Return numbers to begin a backward with, exact in each floating-point dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, *tensor.shape) if tensor.is_complex() else tensor.shape
    eighths = torch.randint(-16, 17, shape, generator=generator) / 8
    if tensor.is_complex():
        eighths = torch.complex(eighths[0], eighths[1])
    return eighths.to(tensor.device, tensor.dtype)


def _given(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Return the tensors that were handed over, each with a name that says where."""
    names = {
        id(value): f"argument {name}"
        for k, argument in [*enumerate(inputs.args), *inputs.kwargs.items()]
        for name, value in _named(argument, str(k))
    }
    return [(names.get(id(t), f"argument tensor {k}"), t) for k, t in enumerate(inputs.given)]


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in a structure, by where they stand."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        place = name + pytree.keystr(path)
        if isinstance(leaf, (Tensor, *_PLAIN)):
            yield place, leaf
        else:
            yield from ((f"{place}:{k}", tensor) for k, tensor in enumerate(tensors_in(leaf)))


def _random_state() -> tuple[Tensor, ...]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if in_use else ()))
