"""One thunder partition: compiled at its first call, and called directly from then on where that is sound.

thunder's own way of a call asks at each call whether a compiled version fits: it collects the global state
(`populate_cache_info`), groups the arguments by storage, runs each version's prologue, and keeps statistics. Behind
Dynamo this is work done twice, since the partition is reached only when Dynamo's guards hold. Calling the computation
directly is sound when each thing that thunder would check is covered, condition by condition:

======================================  =====================================================================
thunder checks, at each call            why it need not
======================================  =====================================================================
shape, dtype, device, requires_grad     TENSOR_MATCH guards of Dynamo; sizes are static here, since a graph with
                                        symbolic sizes is split into static ones first (`symbols.specialise`)
grad mode, default dtype, autocast      Dynamo's global-state guards; these are also in the key under which a
                                        compiled graph is found again (`graph.settings`)
default device                          Dynamo guards on it; in the graph each operation names its device
inference mode                          Dynamo's guard; the same computation then makes inference tensors
numbers and strings, module attributes  constants of the captured graph, guarded by Dynamo
aliasing of arguments                   matters only when an argument is written to: then not direct; of one that is
                                        not, thunder is kept from asking (`aliasing.given_apart`)
tensor subclasses (DTensor, ...)        only torch.Tensor and Parameter are taken; Dynamo guards the type
what the prologue unpacks               each of its results must be one of the arguments, the very same object
what the epilogue writes back           must give back the computation's result as it is, else not direct
======================================  =====================================================================

CUDA graphs and streams: thunder's CUDA graph transform lives in the computation itself and is called all the same.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from . import aliasing, graphs
from .autograd import Gradient
from .options import Options
from .recomputation import Observed, Region

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CompileFailure(Exception):
    """Carries, as its cause, what went wrong while thunder compiled; nothing of the partition has run."""


class RunFailure(CompileFailure):
    """Carries, as its cause, what went wrong in the first run of a compiled part; the program may be what is wrong."""


class Partition:
    """A thunder partition of a captured graph.

    `jitted` is what thunder made of it, `original` the same part of the graph as captured, and `owner` says in
    messages which module it belongs to.
    """

    def __init__(self, jitted: Any, original: fx.GraphModule, owner: str, options: Options) -> None:
        self.jitted, self.owner = jitted, owner
        self.region = Region.of(original, owner, options)
        self.seconds = 0.0
        self.direct = False  # whether calls go straight to the computation
        self._may_be_direct = options.direct
        self._differentiable = jitted._lc_cd.compile_options.get("is_differentiable_outputs")
        self._leaves = graphs.grad_mode_after(original)
        # Where it works in place, thunder goes by which arguments share their memory.
        self._written = aliasing.written_inputs(original) if aliasing.writes(original) else None
        self._gradients: dict[Callable[..., Any], Gradient] = {}  # by thunder's backward
        self._straight: Callable[..., Any] | None = None
        self._outputs = 0
        self._lock = threading.Lock()
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def traces(self, which: str) -> list[Any]:
        """Return thunder's final trace of a kind, `last_traces` or `last_backward_traces`, as a list of at most one."""
        found = getattr(self.jitted._lc_cs, which)
        return [found[-1]] if found else []

    def _first_call(self, *args: Any) -> Any:
        began, grad_mode = time.perf_counter(), torch.is_grad_enabled()
        try:
            self._entry(args)
        except Exception as error:
            raise CompileFailure from error
        finally:
            self.seconds += time.perf_counter() - began
        observed = Observed(args)
        result, entry, inputs, to_epilogue, raw = self._run(args, observed)
        self._call = self._ordinary
        if self._may_be_direct and self._leaves in (None, grad_mode) and not observed.mutated(args):
            self._straight = self._direct(args, entry, inputs, to_epilogue, raw, result)
        if self._straight is not None:
            run, one = self._straight(range(len(args)), len(args)), isinstance(result, torch.Tensor)
            self._call = (lambda *args: run(*args)[0]) if one else run
            self._outputs = 1 if one else len(result)
        self.direct = self._straight is not None
        return result

    def _entry(self, args: Sequence[Any]) -> Any:
        """Return thunder's code for a call, what that takes of the arguments, and what its epilogue does."""
        find = self.jitted._lc_cd.get_computation_and_inputs
        return find(*args) if self._written is None else aliasing.given_apart(find, args, self._written)

    def _ordinary(self, *args: Any) -> Any:
        return self._run(args, None)[0]

    def _run(self, args: Sequence[Any], observed: Observed | None) -> tuple[Any, ...]:
        """Run with thunder's own checks of each call."""
        grad_mode = torch.is_grad_enabled()
        with self._lock:
            entry, inputs, to_epilogue = self._entry(args)
            # thunder keeps several versions where arguments that are written to share storage.
            gradient = self._gradients.get(entry.backward_fn)
        if entry.backward_fn and gradient is None and observed is None:
            observed = Observed(args)
        raw = entry.computation_fn(*inputs)
        if entry.backward_fn:
            raw, (saved, others) = raw
            if gradient is None:
                assert observed is not None
                fixed = self._fixed(raw, entry, to_epilogue)
                gradient = Gradient(self.region, entry.backward_fn, fixed, args, (raw, saved), observed)
                self._gradients[entry.backward_fn] = gradient
            with torch.enable_grad():
                raw = gradient.connect(args, raw, saved, others)
        result = entry.epilogue_fn(*to_epilogue, *raw)
        # thunder sets what its trace ends with at the first call only.
        torch.set_grad_enabled(grad_mode if self._leaves is None else self._leaves)
        return result, entry, inputs, to_epilogue, raw

    def _fixed(self, raw: dict[str, Any], entry: Any, to_epilogue: Any) -> list[int]:
        """Return which outputs of thunder's code have no gradient. It returns once what is an output twice."""
        outputs, differentiable = raw["flat_output"], self._differentiable or ()
        if differentiable and len(outputs) != len(differentiable) and not to_epilogue:
            given = entry.epilogue_fn(*raw["output"])  # it does nothing but hand them out
            wanted = {id(value) for value, yes in zip(given, differentiable, strict=True) if yes}
            differentiable = [id(value) in wanted for value in outputs]
        return [k for k, yes in enumerate(differentiable) if not yes and isinstance(outputs[k], torch.Tensor)]

    def _direct(
        self, args: Sequence[Any], entry: Any, inputs: Any, to_epilogue: Any, raw: Any, result: Any
    ) -> Callable[..., Any] | None:
        """Return what makes functions that call the computation itself; None where that may not be the same."""
        versions = self.jitted._lc_cs.interpreter_cache
        if len(versions) != 1 or to_epilogue:
            return None
        # What a call is handed has a clock around its computation, for thunder's statistics.
        computation, backward = versions[0].computation_fn, versions[0].backward_fn
        if backward is not entry.backward_fn:
            return None
        if not all(type(arg) in _PLAIN for arg in args):
            return None
        order = [place for value in inputs if (place := _index(value, args)) is not None]
        if len(order) != len(inputs) or not _gives_back(result, raw):
            return None
        if backward is not None and not torch.is_grad_enabled():
            return None
        return functools.partial(_straight, _bare(computation), self._gradients.get(backward), order)

    def fused(self, given: Sequence[int], count: int, outputs: int) -> Callable[..., Any] | None:
        """Return a function for a whole graph that does nothing but call this partition, once that has run directly.

        The graph has `count` inputs, argument `i` of the partition is input `given[i]`, and the graph returns the
        partition's `outputs` outputs in their order.
        """
        if self._straight is None or self._outputs != outputs:
            return None
        return self._straight(given, count)  # type: ignore[no-any-return]


