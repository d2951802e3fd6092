"""`apply(..., check=True)`: a compiled graph is compared with the captured one before its first real run.

Both run on copies of the real inputs, from the same random state, forward and backward. Nothing that the
caller can see takes part, so there is nothing to put back: not the statistics of a BatchNorm, not the random
state, not `.grad`. The gradients are compared in this dry run already, ahead of the caller's first backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from .calls import Inputs, handed_over
from .copying import Storages, move
from .dispatch import CompileFailure
from .errors import DifferenceError
from .graphs import placeholders
from .judging import judge
from .masks import Masks, again
from .outcome import Outcome, observe, random_state
from .tolerance import Yardstick, rounding

log = logging.getLogger("thunderpatch")

_SHOWN = 3


def check(captured: fx.GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any], owner: str) -> None:
    """Raise `CompileFailure`, with its cause, if `compiled` does not do what `captured` does to `inputs`.

    Inputs, gradients and random state are as before. Tolerances are those of `verify`. A graph whose random
    numbers cannot be compared is logged, and let through.
    """
    subject = _Graph(captured, inputs)
    try:
        original = subject.original()
    except Exception:  # no gradient can be had, or the inputs are wrong: then it raises again
        subject.backward = False
        original = subject.original()
    try:
        outcome = subject.run(compiled)
    except CompileFailure:
        raise
    except Exception as error:
        raise CompileFailure from error
    judgement = judge(subject, original, outcome, Yardstick())
    if not judgement.comparable:
        log.warning("%s: a graph was not checked: %s", owner, judgement.note)
    elif not judgement.ok:
        wrong = [str(difference) for difference in judgement.found if not difference.ok]
        more = f", and {len(wrong) - _SHOWN} more values" if len(wrong) > _SHOWN else ""
        shown = "; ".join(wrong[:_SHOWN]) + more
        raise CompileFailure from DifferenceError(f"the compiled graph differs from the original: {shown}")


class _Graph:
    """A captured graph with the inputs of a call that is about to happen."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._gm, self._inputs = gm, inputs
        self.backward = True
        nodes = zip(placeholders(gm), inputs, strict=True)
        self._names = list({id(t): node.name for node, t in nodes if isinstance(t, Tensor)}.values())

    def run(self, function: Callable[..., Any], masks: Masks | None = None, **copying: Any) -> Outcome:
        """Run `function` on copies of the inputs, from the random state of the moment, which is put back."""
        with _random_state_kept():
            return observe(function, _copied(self._inputs, **copying), self._names, {}, masks, self.backward)

    def original(self, masks: Masks | None = None) -> Outcome:
        return self.run(self._gm.forward, masks)

    def exact(self, masks: Masks | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        dtypes = [value.dtype for value in self._inputs if isinstance(value, Tensor)]
        step = max(map(rounding, dtypes), default=0.0)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            exact = self.run(self._gm.forward, again(masks), cast=torch.float64)
            moved = self.run(self._gm.forward, again(masks), cast=torch.float64, moved_by=step)
        return exact.values, moved.values


def _copied(inputs: Sequence[Any], cast: torch.dtype | None = None, moved_by: float = 0.0) -> Inputs:
    """Copy the inputs of a graph: parameters into parameters, leaves into leaves, and others into others."""
    storages, copies = Storages(cast), dict[int, tuple[Tensor, Tensor]]()
    for value in inputs:
        if isinstance(value, Tensor) and id(value) not in copies:
            copy = storages.clone(value)
            move(copy, moved_by)
            if type(value) is nn.Parameter:
                copy = nn.Parameter(copy, value.requires_grad)
            if not value.requires_grad or value.is_leaf:
                copies[id(value)] = (copy.requires_grad_(value.requires_grad),) * 2
            else:
                leaf = copy.clone().requires_grad_()
                copies[id(value)] = leaf, handed_over(leaf, copy)
    args = tuple(copies[id(value)][1] if isinstance(value, Tensor) else value for value in inputs)
    return Inputs(args, {}, [given for _, given in copies.values()], [leaf for leaf, _ in copies.values()])


@contextmanager
def _random_state_kept() -> Iterator[None]:
    cpu, *cuda = random_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
