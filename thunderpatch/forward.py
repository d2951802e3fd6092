"""What stands in for a module's forward: a wrapt proxy of the original that runs the compiled code.

The way of a call: `PatchedForward.__call__` decides whether this call may be compiled at all, the record's lane
lets Dynamo's guards pick the code, `compiler.Graph` runs it, and the trail tells the record what ran.
"""

from __future__ import annotations

import copy
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import wrapt
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils.hooks import RemovableHandle

from . import capture, hooks, regions
from .capture import Lane, trail
from .compiler import Compiler, Graph
from .errors import CompileError, ThunderPatchWarning

_is_jit_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level


class Record:
    """What is known of one patched module. It holds the module weakly, and outlives the patch."""

    def __init__(self, module: nn.Module, fqn: str, compiler: Compiler) -> None:
        self.module = weakref.ref(module)
        self.proxy: weakref.ref[PatchedForward] | None = None
        self.fqn, self.cls, self.compiler = fqn, type(module), compiler
        self.installed = False
        self.disabled = 0  # depth of `with disabled(...)`
        self.latched: BaseException | None = None
        self.group: regions.Group | None = None
        self.lane: Lane | None = None
        self.hooked: hooks.State = ()
        self.handles_seen = -1
        self.lanes: dict[hooks.State, Lane] = {}
        self.usual: Graph | None = None  # the one graph that a call normally runs
        self.usual_calls = 0
        self.other_calls = 0
        self.other_compiled = 0
        self.bypassed: dict[str, int] = {}
        self.inlined = 0  # times that an outer torch.compile traced the original
        self.graphs: dict[Graph, None] = {}
        self.reasons: list[str] = []  # why calls ran eager, in words
        self.error: BaseException | None = None  # of the attempt that goes on now
        self.raises: str | None = None  # Dynamo's word that the forward is about to raise, until that is seen
        self.misled = False  # Dynamo said so, and it did not
        self.compilations = 0  # frames that Dynamo traced in this module's calls
        self.recompiled: list[str] = []  # why an earlier version did not fit, in Dynamo's words
        self.dynamo_seconds = 0.0

    @property
    def name(self) -> str:
        return f"{self.fqn or '(the model itself)'} ({self.cls.__name__})"

    @property
    def calls(self) -> int:
        return self.usual_calls + self.other_calls

    @property
    def compiled_calls(self) -> int:
        return self.usual_calls + self.other_compiled

    @property
    def off(self) -> bool:
        return not self.installed or self.disabled > 0 or self.latched is not None

    def bypass(self, why: str) -> None:
        self.bypassed[why] = self.bypassed.get(why, 0) + 1

    def enter(self, proxy: PatchedForward, args: Any, kwargs: Any) -> Lane:
        """Choose the lane for a call: the first one, or one after hooks were added or removed anywhere."""
        module = proxy._self_module
        if self.group is None:
            self.group = regions.group_for(module, proxy.__wrapped__, self.compiler, args, kwargs)
        # Read before looking, so that a hook registered meanwhile is looked for again.
        handles = RemovableHandle.next_id
        self.hooked = hooks.state(module)
        lane = self.lanes.get(self.hooked)
        if lane is None:
            # Dynamo does not guard on hooks of children: a module with hooks below it shares its code with none.
            lane = self.group.own_lane() if self.hooked else self.group.lane()
            self.lanes = {**self.lanes, self.hooked: lane}
        self.lane = lane
        # With hooks about, removal has to be noticed too, and that does not show in the count of handles.
        self.handles_seen = -1 if self.hooked else handles
        return lane

    def start_over(self) -> None:
        """Forget the code of the former patch, whose forward was another one."""
        self.group = self.lane = self.usual = self.latched = None
        self.lanes, self.graphs, self.reasons = {}, {}, []
        self.handles_seen = -1

    def leave(self, lane: Lane) -> None:
        """Use another lane from now on, after a call that compiled something here and raised.

        Dynamo keeps the part before the operation that raised, under guards so weak that calls with good
        arguments would match it, and then runs the rest as Python does.
        """
        lane.spoiled = True
        self.lanes = {hooked: other for hooked, other in self.lanes.items() if other is not lane}
        self.handles_seen = -1

    def note(self, ran: list[Graph], lane: Lane, compilations: int) -> None:
        """Take account of a call that was not the usual one."""
        self.other_calls += 1
        if self.raises is not None:
            self.reasons.append(self.raises)
            self.misled, self.raises = True, None
        if compilations and lane is not None and not self.hooked and self.usual is None and not self.graphs:
            lane.newcomer()
        for graph in ran:
            self.graphs.setdefault(graph)
            if graph.error is not None:
                self.latch(graph.error)
        if ran:
            compiled = [graph for graph in ran if not graph.eager]
            self.other_compiled += bool(compiled)
            self.usual = ran[0] if len(ran) == 1 and compiled else self.usual
        else:
            self._ran_eager(lane)

    def latch(self, error: BaseException) -> None:
        """Run the original from now on."""
        if self.latched is None:
            self.latched = error
            self.warn(f"runs uncompiled from now on, after {type(error).__name__}: {_first_line(error)}")

    def warn(self, what: str) -> None:
        warnings.warn(f"{self.name} {what}", ThunderPatchWarning, stacklevel=4)

    def _ran_eager(self, lane: Lane) -> None:
        if lane.spoiled:
            self.leave(lane)
        reason = self.reasons[-1] if self.reasons else lane.skipped or "Dynamo captured no graph of it"
        if reason not in self.reasons or not self.warned_eager:
            self.warned_eager = True
            if reason not in self.reasons:
                self.reasons.append(reason)
            self.warn(f"ran eager: {reason}")

    warned_eager = False


