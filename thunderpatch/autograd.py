"""The gradient of a thunder partition: thunder's backward, and a backward that can be differentiated again.

thunder's own autograd function gives gradients without history: under `create_graph=True` a gradient penalty would
vanish in silence. Here a backward that runs with grad mode on recomputes the partition as captured
(`recomputation`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .errors import CompileError
from .reach import Reach, zeros_like
from .recomputation import Observed, Recomputation, Region, is_tensor

log = logging.getLogger("thunderpatch")


class Gradient(Recomputation):
    """Connects the outputs of one compiled computation to autograd.

    Made from the first run, since everything that holds for one call of a compiled computation holds for all:
    which arguments its backward saves, which of the saved tensors are views, in what order gradients come. `fixed`
    are the positions of the outputs that have none.
    """

    def __init__(
        self,
        region: Region,
        backward: Callable[..., Any],
        fixed: Sequence[int],
        args: Sequence[Any],
        result: tuple[dict[str, Any], Sequence[Any]],
        observed: Observed,
    ) -> None:
        data, saved = result
        place = {id(value): k for k, value in enumerate(saved)}
        super().__init__(region, args, observed, {i: place[id(arg)] for i, arg in enumerate(args) if id(arg) in place})
        self._backward = backward
        self._proven = False  # the compiled backward has run once
        self._failed = False
        # A view that is saved keeps its base's graph alive (pytorch/pytorch#94990), except where it is an input.
        inputs = {id(arg) for arg in args}
        self._views = [k for k, t in enumerate(saved) if is_tensor(t) and t._base is not None and id(t) not in inputs]
        self._fixed = fixed
        self._views_of, self._views_alone = _views(data["flat_output"], args)
        self._places = _places(data["flat_args"], args)
        self._zeros = zeros_like(data["flat_output"])
        self._reach = Reach(region.original, len(self._zeros))

    def connect(self, args: Sequence[Any], data: dict[str, Any], saved: Sequence[Any], others: Sequence[Any]) -> Any:
        """Give the outputs in `data` a history, in place, and return them. Grad mode is on."""
        if self._views:
            saved = list(saved)
            for k in self._views:
                saved[k] = saved[k].detach()
        flat = data["flat_output"]
        if not self._views_of and not self._views_alone:
            _apply(self, saved, others, flat, *args)
            return data["output"]
        # Autograd lets nobody write to a view that a function of its own returns; what eager returns may be written to.
        new = {id(flat[k]): flat[k].detach() for k in self._views_alone}
        _apply(self, saved, others, tuple(new.get(id(output), output) for output in flat), *args)
        for k, i in self._views_of.items():
            view = flat[k]
            new[id(view)] = args[i].as_strided(view.size(), view.stride(), view.storage_offset())
        return tree_map(lambda output: new.get(id(output), output), data["output"])

    def compiled(self, saved: list[Any], others: Any, grads: list[Any], clear: Callable[[], None]) -> list[Any]:
        """Run thunder's backward and return the gradients of the arguments; `clear` lets autograd's copy go."""
        if self._proven:
            clear()  # thunder drops each saved tensor after its last use; autograd must not hold them longer
        absent = [k for k, grad in enumerate(grads) if grad is None]
        for k in absent:
            if (zeros := self._zeros[k]) is not None:
                grads[k] = zeros()
        found = self._backward([saved, others], grads)
        self._proven = True
        reached = self._reach.without(absent)
        if reached is None:
            return [None if k is None else found[k] for k in self._places]
        return [None if k is None or i not in reached else found[k] for i, k in enumerate(self._places)]

    def first(self, ctx: Any, saved: list[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """Run thunder's backward for the first time, when parts of it may still have to be compiled."""
        kept = tuple(saved)  # thunder empties the list, and a checkpoint gives them once
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
        inputs = self.inputs(ctx.held, kept, "the backward, whose compiled form failed,")
        return self.recomputed(inputs, grads, create_graph=False)

    @property
    def proven(self) -> bool:
        """Whether the compiled backward has run once."""
        return self._proven


class _Connected(torch.autograd.Function):
    """Puts outputs that are computed already into autograd's graph, as coming from the arguments."""

    @staticmethod
    def forward(ctx: Any, gradient: Gradient, saved: Sequence[Any], others: Any, outputs: Any, *args: Any) -> Any:
        ctx.gradient, ctx.others = gradient, others
        ctx.held = gradient.hold(args)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # whether there is one tells where gradients arrive
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


def _places(values: Sequence[Any], args: Sequence[Any]) -> list[int | None]:
    """Return where among `values` each argument is. One that is given twice has a place for each time."""
    left = [(k, id(value)) for k, value in enumerate(values)]
    found = list[int | None]()
    for arg in args:
        place = next((k for k, which in left if which == id(arg)), None)
        left = [(k, which) for k, which in left if k != place]
        found.append(place)
    return found


def _views(outputs: Sequence[Any], args: Sequence[Any]) -> tuple[dict[int, int], list[int]]:
    """Return which outputs are views of which arguments, and which are the only output in a memory of their own."""
    found = {k: output for k, output in enumerate(outputs) if is_tensor(output) and output._is_view()}
    places = [_address(output) for output in outputs]
    given = [_address(arg) for arg in args]
    # Of two arguments that share a memory, where they lie does not tell which one an output is a view of: thunder's
    # backward knows, and to write to such an output is autograd's error.
    inputs: dict[int | None, int] = {a: i for i, a in enumerate(given) if a is not None and given.count(a) == 1}
    of = {
        k: inputs[places[k]]
        for k, output in found.items()
        if places[k] in inputs
        and not any(output is arg for arg in args)
        and output.dtype == args[inputs[places[k]]].dtype
        and not output.is_conj()
        and not output.is_neg()
    }
    return of, [k for k in found if places[k] not in given and places.count(places[k]) == 1]


def _address(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() or None if is_tensor(value) and value.layout is torch.strided else None
