"""Why a single module cannot be patched, whoever selects it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

_TRACED: Final = "is itself a tracer's product: patch the module that it was made from"

# By qualified name, because some of these classes live in modules that `import torch` does not load.
_REASONS: Final = {
    "torch.jit._script.ScriptModule": "is compiled by TorchScript: patch the module that it was made from",
    "torch.fx.graph_module.GraphModule": _TRACED,
    "torch.export.unflatten.InterpreterModule": _TRACED,
    "torch.export.unflatten.UnflattenedModule": _TRACED,
    "torch._dynamo.eval_frame.OptimizedModule": "is compiled by torch.compile: patch the module inside",
    "torch.nn.parallel.data_parallel.DataParallel": (
        "makes replicas that call the source's forward: use DistributedDataParallel"
    ),
}

_KINDS: Final = {
    inspect.CO_GENERATOR: "a generator",
    inspect.CO_ASYNC_GENERATOR: "an async generator",
    inspect.CO_COROUTINE: "a coroutine",
}


def why_unpatchable(module: nn.Module) -> str | None:
    """Return why `module` cannot be patched, as the rest of a sentence about it, or None where it can.

    What cannot be patched: TorchScript modules, what torch.fx, torch.export or torch.compile made,
    `nn.DataParallel`, lazy modules before their first run, and a `forward` that is a generator, a coroutine,
    a property or a TorchScript function. Looks at the module alone, not at what is below it.
    """
    return reasons([module])[0]


def reasons(modules: Iterable[nn.Module]) -> list[str | None]:
    """Return `why_unpatchable` of each module; a class is looked at once, however many modules are of it."""
    found: list[str | None] = []
    of_class: dict[type, tuple[str | None, str | None]] = {}
    for module in modules:
        cls = type(module)
        if cls not in of_class:
            of_class[cls] = _reason_of_class(cls), _reason_of_forward(forward_of(cls))
        reason, of_forward = of_class[cls]
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            reason = reason or "is lazy and has no parameters yet: run the model once first"
        own = vars(module).get("forward")
        found.append(reason or (_reason_of_forward(own) if own is not None else of_forward))
    return found


def _reason_of_class(cls: type) -> str | None:
    for base in cls.__mro__:
        reason = _REASONS.get(f"{base.__module__}.{base.__qualname__}")
        if reason is not None:
            return reason
    own = type(forward_of(cls))
    if hasattr(own, "__set__") or hasattr(own, "__delete__"):
        return "has a property as its forward, which hides what is set on the instance: make it a method"
    return None


def forward_of(cls: type) -> object:
    """Return what a class has for a forward: the very object, not what it gives when asked for by an instance."""
    # Not getattr, which would run descriptors, and much faster than inspect.getattr_static.
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


def _reason_of_forward(forward: object) -> str | None:
    for layer in _layers(forward):
        if isinstance(layer, torch.jit.ScriptFunction):
            return "has a TorchScript function as its forward: give it a Python one"
        flags = layer.__code__.co_flags if isinstance(layer, FunctionType) else 0
        for flag, kind in _KINDS.items():
            if flags & flag:
                return f"has a forward that is {kind}: patch the modules that it calls"
    return None


def _layers(function: Any) -> Iterator[object]:
    """Yield a callable and what is inside it: of bound methods, partials and decorated functions."""
    # A decorated generator counts as one even where the decorator itself is an ordinary function, for what
    # such a forward returns cannot be told without a call. The bound is for objects that invent attributes.
    for _ in range(100):
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return