class PatchedForward(wrapt.CallableObjectProxy):  # type: ignore[misc]
    """The proxy: signature, name, docstring, `__self__` and `__wrapped__` are those of the original forward."""

    def __init__(self, original: Callable[..., Any], module: nn.Module, record: Record, local: Any) -> None:
        super().__init__(original)
        self._self_local = local  # the instance forward that was there, None where there was none
        self._self_module = module
        self._self_record = record

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.__wrapped__(*args, **kwargs)
        record: Record = self._self_record
        if record.off or _is_jit_tracing() or _dispatch_modes() or _functorch_level() is not None:
            return self._self_bypass(args, kwargs)
        if record.handles_seen != RemovableHandle.next_id:
            if torch.compiler.is_compiling() or is_fx_symbolic_tracing():
                return self._self_bypass(args, kwargs)
            record.enter(self, args, kwargs)
        lane = record.lane
        graphs = trail.graphs
        mark, compilations = len(graphs), trail.compilations
        try:
            result = lane.call(self._self_module, *args, **kwargs)  # type: ignore[union-attr]
        except BaseException:
            del graphs[mark:]
            expected = record.raises is not None or record.error is not None  # then no code was kept
            record.error = record.raises = None
            if trail.compilations != compilations and not expected:
                record.leave(lane)  # type: ignore[arg-type]
            raise
        if len(graphs) == mark + 1 and graphs[mark] is record.usual:
            graphs.pop()
            record.usual_calls += 1
            return result
        ran = graphs[mark:]
        del graphs[mark:]
        record.note(ran, lane, trail.compilations - compilations)  # type: ignore[arg-type]
        if record.error is not None:
            error, record.error = record.error, None
            _answer(record, error)
        return result

    def _self_bypass(self, args: Any, kwargs: Any) -> Any:
        record: Record = self._self_record
        if not record.off:
            record.bypass("a tracer, a functorch transform or a dispatch mode was active")
        return self.__wrapped__(*args, **kwargs)

    @property
    def last_traces(self) -> list[Any]:
        """thunder's final forward trace of each partition that this module ran, in the order of first use."""
        return [t for g in self._self_record.graphs for p in g.partitions for t in p.traces("last_traces")]

    @property
    def last_backward_traces(self) -> list[Any]:
        """The same for the backward; empty where no gradient was wanted."""
        return [t for g in self._self_record.graphs for p in g.partitions for t in p.traces("last_backward_traces")]

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


_CALL: types.CodeType = PatchedForward.__call__.__code__


class Attribution(capture.Watch):
    """Finds the module on whose behalf Dynamo is at work, by the patched call that is running."""

    def owner(self) -> str:
        record = self._record()
        return record.name if record is not None else "(unknown)"

    def failed(self, frame: Any, error: Exception) -> Any:
        record = self._record()
        if record is None:
            return None
        options = record.compiler.options
        soft = isinstance(error, torch._dynamo.exc.Unsupported) and not options.fullgraph
        if soft and not record.misled and str(error).startswith("Observed exception"):
            # The forward raises: let it, as in eager, and do not give up on its other calls.
            record.raises = "Dynamo expected it to raise"
            return capture.run_this_frame_uncompiled()
        if soft:
            self.skipped(frame, f"Dynamo cannot trace it: {_first_line(error)}")
            return None
        if isinstance(error, torch._dynamo.exc.TorchRuntimeError):
            # Most likely the caller's own mistake, which eager reports better. If eager gets through, it was ours.
            record.error = error
            return capture.run_this_frame_uncompiled()
        if options.on_error == "raise":
            raise _compile_error(record, error) from error
        record.error = error
        return capture.run_this_frame_uncompiled()

    def skipped(self, frame: Any, reason: str) -> None:
        record = self._record()
        if record is None or record.lane is None:
            return
        record.reasons.append(reason)
        if record.lane.owns(frame.f_code):
            record.lane.skipped = reason

    def traced(self, frame: Any, seconds: float, misfit: str | None) -> None:
        record = self._record()
        if record is None:
            return
        record.compilations += 1
        record.dynamo_seconds += seconds
        if misfit is not None:
            record.recompiled.append(misfit)

    @staticmethod
    def _record() -> Record | None:
        proxy = capture.caller(_CALL)
        return proxy._self_record if proxy is not None else None


def _answer(record: Record, error: BaseException) -> None:
    if record.compiler.options.on_error == "raise":
        raise _compile_error(record, error) from error
    record.latch(error)


def _compile_error(record: Record, error: BaseException) -> CompileError:
    return CompileError(
        f"{record.name}: could not be compiled with options {record.compiler.options}: "
        f"{type(error).__name__}: {_first_line(error)}\n"
        "Leave the module out (exclude=), or let it run uncompiled (on_error='eager')."
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


watch = Attribution()
