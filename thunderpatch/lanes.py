"""Lanes: copies of a module's forward, each under a code object of its own, with a budget of its own.

Dynamo keeps its compiled versions of a function at the function's code object and gives up, silently, once
there are `recompile_limit` (8) of them. All layers that torch.nn defines would even share one code object. Here
each group of equal modules has lanes: copies of the group's forward, each with a fresh code object. The resume
functions that Dynamo makes after a graph break are cut from that code object and so belong to the lane too.
"""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from .capture import Optimizer

# Versions of one lane that different modules made, before the next module gets a lane of its own: Dynamo looks
# them through one by one at each call, at about a microsecond each.
LANE_SIZE = 8
_numbers = itertools.count(1)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "modules") + os.sep


class Lane:
    """One copy of a forward with its own code object, compiled by Dynamo at its first call."""

    def __init__(self, function: Callable[..., Any], optimizer: Optimizer) -> None:
        copy = fresh(function)
        self._code = copy.__code__
        self.call: Callable[..., Any] = optimizer.compile(copy)
        self.again = optimizer.lean(copy, self.call)
        self.first_calls_that_compiled = 0  # one for each module that could not use what was there
        self.spoiled = False  # holds what Dynamo made of a call that raised
        self.skipped: str | None = None  # why Dynamo runs this code object without compiling from now on

    def owns(self, code: types.CodeType) -> bool:
        """Whether `code` is this lane's function, and not something that it calls."""
        return code is self._code

    def newcomer(self) -> None:
        """Count a module whose first call here compiled something."""
        self.first_calls_that_compiled += 1

    @property
    def full(self) -> bool:
        return self.spoiled or self.skipped is not None or self.first_calls_that_compiled >= LANE_SIZE


def fresh(function: Callable[..., Any]) -> types.FunctionType:
    """Return `function` under a new code object.

    A plain function is copied. What Dynamo would not take as a frame of its own (a callable that is no function, or
    a function of torch other than a layer's forward) is called from a new function, into which Dynamo inlines it.
    """
    if isinstance(function, types.FunctionType):
        filename = function.__code__.co_filename
        if filename.startswith(_LAYERS):
            # Dynamo skips frames of torch's own files, and tells them by the name of the file alone.
            return _copy(function, filename=f"<{os.path.relpath(filename, _TORCH)}, copied>")
        if not filename.startswith(_TORCH):
            return _copy(function)

    def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return _copy(forward)


def _copy(function: Any, filename: str | None = None) -> types.FunctionType:
    # The name is new as well: what Dynamo has learnt of sizes that vary (`torch._dynamo.pgo`) it files under a
    # code's file, line and name, and would turn sizes and numbers by which classes differ into symbols.
    old = function.__code__
    code = old.replace(co_name=f"{old.co_name}_{next(_numbers)}", co_filename=filename or old.co_filename)
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
