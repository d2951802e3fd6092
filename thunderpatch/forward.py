"""What stands in for a module's forward: a wrapt proxy of the original that runs the compiled code.

The way of a call: `PatchedForward.__call__` decides whether this call may be compiled at all, the record's lane
lets Dynamo's guards pick the code, `graph.Graph` runs it, and the trail tells the record what ran.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import wrapt
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import capture
from .capture import trail
from .graph import compiling
from .record import Record, log

_is_jit_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level
_forward_ad: Any = torch.autograd.forward_ad
if not hasattr(_forward_ad, "_current_level"):
    _forward_ad = types.SimpleNamespace(_current_level=-1)
# Whether a `torch.fx` tracer is at work, inductor's own too: in any thread before torch 2.15, in this one from then on.
# Where torch tells it otherwise, none is.
_tracer: Any = torch.fx._symbolic_trace
if hasattr(_tracer, "_get_is_fx_tracing"):
    _fx_tracing: Callable[[], bool] = _tracer._get_is_fx_tracing
else:

    def _fx_tracing() -> bool:
        return getattr(_tracer, "_is_fx_tracing_flag", False)


# Where torch tells whether a profiler is active, as its own modules ask it; where it does not, none is.
_profiler: Any = torch.autograd.profiler
if not hasattr(_profiler, "_is_profiler_enabled"):
    _profiler = types.SimpleNamespace(_is_profiler_enabled=False)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _taken_in(cls: type, isolate: bool) -> bool:
    """Whether the compiler that traces now takes in a patched module of this class; take note of it if so.

    By class and not by module: whatever Dynamo reads of a module it guards on, and a guard that tells modules apart
    would make the outer compiler compile equal layers again and again.
    """
    if capture.caller(CALL) is not None:  # a patched module above takes in what is below it too
        return True
    if isolate and not torch.compiler.is_exporting():
        return False
    inlined_classes[cls] = time.monotonic()
    return True


# class -> when an outer compiler last took in a patched module of it
inlined_classes: weakref.WeakKeyDictionary[type, float] = weakref.WeakKeyDictionary()


@torch.compiler.disable(reason="thunderpatch keeps this region for thunder (isolate=True)")  # type: ignore[untyped-decorator]
def _apart(forward: PatchedForward, args: Any, kwargs: Any) -> Any:
    """Call a patched forward where an outer torch.compile breaks its graph for it."""
    return forward(*args, **kwargs)


class PatchedForward(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    """The proxy: signature, name, docstring, `__self__` and `__wrapped__` are those of the original forward."""

    def __init__(self, original: Callable[..., Any], module: nn.Module, record: Record, local: Any) -> None:
        super().__init__(original)
        self._self_local = local  # the instance forward that was there, None where there was none
        self._self_module = module
        self._self_record = record
        # The class's function, where that is the original: somebody may give the module another class, or the class
        # another forward, and the module would follow.
        self._self_follows = getattr(original, "__func__", None) if local is None else None
        self._self_isolate = record.compiler.options.isolate  # read here, where Dynamo guards on nothing but itself

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if _taken_in(type(self._self_module), self._self_isolate):
                return self.__wrapped__(*args, **kwargs)
            return _apart(self, args, kwargs)
        record: Record = self._self_record
        if self._self_follows is not None and type(self._self_module).forward is not self._self_follows:
            self._self_follow()
        if (
            not record.on
            or _is_jit_tracing()
            or _dispatch_modes()
            or _functorch_level() is not None
            or _forward_ad._current_level >= 0
            or (_fx_tracing() and _traced(args, kwargs))
        ):
            return self._self_bypass(args, kwargs)
        if record.handles_seen != RemovableHandle.next_id:
            # This thread compiles something; `torch.compiler.is_compiling` does not tell threads apart.
            if torch._guards.TracingContext.try_get() is not None:
                return self._self_bypass(args, kwargs)
            record.enter(self._self_module, self.__wrapped__, args, kwargs)
        lane, usual, graphs, compilations = record.lane, record.usual, trail.graphs, trail.compilations
        mark = len(graphs)
        try:
            # The usual graph has run before, so that Dynamo is normally left with evaluating its guards.
            call = lane.call if usual is None else lane.again  # type: ignore[union-attr]
            if call is lane.call and _fx_tracing() and _traced_elsewhere():  # type: ignore[union-attr]
                return self._self_bypass(args, kwargs)
            if _profiler._is_profiler_enabled:
                call = _in_a_range(record, call)
            result = call(self._self_module, *args, **kwargs)
        except BaseException as error:
            ran = graphs[mark:]
            del graphs[mark:]
            record.raised(error, ran, lane, compiled=trail.compilations != compilations)  # type: ignore[arg-type]
            raise
        if len(graphs) == mark + 1 and graphs[mark] is usual:
            graphs.pop()
            record.count_usual_call()
            return result
        ran = graphs[mark:]
        del graphs[mark:]
        record.note(ran, lane, compiled=trail.compilations != compilations)  # type: ignore[arg-type]
        return result

    def _self_follow(self) -> None:
        """Take what the class has for a forward now as the original."""
        from .registry import class_forward

        self.__wrapped__ = class_forward(self._self_module)
        self._self_follows = type(self._self_module).forward
        record: Record = self._self_record
        record.cls = type(self._self_module)
        record.start_over()
        log.info("%s: compiles another forward, which its class has been given", record.name)

    def _self_bypass(self, args: Any, kwargs: Any) -> Any:
        record: Record = self._self_record
        if record.on:
            record.bypass("a tracer, a functorch transform, forward-mode autograd or a dispatch mode was active")
        return self.__wrapped__(*args, **kwargs)

    @property
    def last_traces(self) -> list[Any]:
        """thunder's final forward trace of each partition that this module ran, in the order of first use."""
        return [t for g in self._self_record.graphs for p in g.partitions for t in p.traces("last_traces")]

    @property
    def last_backward_traces(self) -> list[Any]:
        """The same for the backward; empty where no gradient was wanted."""
        return [t for g in self._self_record.graphs for p in g.partitions for t in p.traces("last_backward_traces")]

    @property
    def __func__(self) -> Callable[..., Any]:
        """The original's function; for this module it runs the compiled code.

        Who wraps a bound method by its function and binds that again (accelerate's `prepare` under mixed precision)
        would else go past the patch. Of an original that is no method it is missing, as it is there.
        """
        function: Callable[..., Any] = self.__wrapped__.__func__
        if torch._guards.TracingContext.try_get() is not None:  # Dynamo before torch 2.12 calls it, not the proxy
            return function

        @functools.wraps(function)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return (self if module is self._self_module else functools.partial(function, module))(*args, **kwargs)

        forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # some look at it alone
        return forward

    def __copy__(self) -> PatchedForward:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a proxy for the copy of the module, which has its own record and shares the compiled code."""
        from .registry import adopt

        module = copy.deepcopy(self._self_module, memo)
        if module is self._self_module:
            return self
        original = copy.deepcopy(self.__wrapped__, memo)
        return adopt(module, original, self, None if self._self_local is None else original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the original does: what is loaded has the plain forward, and needs no thunderpatch."""
        return self.__wrapped__.__reduce_ex__(protocol)

    def __reduce__(self) -> Any:
        return self.__wrapped__.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == other


def _traced(args: Any, kwargs: Any) -> bool:
    """Whether a call is one that a `torch.fx` tracer makes."""
    return any(isinstance(leaf, torch.fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))


def _traced_elsewhere() -> bool:
    """Whether a `torch.fx` tracer is at work even after what we compile in other threads is done.

    Dynamo's wrapper of a compiled function then raises, in whichever thread the tracer may be.
    """
    with compiling:
        return _fx_tracing()


def _in_a_range(record: Record, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` so that the active profiler shows it by the module's FQN."""

    def ranged(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"thunderpatch:{record.fqn or '(the model itself)'}"):
            return call(module, *args, **kwargs)

    return ranged


# The frames of this code tell for which module Dynamo is at work (`attribution`).
CALL: types.CodeType = PatchedForward.__call__.__code__
