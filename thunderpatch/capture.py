"""How Dynamo is asked to compile: without a limit, with somebody told of each attempt, and called without detours.

The limit on the versions of one function is not needed here (`lanes`), and no configuration is touched to be rid of
it: torch >= 2.12 takes it as an argument, and before that Dynamo derives it from the cache entries that it is handed.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

_NO_LIMIT = 2**31 - 1


class Optimizer:
    """Compiles functions with one backend, without a limit, telling `watch` of each attempt."""

    def __init__(self, backend: Callable[..., Any], watch: Watch, *, dynamic: bool | None, fullgraph: bool) -> None:
        settings: dict[str, Any] = {"dynamic": dynamic}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            settings["recompile_limit"] = _NO_LIMIT
        self._callback: Any = None
        try:
            context: Any = torch._dynamo.optimize(backend, nopython=fullgraph, **settings)
            _interpose(context.callback, watch)
            context.callback = _Attempt(context.callback)
        except (AttributeError, TypeError):  # a Dynamo of another build: what torch documents is all there is
            self.compile: Callable[..., Any] = functools.partial(
                torch.compile, backend=backend, fullgraph=fullgraph, **settings
            )
            return
        self.compile = context
        # With these two Dynamo does more around each call: it sets its configuration, or counts frames.
        if dynamic is None and not fullgraph:
            self._callback = context.callback

    def lean(self, function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a leaner form of `call`, the compiled `function`, for when it has been called before.

        It sets Dynamo's callback for the length of the call and no more. What Dynamo's own wrapper does besides is
        for first calls (translating errors), for tracers and functorch (which do not get here) and for a stance set
        by `torch.compiler.set_stance`, with which the wrapper is called after all.
        """
        callback = self._callback
        if callback is None or _set_eval_frame is None:
            return call

        def again(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _eval_frame._stance is not _STANCE:
                return call(module, *args, **kwargs)
            prior = _set_eval_frame(callback)
            try:
                return function(module, *args, **kwargs)
            except BaseException:
                _set_eval_frame(None)
                torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)  # the proxy lets nobody in above 0
                raise
            finally:
                _set_eval_frame(prior)

        return again


_types: Any = torch._dynamo.types
_eval_frame: Any = torch._dynamo.eval_frame
_STANCE = getattr(_eval_frame, "_stance", None)
_set_eval_frame: Any = getattr(_eval_frame, "set_eval_frame", None) if _STANCE is not None else None


def _interpose(callback: Any, watch: Watch) -> None:
    convert = callback._torchdynamo_orig_backend
    if hasattr(convert, "_inner_convert"):
        convert._inner_convert = _Convert(convert._inner_convert, watch)
    else:  # fullgraph: nothing stands between, since no failure is soft
        callback._torchdynamo_orig_backend = _Convert(convert, watch)


# What Dynamo's configuration says otherwise, for the length of one of its attempts at a region:
_SETTINGS = {
    # In a DDP forward each graph would be cut at the bounds of DDP's buckets, by a compiler of DDP's own, past
    # `_Convert` and without its budget, and only to let gradients be sent while one large graph is still at work.
    # A region is a part of the model; its gradients come part by part.
    "optimize_ddp": False,
    # The guards on parameters would not be looked at while the dict that holds them is the same, and
    # `requires_grad_()` does not touch it: a gradient would be lost in silence.
    "use_recursive_dict_tags_for_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    # Inside a checkpoint that a forward makes itself, nothing but tensors might be changed: not even a variable that
    # is set and put back. The price: a change of Python's is not made again when the backward recomputes.
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
}


class _Attempt:
    """Dynamo's frame evaluation, under the settings that a region needs."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # see `_Convert`
        self._settings = {name: value for name, value in _SETTINGS.items() if hasattr(torch._dynamo.config, name)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        # The lock keeps threads apart that set and put back the same value. Dynamo would take it next.
        with torch._dynamo.convert_frame.compile_lock, torch._dynamo.config.patch(self._settings):
            return self._callback(frame, cache_entry, frame_state)


class Watch:
    """What is told of Dynamo's attempts; the default does nothing."""

    def failed(self, frame: Any, error: Exception) -> Any:
        """Take an error raised while a frame was traced; return Dynamo's answer for the frame, or None to raise."""

    def skipped(self, frame: Any, reason: str) -> None:
        """Take notice that Dynamo will run this frame uncompiled."""

    def traced(self, frame: Any, seconds: float, misfit: str | None) -> None:
        """Take notice of an attempt: how long it took, and why the latest version did not fit, if there was one."""


