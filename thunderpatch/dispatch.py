"""One thunder partition: compiled at its first call, and called directly from then on where that is sound.

thunder's own way of a call asks at each call whether a compiled version fits: it collects the global state
(`populate_cache_info`), groups the arguments by storage, runs each version's prologue, and keeps statistics. Behind
Dynamo this is work done twice, since the partition is reached only when Dynamo's guards hold. Calling the computation
directly is sound when each thing that thunder would check is covered, condition by condition:

======================================  =====================================================================
thunder checks, at each call            why it need not
======================================  =====================================================================
shape, dtype, device, requires_grad     TENSOR_MATCH guards of Dynamo; sizes are static here, since a graph with
                                        symbolic sizes is split into static ones first (`graphs.specialise`)
grad mode, default dtype and device,    Dynamo's global-state guards; these are also in the key under which a
autocast                                compiled graph is found again (`compiler._settings`)
numbers and strings, module attributes  constants of the captured graph, guarded by Dynamo
aliasing of arguments                   matters only when an argument is written to: then not direct
tensor subclasses (DTensor, ...)        only torch.Tensor and Parameter are taken; Dynamo guards the type
what the prologue unpacks               each of its results must be one of the arguments, the very same object
what the epilogue writes back           must give back the computation's result as it is, else not direct
======================================  =====================================================================

CUDA graphs and streams: thunder's CUDA graph transform lives in the computation itself and is called all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from .autograd import Observed, Recompute, connect, version
from .options import Options

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CompileFailure(Exception):
    """Carries, as its cause, what went wrong while thunder compiled; nothing of the partition has run."""


class Snapshot:
    """Keeps random state and inputs as they are before a first run, to put them back if that run fails.

    Inputs are copied only when several parts run, since a part that fails to compile has not run itself.
    """

    def __init__(self, inputs: Sequence[Any], several: bool) -> None:
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and type(t) is not torch.nn.Parameter]
        self._copies = [(t, version(t), t.detach().clone()) for t in tensors] if several else []
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, before, copy in self._copies:
                if version(tensor) != before:
                    tensor.copy_(copy)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


class Partition:
    """A thunder partition of a captured graph.

    `jitted` is what thunder made of it, `original` the same part of the graph as captured, and `owner` says in
    messages which module it belongs to.
    """

    def __init__(self, jitted: Any, original: Callable[..., Any], owner: str, options: Options) -> None:
        self.jitted, self.owner = jitted, owner
        self.recompute = Recompute(original, owner, options.on_error)
        self.seconds = 0.0
        self.direct = False  # whether calls go straight to the computation
        self._may_be_direct = options.direct
        self._differentiable = jitted._lc_cd.compile_options.get("is_differentiable_outputs")
        self._lock = threading.Lock()
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def traces(self, which: str) -> list[Any]:
        """Return thunder's final trace of a kind, `last_traces` or `last_backward_traces`, as a list of at most one."""
        found = getattr(self.jitted._lc_cs, which)
        return [found[-1]] if found else []

    def _first_call(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            self.jitted._lc_cd.get_computation_and_inputs(*args)
        except Exception as error:
            raise CompileFailure from error
        finally:
            self.seconds += time.perf_counter() - began
        result, entry, inputs, to_epilogue, raw = self._run(args, first=True)
        call = self._ordinary
        if self._may_be_direct and not self.recompute.mutated:
            call = self._direct(args, entry, inputs, to_epilogue, raw, result) or call
        self.direct = call != self._ordinary
        self._call = call
        return result

    def _ordinary(self, *args: Any) -> Any:
        return self._run(args)[0]

    def _run(self, args: Sequence[Any], first: bool = False) -> tuple[Any, ...]:
        """Run with thunder's own checks of each call."""
        data = self.jitted._lc_cd
        with self._lock:
            entry, inputs, to_epilogue = data.get_computation_and_inputs(*args)
            grad_mode = data.is_grad_enabled
        watched = Observed(args) if first else None
        raw = entry.computation_fn(*inputs)
        if entry.backward_fn:
            raw, (saved, others) = raw
            if watched is not None:
                self.recompute.learn(args, saved, watched)
            connect(self.recompute, entry.backward_fn, args, raw, saved, others, self._differentiable)
            raw = raw["output"]
        elif watched is not None:
            self.recompute.learn(args, (), watched)
        result = entry.epilogue_fn(*to_epilogue, *raw)
        torch.set_grad_enabled(grad_mode)
        return result, entry, inputs, to_epilogue, raw

    def _direct(
        self, args: Sequence[Any], entry: Any, inputs: Any, to_epilogue: Any, raw: Any, result: Any
    ) -> Callable[..., Any] | None:
        """Return a function that calls the computation itself, or None where it is not certain to be the same."""
        stats = self.jitted._lc_cs
        if len(stats.interpreter_cache) != 1 or to_epilogue:
            return None
        if not all(type(arg) in _PLAIN for arg in args):
            return None
        order = [next((i for i, arg in enumerate(args) if arg is value), None) for value in inputs]
        if None in order or not _gives_back(result, raw):
            return None
        pick = _picker(order, len(args))
        computation, backward = entry.computation_fn, entry.backward_fn
        one = isinstance(result, torch.Tensor)
        if backward is None:

            def direct(*args: Any) -> Any:
                out = computation(*pick(args))
                return out[0] if one else out

            return direct
        recompute, differentiable = self.recompute, self._differentiable

        def direct_with_gradient(*args: Any) -> Any:
            data, (saved, others) = computation(*pick(args))
            connect(recompute, backward, args, data, saved, others, differentiable)
            out = data["output"]
            return out[0] if one else out

        return direct_with_gradient


def _gives_back(result: Any, raw: Any) -> bool:
    """Whether the epilogue returned the computation's outputs themselves."""
    if isinstance(result, torch.Tensor):
        return len(raw) == 1 and raw[0] is result
    return (
        isinstance(result, tuple) and len(raw) == len(result) and all(a is b for a, b in zip(result, raw, strict=True))
    )


def _picker(order: Sequence[Any], count: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if list(order) == list(range(count)):
        return lambda args: args
    if len(order) == 1:
        only = order[0]
        return lambda args: (args[only],)
    return itemgetter(*order) if order else lambda args: ()
