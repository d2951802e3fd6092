"""What is known of one patched module: which code it runs, how its calls went, and why."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from . import hooks, regions
from .compiler import Compiler
from .errors import CompileError, ThunderPatchWarning
from .graph import Graph, without_frames
from .lanes import Lane

log = logging.getLogger("thunderpatch")

# Between reading a number and writing it back another thread may do the same.
_counting = threading.Lock()


class _Switch:
    """An attribute that decides, with the others of its kind, whether calls may be compiled."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, record: Any, owner: type) -> Any:
        return self if record is None else vars(record)[self._name]

    def __set__(self, record: Record, value: Any) -> None:
        state = vars(record)
        state[self._name] = value
        record.on = state["_installed"] and not state["_disabled"] and state["_latched"] is None


class Record:
    """What is known of one patched module. It holds the module weakly, and outlives the patch."""

    installed = _Switch()
    disabled = _Switch()  # depth of `with disabled(...)`
    latched = _Switch()  # the error after which it runs its original

    def __init__(self, module: nn.Module, fqn: str, compiler: Compiler) -> None:
        self.module = weakref.ref(module)
        self.proxy: weakref.ref[Any] | None = None
        self.fqn, self.cls, self.compiler = fqn, type(module), compiler
        self.on = False  # whether calls may be compiled: what the three switches come to
        self._installed, self._disabled, self._latched = False, 0, None
        self.since = math.inf  # when it was installed last
        self.group: regions.Group | None = None
        self.lane: Lane | None = None
        self.hooked: hooks.State = ()
        self.handles_seen = -1
        self.lanes: dict[hooks.State, Lane] = {}
        self.usual: Graph | None = None  # the one graph that a call normally runs
        # One step of this iterator cannot be interrupted, where `+= 1` loses calls of other threads.
        self._usual_calls = itertools.count(1)
        self.count_usual_call = self._usual_calls.__next__
        self.other_calls = 0
        self.other_compiled = 0
        self.bypassed: dict[str, int] = {}
        self.graphs: dict[Graph, None] = {}
        self.reasons: list[str] = []  # why calls ran eager, in words
        self.error: BaseException | None = None  # of the attempt that goes on now
        self.failure: str | None = None  # why a call raised `CompileError`, in words
        self.raises: str | None = None  # Dynamo's word that the forward is about to raise, until that is seen
        self.misled = False  # Dynamo said so, and it did not
        self.compilations = 0  # frames that Dynamo traced in this module's calls
        self.recompiled: list[str] = []  # why an earlier version did not fit, in Dynamo's words
        # What this module's calls waited for compiling, by who took it.
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def name(self) -> str:
        return f"{self.fqn or '(the model itself)'} ({self.cls.__name__})"

    @property
    def usual_calls(self) -> int:
        """Calls that ran the usual graph; the iterator tells its next number in its repr alone: "count(3)"."""
        return int(repr(self._usual_calls)[len("count(") : -1]) - 1

    @property
    def calls(self) -> int:
        return self.usual_calls + self.other_calls

    @property
    def compiled_calls(self) -> int:
        return self.usual_calls + self.other_compiled

    def bypass(self, why: str) -> None:
        with _counting:
            self.bypassed[why] = self.bypassed.get(why, 0) + 1

    def enter(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Lane:
        """Choose the lane for a call: the first one, or one after hooks were added or removed anywhere."""
        if self.group is None:
            self.group = regions.group_for(module, original, self.compiler, args, kwargs)
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
        self.group = self.lane = self.usual = self.latched = self.failure = None
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

    def note(self, ran: list[Graph], lane: Lane, *, compiled: bool) -> None:
        """Take account of a call that was not the usual one; raise what went wrong in it, if it is to be raised."""
        with _counting:
            self.other_calls += 1
        if self.raises is not None:
            self.reasons.append(self.raises)
            self.misled, self.raises = True, None
        if compiled and not self.hooked and self.usual is None and not self.graphs:
            lane.newcomer()
        for graph in ran:
            self.graphs.setdefault(graph)
            self._waited_for(graph)
            if graph.error is not None:
                self.latch(graph.error)
        if ran:
            in_thunder = [graph for graph in ran if not graph.eager]
            with _counting:
                self.other_compiled += bool(in_thunder)
            self.usual = ran[0] if len(ran) == 1 and in_thunder else self.usual
        else:
            self._ran_eager(lane)
        if self.error is not None:
            error, self.error = self.error, None
            if self.compiler.options.on_error == "raise":
                raise compile_error(self, error) from error
            self.latch(error)

    def raised(self, error: BaseException, ran: list[Graph], lane: Lane, *, compiled: bool) -> None:
        """Take account of a call that raised."""
        if isinstance(error, CompileError):
            self.failure = first_line(error)
            self.graphs.update((graph, None) for graph in ran if graph.error is not None)
        for graph in ran:
            self._waited_for(graph)
        expected = self.raises is not None or self.error is not None  # then no code was kept
        self.error = self.raises = None
        if compiled and not expected:
            self.leave(lane)

    def _waited_for(self, graph: Graph) -> None:
        """Take the seconds of compiling, if nobody has: whose call ran the graph first has waited for them."""
        for stage, seconds in graph.seconds.items():
            self.seconds[stage] += seconds
        graph.seconds.clear()

    def latch(self, error: BaseException) -> None:
        """Run the original from now on."""
        if self.latched is None:
            self.latched = without_frames(error)
            log.info("%s: runs its original from now on, after %s: %s", self.name, type(error).__name__, error)
            self.warn(f"runs uncompiled from now on, after {type(error).__name__}: {first_line(error)}")

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


def compile_error(record: Record, error: BaseException) -> CompileError:
    """Return the error that says which module could not be compiled, with which options, and what to do."""
    return CompileError(
        f"{record.name}: could not be compiled with options {record.compiler.options}: "
        f"{type(error).__name__}: {first_line(error)}\n"
        "Leave the module out (exclude=), or let it run uncompiled (on_error='eager')."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
