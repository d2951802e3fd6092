"""The gradient of a thunder partition: thunder's backward, and a backward that can be differentiated again.

thunder's own autograd function gives gradients without history: under `create_graph=True` a gradient penalty would
vanish in silence. Here a backward that runs with grad mode on recomputes the partition as captured, from the inputs.
Ordinary training must not pay for that: an input is held only if thunder's backward saves it anyway or if it is a
parameter, and otherwise known weakly. An input that is gone is an error, and from then on the inputs are kept.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CompileError

log = logging.getLogger("thunderpatch")


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


class Gradient:
    """Connects the outputs of one compiled computation to autograd.

    Made from the first run, since everything that holds for one call of a compiled computation holds for all:
    which arguments its backward saves, which of the saved tensors are views, in what order gradients come.
    """

    def __init__(
        self,
        region: Region,
        backward: Callable[..., Any],
        differentiable: Sequence[bool] | None,
        args: Sequence[Any],
        result: tuple[dict[str, Any], Sequence[Any]],
        observed: Observed,
    ) -> None:
        data, saved = result
        self.region, self._backward = region, backward
        self._mutated, self._random = observed.mutated(args), observed.drew_random_numbers()
        self._proven = False  # the compiled backward has run once
        self._failed = False
        place = {id(value): k for k, value in enumerate(saved)}
        self._saved = {i: place[id(arg)] for i, arg in enumerate(args) if id(arg) in place}
        rest = [i for i in range(len(args)) if i not in self._saved]
        strong = [i for i in rest if type(args[i]) is torch.nn.Parameter or not _is_tensor(args[i])]
        self._keep(strong, [i for i in rest if i not in strong])
        # A view that is saved keeps its base's graph alive (pytorch/pytorch#94990), except where it is an input.
        inputs = {id(arg) for arg in args}
        self._views = [k for k, t in enumerate(saved) if _is_tensor(t) and t._base is not None and id(t) not in inputs]
        self._fixed = [
            k for k, yes in enumerate(differentiable or ()) if not yes and _is_tensor(data["flat_output"][k])
        ]
        place = {id(value): k for k, value in enumerate(data["flat_args"])}
        self._places = [place.get(id(arg)) for arg in args]
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    def connect(self, args: Sequence[Any], data: dict[str, Any], saved: Sequence[Any], others: Sequence[Any]) -> None:
        """Give the outputs in `data` a history, in place. Grad mode is on."""
        if self._views:
            saved = list(saved)
            for k in self._views:
                saved[k] = saved[k].detach()
        _apply(self, saved, others, data["flat_output"], *args)

    def _keep(self, strong: Sequence[int], weak: Sequence[int]) -> None:
        self._strong, self._weak = tuple(strong), tuple(weak)

    def hold(self, args: Sequence[Any]) -> Held:
        """Return what a call keeps for later: some arguments, and weak references to the others."""
        strong, weak = self._strong, self._weak
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
                self._keep(sorted([*self._strong, *self._weak]), ())
                gone = "an ordinary step does not keep them; they are kept from now on, so run the step again"
            raise CompileError(
                f"{self.region.owner}: {purpose} needs the region computed again from its inputs, but {gone}. Or leave "
                "the region out: thunderpatch.disabled(model) around this step, or apply(..., exclude=...)."
            )
        return [found[i].clone() if i in self._mutated else found[i] for i in range(len(found))]

    def compiled(self, saved: list[Any], others: Any, grads: list[Any], clear: Callable[[], None]) -> list[Any]:
        """Run thunder's backward and return the gradients of the arguments; `clear` lets autograd's copy go."""
        if self._proven:
            clear()  # thunder drops each saved tensor after its last use; autograd must not hold them longer
        found = self._backward([saved, others], grads)
        self._proven = True
        return [None if k is None else found[k] for k in self._places]

    def first(self, ctx: Any, saved: list[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """Run thunder's backward for the first time, when parts of it may still have to be compiled."""
        if not self._failed:
            try:
                return self.compiled(saved, ctx.others, list(grads), lambda: None)
            except Exception as error:
                if self.region.on_error == "raise":
                    raise CompileError(
                        f"{self.region.owner}: the backward of the region failed: {type(error).__name__}: {error}\n"
                        "Leave the module out (exclude=), or let it run uncompiled (on_error='eager')."
                    ) from error
                self._failed = True
                log.warning("%s: the backward runs uncompiled after %r", self.region.owner, error)
        inputs = self.inputs(ctx.held, ctx.saved_tensors, "the backward, whose compiled form failed,")
        return self.recomputed(inputs, grads, create_graph=False)

    def recomputed(self, inputs: Sequence[Any], grads: Sequence[Any], *, create_graph: bool) -> Sequence[Any]:
        """Return the gradients of the arguments, by running the region as captured."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            result = self.region.original(*inputs)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [i for i, value in enumerate(inputs) if _is_tensor(value) and value.requires_grad]
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

    @property
    def proven(self) -> bool:
        """Whether the compiled backward has run once."""
        return self._proven


Held = tuple[tuple[int, ...], list[Any], tuple[int, ...], list["weakref.ref[Any]"]]


class _Connected(torch.autograd.Function):
    """Puts outputs that are computed already into autograd's graph, as coming from the arguments."""

    @staticmethod
    def forward(ctx: Any, gradient: Gradient, saved: Sequence[Any], others: Any, outputs: Any, *args: Any) -> Any:
        ctx.gradient, ctx.others = gradient, others
        ctx.held = gradient.hold(args)
        ctx.save_for_backward(*saved)
        if gradient._fixed:
            ctx.mark_non_differentiable(*[outputs[k] for k in gradient._fixed])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient: Gradient = ctx.gradient
        if torch.is_grad_enabled():
            inputs = gradient.inputs(ctx.held, ctx.saved_tensors, "double backward (create_graph=True)")
            return None, None, None, None, *gradient.recomputed(inputs, grads, create_graph=True)
        saved = list(ctx.saved_tensors)
        if not gradient.proven:
            return None, None, None, None, *gradient.first(ctx, saved, grads)
        given = list(grads)
        del grads  # each gradient goes with its last use
        return None, None, None, None, *gradient.compiled(saved, ctx.others, given, ctx.maybe_clear_saved_tensors)


# `Function.apply` without what it does for functorch, under which nothing gets here; the same where it is missing.
_apply: Callable[..., Any] = getattr(super(torch.autograd.Function, _Connected), "apply", _Connected.apply)


def version(value: Any) -> int | None:
    """Return how often a tensor has been written to; None where that is not counted."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
