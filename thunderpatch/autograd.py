"""The gradient of a thunder partition: thunder's backward, and a backward that can be differentiated again.

thunder's own autograd function gives gradients without history: under `create_graph=True` a gradient penalty would
vanish in silence. Here a backward that runs with grad mode on recomputes the partition as captured, from the inputs.
Ordinary training must not pay for that: an input is held only if thunder's backward saves it anyway or if it is a
parameter, and otherwise known weakly. An input that is gone is an error, and from then on the inputs are kept.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import CompileError


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


Held = tuple[list[tuple[int, Any]], list[tuple[int, "weakref.ref[Any]"]]]


class Recompute:
    """How the inputs of one partition are found again at backward, and what runs on them."""

    def __init__(self, original: Callable[..., Any], owner: str, on_error: str) -> None:
        self.original, self.owner, self.on_error = original, owner, on_error
        self.mutated: Sequence[int] = ()
        self.random = False
        self.proven = False  # the compiled backward has run once
        self.failure: BaseException | None = None
        self._saved: dict[int, int] = {}  # argument -> its place among the saved tensors
        self._strong: Sequence[int] = ()
        self._weak: Sequence[int] = ()
        self._autocast: list[tuple[str, torch.dtype]] = []

    def learn(self, args: Sequence[Any], saved: Sequence[Any], observed: Observed) -> None:
        """Look at the first run: which arguments the compiled backward saves, writes to, or leaves alone."""
        self.mutated, self.random = observed.mutated(args), observed.drew_random_numbers()
        place = {id(value): k for k, value in enumerate(saved)}
        self._saved = {i: place[id(arg)] for i, arg in enumerate(args) if id(arg) in place}
        rest = [i for i in range(len(args)) if i not in self._saved]
        self._strong = [i for i in rest if type(args[i]) is torch.nn.Parameter or not _is_tensor(args[i])]
        self._weak = [i for i in rest if i not in self._strong]
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]

    def hold(self, args: Sequence[Any]) -> Held:
        """Return what a call keeps for later: some arguments, and weak references to the others."""
        return [(i, args[i]) for i in self._strong], [(i, weakref.ref(args[i])) for i in self._weak]

    def inputs(self, held: Held, saved: Sequence[Any], purpose: str) -> list[Any]:
        """Return the arguments of the call again, each with its history."""
        found = dict(held[0]) | {i: saved[k] for i, k in self._saved.items()}
        found |= {i: ref() for i, ref in held[1]}
        if self.random or any(found[i] is None for i, _ in held[1]):
            gone = "its random numbers cannot be drawn again" if self.random else self._keep()
            raise CompileError(
                f"{self.owner}: {purpose} needs the region computed again from its inputs, but {gone}. "
                "Or leave the region out: thunderpatch.disabled(model) around this step, or apply(..., exclude=...)."
            )
        return [found[i].clone() if i in self.mutated else found[i] for i in range(len(found))]

    def _keep(self) -> str:
        self._strong, self._weak = sorted([*self._strong, *self._weak]), ()
        return "an ordinary step does not keep them; they are kept from now on, so run the step again"

    def gradients(self, inputs: Sequence[Any], grads: Sequence[Any], *, create_graph: bool) -> tuple[Any, ...]:
        """Return the gradients of the arguments, by running the partition as captured."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            result = self.original(*inputs)
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
        return tuple(answer)


class _Connected(torch.autograd.Function):
    """Puts outputs that are computed already into autograd's graph, as coming from the arguments."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> Any:
        ctx.call = call
        ctx.held = call.recompute.hold(args)
        ctx.save_for_backward(*call.saved)
        call.saved = ()
        outputs = call.outputs
        call.outputs = ()
        if call.differentiable is not None:
            ctx.mark_non_differentiable(
                *(o for o, yes in zip(outputs, call.differentiable, strict=True) if not yes and _is_tensor(o))
            )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        recompute = call.recompute
        if torch.is_grad_enabled():
            inputs = recompute.inputs(ctx.held, ctx.saved_tensors, "double backward (create_graph=True)")
            return (None, *recompute.gradients(inputs, grads, create_graph=True))
        saved, given = list(ctx.saved_tensors), list(grads)
        if recompute.proven:
            del grads
            # thunder's backward drops each saved tensor after its last use; autograd must not hold them longer.
            ctx.maybe_clear_saved_tensors()
            return (None, *call.ordered(call.backward([saved, call.others], given)))
        return (None, *_first_backward(ctx, call, saved, given, grads))


def _first_backward(ctx: Any, call: _Call, saved: list[Any], given: list[Any], grads: Sequence[Any]) -> Any:
    """Run the compiled backward for the first time, when parts of it may still have to be compiled."""
    recompute = call.recompute
    try:
        if recompute.failure is None:
            answer = call.ordered(call.backward([saved, call.others], given))
            recompute.proven = True
            return answer
    except Exception as error:
        if recompute.on_error == "raise":
            raise CompileError(
                f"{recompute.owner}: the backward of the region failed: {type(error).__name__}: {error}\n"
                "Leave the module out (exclude=), or let it run uncompiled (on_error='eager')."
            ) from error
        recompute.failure = error
    inputs = recompute.inputs(ctx.held, ctx.saved_tensors, "the backward, whose compiled form failed,")
    return recompute.gradients(inputs, grads, create_graph=False)


class _Call:
    """What one call of a partition hands to autograd."""

    __slots__ = ("backward", "differentiable", "ordered", "others", "outputs", "recompute", "saved")

    def __init__(self, recompute: Recompute, backward: Any, ordered: Any, others: Any) -> None:
        self.recompute, self.backward, self.ordered, self.others = recompute, backward, ordered, others
        self.saved: tuple[Any, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.differentiable: Sequence[bool] | None = None


def connect(
    recompute: Recompute,
    backward: Callable[..., Any],
    args: Sequence[Any],
    data: dict[str, Any],
    saved: Sequence[Any],
    others: Sequence[Any],
    differentiable: Sequence[bool] | None,
) -> None:
    """Give the outputs in `data` a history that runs `backward`, in place."""
    flat = data["flat_args"]
    call = _Call(recompute, backward, _in_order_of(args, flat), others)
    inputs = {id(arg) for arg in args}
    # A view that is saved keeps its base's graph alive (pytorch/pytorch#94990), except where it is an input.
    call.saved = tuple(
        t.detach() if _is_tensor(t) and t._base is not None and id(t) not in inputs else t for t in saved
    )
    call.outputs, call.differentiable = data["flat_output"], differentiable
    with torch.enable_grad():
        _Connected.apply(call, *args)


def _in_order_of(args: Sequence[Any], flat: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what turns gradients in the order of `flat` into gradients in the order of `args`."""
    if len(flat) == len(args) and all(a is b for a, b in zip(flat, args, strict=True)):
        return tuple
    place = {id(value): k for k, value in enumerate(flat)}
    places = [place.get(id(arg)) for arg in args]
    return lambda grads: [None if k is None else grads[k] for k in places]


def version(value: Any) -> int | None:
    """Return how often a tensor has been written to; None where that is not counted."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