def _index(value: Any, among: Sequence[Any]) -> int | None:
    return next((i for i, other in enumerate(among) if other is value), None)


def _straight(
    computation: Callable[..., Any],
    gradient: Gradient | None,
    order: Sequence[int],
    given: Sequence[int],
    count: int,
) -> Callable[..., Any]:
    """Return a function of `count` inputs that runs a computation and returns its outputs, as a tuple.

    The computation takes the arguments at `order`; argument `i` is the input at `given[i]`.
    """
    pick = _picker([given[i] for i in order], count)
    if gradient is None:
        if pick is _as_they_are:
            return computation

        def run(*inputs: Any) -> Any:
            return computation(*pick(inputs))

        return run
    connect, arguments = gradient.connect, _picker(given, count)

    def run_with_gradient(*inputs: Any) -> Any:
        data, (saved, others) = computation(*pick(inputs))
        return connect(arguments(inputs), data, saved, others)

    return run_with_gradient


def _bare(computation: Callable[..., Any]) -> Callable[..., Any]:
    """Return thunder's generated function without the wrappers around it, where they have nothing to do.

    They switch gradients off and autocast off. The state of both is guarded by Dynamo and
    part of what a graph is found by, so that it is now what it will be at each call.
    """
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return computation
    bare: Any = computation
    while hasattr(bare, "__wrapped__"):
        bare = bare.__wrapped__
    if not getattr(getattr(bare, "__code__", None), "co_filename", "").startswith("thunder."):
        return computation  # not what thunder generates
    if not torch.is_grad_enabled():
        return bare  # type: ignore[no-any-return]
    set_grad_enabled = torch._C._set_grad_enabled

    def without_gradients(*args: Any) -> Any:
        set_grad_enabled(False)
        try:
            return bare(*args)
        finally:
            set_grad_enabled(True)

    return without_gradients


def _gives_back(result: Any, raw: Any) -> bool:
    """Whether the epilogue returned the computation's outputs themselves."""
    if isinstance(result, torch.Tensor):
        return len(raw) == 1 and raw[0] is result
    return (
        isinstance(result, tuple) and len(raw) == len(result) and all(a is b for a, b in zip(result, raw, strict=True))
    )


def _picker(order: Sequence[int], count: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if list(order) == list(range(count)):
        return _as_they_are
    if len(order) == 1:
        only = order[0]
        return lambda args: (args[only],)
    return itemgetter(*order) if order else lambda args: ()


def _as_they_are(args: Sequence[Any]) -> Sequence[Any]:
    return args