class _Convert:
    """Stands between Dynamo's frame evaluation and its compiler."""

    _hides_entries = "recompile_limit" not in inspect.signature(torch.compile).parameters

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        # A true attribute: Dynamo reads it while it evaluates frames, where a Python __getattr__ would recurse.
        self._torchdynamo_orig_backend = inner._torchdynamo_orig_backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, frame: Any, cache_entry: Any, *args: Any, **kwargs: Any) -> Any:
        entry = None if self._hides_entries else cache_entry
        trail.compilations += 1
        misfit = _why_unfit(cache_entry, frame, self._torchdynamo_orig_backend)
        began = time.perf_counter()
        try:
            result = self._inner(frame, entry, *args, **kwargs)
        except Exception as error:
            answer = self._watch.failed(frame, error)
            if answer is None:
                raise
            return answer
        finally:
            self._watch.traced(frame, time.perf_counter() - began, misfit)
        if result.guarded_code is None:
            self._watch.skipped(frame, getattr(result, "skip_reason", None) or "it has no tensor operations")
        elif self._hides_entries and _sets_a_forward(result.guarded_code.code, frame.f_code):
            # Dynamo before torch 2.12 would call the old one; what the frame calls is compiled by itself.
            return run_uncompiled_from_now_on()
        else:
            _call_graphs_directly(result.guarded_code.code, frame.f_globals)
        return result


def _sets_a_forward(code: types.CodeType, original: types.CodeType) -> bool:
    """Whether Dynamo's code sets a module's forward, by its name."""
    new, old = ([const for const in each.co_consts if isinstance(const, str)] for each in (code, original))
    return "forward" in new and "forward" not in old


def runs_graphs(run: Any) -> None:
    """Declare a function to be what runs a captured graph: Dynamo shall leave it and all below it alone.

    Dynamo puts `torch._dynamo.disable` around what a backend returns, which does the same at each call at the cost of
    several microseconds. A mark on the code object, which C code reads, costs nothing.
    """
    mark: Any = getattr(_eval_frame, "set_code_exec_strategy", None)
    if mark is None:  # a Dynamo of another build: its own wrapper stays
        return
    mark(run.__code__, _types.FrameExecStrategy(_types.FrameAction.SKIP, _types.FrameAction.SKIP))
    _running_graphs.add(run.__code__)


_running_graphs: set[types.CodeType] = set()


def _call_graphs_directly(code: types.CodeType, namespace: dict[str, Any]) -> None:
    """Take Dynamo's wrapper off the graphs that `code` calls, where they carry the mark that makes it needless."""
    for name in code.co_names:
        if name.startswith("__compiled_fn"):
            inner = getattr(namespace.get(name), "_torchdynamo_orig_callable", None)
            if isinstance(inner, types.FunctionType) and inner.__code__ in _running_graphs:
                namespace[name] = inner


def _why_unfit(entry: Any, frame: Any, backend: Any) -> str | None:
    """Return the guard of Dynamo's latest version that fails for `frame`, in Dynamo's words; for reports only."""
    if entry is None:
        return None
    known = {
        "guard_manager": getattr(entry, "guard_manager", None),
        "code": getattr(entry, "code", None),
        "f_locals": frame.f_locals,
        "compile_id": getattr(entry, "compile_id", None),
        "backend": backend,
        "skip_logging": True,
    }
    try:
        explain = torch._dynamo.guards.get_guard_fail_reason
        reason = explain(**{name: known[name] for name in inspect.signature(explain).parameters})
    except Exception:  # an explanation that cannot be had is no reason to fail
        return "(a guard failed)"
    # The words begin with the number that Dynamo has given to the version.
    return re.sub(r"^\d+/\d+(_\d+)?: ", "", str(reason).strip()) or "(a guard failed)"


def run_this_frame_uncompiled() -> Any:
    """Return Dynamo's answer for a frame that shall run as Python does, this once; its code object stays usable."""
    strategy = _types.FrameExecStrategy(_types.FrameAction.SKIP, _types.FrameAction.DEFAULT)
    return _types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def run_uncompiled_from_now_on() -> Any:
    """Return Dynamo's answer for a frame whose code object it shall leave to Python for good."""
    strategy = _types.FrameExecStrategy(_types.FrameAction.SKIP, _types.FrameAction.DEFAULT)
    return _types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=True)


class Trail(threading.local):
    """What happened in this thread: the graphs that ran since the outermost patched call began, in order."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.compilations = 0  # frames that Dynamo was asked to compile


trail = Trail()


def caller(code: types.CodeType) -> Any:
    """Return `self` of the innermost running call of `code` in this thread, or None."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has none, which ends the loop
    return None
