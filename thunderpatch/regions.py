"""Groups: modules of one class, forward, set of options and shape signature share compiled code."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .capture import Watch
from .compiler import Compiler
from .lanes import Lane
from .options import Options
from .tree import grow

_lock = threading.RLock()
_compilers: weakref.WeakValueDictionary[Any, Compiler] = weakref.WeakValueDictionary()
_groups: weakref.WeakValueDictionary[Any, Group] = weakref.WeakValueDictionary()


class Group:
    """The lanes of one kind of module. Lives as long as one of its modules does, patched or not."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        self.function, self.compiler = function, compiler
        self.lanes: list[Lane] = []

    def runs(self, module: nn.Module, original: Callable[..., Any]) -> bool:
        """Whether this is the code of `original`, which may have been replaced since the group was chosen."""
        if is_method_of(module, original):
            return self.function is getattr(original, "__func__", None)
        return isinstance(self.function, _Foreign) and self.function.callable() is original

    def lane(self) -> Lane:
        """Return the lane for a module that comes to the group now."""
        with _lock:
            if not self.lanes or self.lanes[-1].full:
                self.lanes.append(self.own_lane())
            return self.lanes[-1]

    def own_lane(self) -> Lane:
        """Return a lane that no other module of the group gets."""
        return Lane(self.function, self.compiler.optimizer)


def compiler_for(options: Options, watch: Watch, owner: Callable[[], str | None]) -> Compiler:
    """Return the compiler of these options: an equal one that is in use, or a new one."""
    with _lock:
        found = _compilers.get(options.key)
        if found is None:
            found = _compilers[options.key] = Compiler(options, watch, owner)
        return found


def group_for(module: nn.Module, original: Any, compiler: Compiler, args: Any, kwargs: Any) -> Group:
    """Return the group of a module that is called for the first time, with these arguments."""
    if not is_method_of(module, original):
        return Group(_Foreign(original), compiler)
    function = original.__func__
    key = (type(module), function, signature(module, args, kwargs), compiler.options.key)
    with _lock:
        found = _groups.get(key)
        if found is None:
            found = _groups[key] = Group(function, compiler)
        return found


def is_method_of(module: nn.Module, original: Callable[..., Any]) -> bool:
    """Whether other modules can run the code of `original`, with themselves in place of `module`."""
    return type(original) is types.MethodType and original.__self__ is module


class _Foreign:
    """Somebody's callable as a function of the module, though it may know one module only.

    It is held weakly: it may hold the module, which must not be kept alive by its own compiled code. The
    module itself holds it, in its instance dict or as a part of its class.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.callable: Callable[[], Any]
        try:
            self.callable = weakref.ref(original)
        except TypeError:  # of a class without weak references
            self.callable = lambda: original

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.callable()(*args, **kwargs)


def signature(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the shapes by which modules of one class are told apart.

    Without them Dynamo would see one function with sizes that vary, and make symbols of them.
    """
    parts = [part for _, part, _ in grow(module).places]
    own = tuple(_shape(p) for part in parts for p in part._parameters.values() if p is not None)
    given = tuple(_shape(value) for value in (*args, *kwargs.values()))
    return own, given, tuple(kwargs)


def _shape(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    if is_traceable_wrapper_subclass(value):  # a DTensor of one shape may be sharded in several ways
        inner: list[str] = value.__tensor_flatten__()[0]
        return type(value), tuple(value.shape), tuple(_shape(getattr(value, name)) for name in inner)
    return tuple(value.shape)
