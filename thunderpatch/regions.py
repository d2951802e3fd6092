"""Groups: modules of one class, one forward, one set of options and one shape signature share compiled code."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .capture import Lane, Watch
from .compiler import Compiler
from .options import Options

_lock = threading.RLock()
_compilers: weakref.WeakValueDictionary[Any, Compiler] = weakref.WeakValueDictionary()
_groups: weakref.WeakValueDictionary[Any, Group] = weakref.WeakValueDictionary()


class Group:
    """The lanes of one kind of module. Lives as long as one of its modules does, patched or not."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        self.function, self.compiler = function, compiler
        self.lanes: list[Lane] = []

    def lane(self) -> Lane:
        """Return the lane for a module that comes to the group now."""
        with _lock:
            if not self.lanes or self.lanes[-1].full:
                self.lanes.append(self.own_lane())
            return self.lanes[-1]

    def own_lane(self) -> Lane:
        """Return a lane that no other module of the group gets."""
        return Lane(self.function, self.compiler.optimize)


def compiler_for(options: Options, watch: Watch, owner: Callable[[], str]) -> Compiler:
    """Return the compiler of these options: an equal one that is in use, or a new one."""
    with _lock:
        found = _compilers.get(options.key)
        if found is None:
            found = _compilers[options.key] = Compiler(options, watch, owner)
        return found


def group_for(module: nn.Module, original: Callable[..., Any], compiler: Compiler, args: Any, kwargs: Any) -> Group:
    """Return the group of a module that is called for the first time, with these arguments."""
    if type(original) is not types.MethodType or original.__self__ is not module:
        # Somebody's callable: it may know this one module only, so nobody else can run its code.
        return Group(lambda module, /, *args, **kwargs: original(*args, **kwargs), compiler)
    function = original.__func__
    key = (type(module), function, signature(module, args, kwargs), compiler.options.key)
    with _lock:
        found = _groups.get(key)
        if found is None:
            found = _groups[key] = Group(function, compiler)
        return found


def signature(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the shapes by which modules of one class are told apart.

    Without them Dynamo would see one function with sizes that vary, and make symbols of them.
    """
    own = tuple(tuple(p.shape) for p in module.parameters())
    given = tuple(_shape(value) for value in (*args, *kwargs.values()))
    return own, given, tuple(kwargs)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
