"""A part of a captured graph run again, as captured, in a backward that is to be differentiated itself.

Ordinary training must not pay for that: an input is held only if the backward saves it anyway or if it is a
parameter, and otherwise known weakly. An input that is gone is an error, and from then on the inputs are kept.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CompileError
from .options import Options

Held = tuple[Sequence[int], list[Any], Sequence[int], list["weakref.ref[Any]"]]


class Observed:
    """Notes the state before a run, to tell afterwards what the run did besides computing."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._versions = [version(arg) for arg in args]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def mutated(self, args: Sequence[Any]) -> list[int]:
        return [i for i, arg in enumerate(args) if version(arg) != self._versions[i]]

    def drew_random_numbers(self) -> bool:
        cuda = self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state())
        return cuda or not torch.equal(self._random, torch.get_rng_state())


@dataclass(frozen=True)
class Region:
    """What a gradient has to know of the part of a captured graph that it belongs to."""

    original: Callable[..., Any]  # the part as captured
    owner: str  # the module, for messages
    on_error: str
    double_backward: bool  # whether all inputs are kept for one

    @classmethod
    def of(cls, original: Callable[..., Any], owner: str, options: Options) -> Region:
        return cls(original, owner, options.on_error, options.double_backward)


class Recomputation:
    """Keeps what it takes to run a region again with the inputs of a call.

    Made from the first run, since everything that holds for one call of a compiled computation holds for all.
    `saved` tells which arguments the compiled backward keeps itself, and under which number.
    """

    # Set by the first backward that was refused for want of an input: who differentiates twice will do so again.
    keep_all = False

    def __init__(self, region: Region, args: Sequence[Any], observed: Observed, saved: Mapping[int, int]) -> None:
        self.region, self._saved = region, saved
        self._mutated, self._random = observed.mutated(args), observed.drew_random_numbers()
        rest = [i for i in range(len(args)) if i not in saved]
        self._strong = [i for i in rest if type(args[i]) is torch.nn.Parameter or not is_tensor(args[i])]
        self._weak = [i for i in rest if i not in self._strong]
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    def hold(self, args: Sequence[Any]) -> Held:
        """Return what a call keeps for later: some arguments, and weak references to the others."""
        strong, weak = self._strong, self._weak
        if weak and (Recomputation.keep_all or self.region.double_backward):
            strong, weak = [*strong, *weak], []
        return strong, [args[i] for i in strong], weak, [weakref.ref(args[i]) for i in weak]

    def inputs(self, held: Held, saved: Sequence[Any], purpose: str) -> list[Any]:
        """Return the arguments of the call again, each with its history."""
        strong, kept, weak, refs = held
        found = dict(zip(strong, kept, strict=True)) | {i: saved[k] for i, k in self._saved.items()}
        found |= {i: ref() for i, ref in zip(weak, refs, strict=True)}
        if self._random or any(found[i] is None for i in weak):
            if self._random:
                gone = "its random numbers cannot be drawn again"
            else:
                Recomputation.keep_all = True
                gone = "they are not kept for an ordinary step (from now on they are: apply(..., double_backward=True))"
            raise CompileError(
                f"{self.region.owner}: {purpose} needs the region computed again from its inputs, but {gone}. Or "
                "leave the region out: thunderpatch.disabled(model) around this step, or apply(..., exclude=...)."
            )
        return [found[i].clone() if i in self._mutated else found[i] for i in range(len(found))]

    def recomputed(self, inputs: Sequence[Any], grads: Sequence[Any], *, create_graph: bool) -> Sequence[Any]:
        """Return the gradients of the arguments, by running the region as captured."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            # Views, since one input may be computed from another: what flows there is not this region's gradient.
            inputs = [value.view_as(value) if is_tensor(value) and value.requires_grad else value for value in inputs]
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            result = self.region.original(*inputs)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [i for i, value in enumerate(inputs) if is_tensor(value) and value.requires_grad]
        answer: list[Any] = [None] * len(inputs)
        if pairs and wanted:
            some = torch.autograd.grad(
                [o for o, _ in pairs],
                [inputs[i] for i in wanted],
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
            for i, grad in zip(wanted, some, strict=True):
                answer[i] = grad
        return answer


def version(value: Any) -> int | None:
    """Return how often a tensor has been written to; None where that is not counted."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
