"""Lets lightning-thunder run on this torch; nothing else in the package imports thunder before it.

lightning-thunder 0.2.6, by itself, stops at torch 2.11. Three gaps keep it from the newer ones, and each is
bridged here for just as long as thunder needs it, so that torch is afterwards what it was:

- torch 2.13 dropped the named-tensor methods, which thunder lists at import;
- torch 2.14 made ``autograd.Function.apply`` a builtin, without the ``__func__`` that thunder reads then;
- torch 2.12 began to split FX graphs into lazy graph modules, which compile themselves at their first call.
  thunder's interpreter would trace into that compilation.

Private names of torch are used in this module only, and each is looked for before it is used.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any, Final, NoReturn

import torch

from .errors import ThunderPatchWarning, UnsupportedEnvironmentError

_OLDEST_TORCH: Final = (2, 9)
_NEWEST_TESTED_TORCH: Final = (2, 15)
_OLDEST_THUNDER: Final = (0, 2, 6)
_NEWEST_TESTED_THUNDER: Final = (0, 2, 6)
_NEXT_THUNDER_SERIES: Final = (0, 3)

_INSTALL_TORCH: Final = "pip install 'torch>=2.9,<2.16'"
_INSTALL_THUNDER: Final = "pip install 'lightning-thunder>=0.2.6,<0.3'"

_NAMED_TENSOR_METHODS: Final = ("align_as", "align_to", "has_names", "refine_names", "rename")
_LAZY_SPLIT_MODULES: Final = (
    "torch.fx.passes.split_module",
    "torch.fx._lazy_graph_module",
    "torch._dynamo.convert_frame",
)

_lock: Final = threading.RLock()
_loaded: ModuleType | None = None


def load_thunder() -> ModuleType:
    """Return the imported ``thunder`` package, with ``thunder.dynamo`` in it.

    The first call imports it, with what this torch lacks lent to it for the length of the import; a thunder
    that somebody imported before is taken as it is. Later calls cost nothing.

    Raises:
        UnsupportedEnvironmentError: torch or lightning-thunder is missing, too old or of another series, or
            thunder cannot be imported; the cause is then attached, and no part of thunder left behind.

    Warns:
        ThunderPatchWarning: torch or lightning-thunder is newer than what was tested; it is tried.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _import_thunder(_check_versions())
    return _loaded


@contextmanager
def backend_context() -> Iterator[None]:
    """Switch FX's lazy graph modules off around a call of thunder's backend, on a torch where that is needed.

    For use inside a backend that Dynamo calls; it may be nested. What runs later, the first execution of the
    compiled graph and its backward included, is outside: the graph modules made meanwhile are plain ones.
    """
    split, lazy, convert_frame = (importlib.import_module(name) for name in _LAZY_SPLIT_MODULES)
    if not hasattr(split, "_make_graph_module") or not hasattr(lazy, "_use_lazy_graph_module"):
        yield
        return
    # The switch is one variable of the process, kept and put back by whoever turns it. Dynamo turns it too,
    # and holds this reentrant lock while it calls a backend: under it, no two threads' turns can interleave.
    compile_lock = getattr(convert_frame, "compile_lock", _lock)
    with compile_lock, lazy._use_lazy_graph_module(False):
        yield


def load_thunderfx() -> Callable[..., Any]:
    """Return thunder's own thunderfx, which on a newer torch needs help and reassigns `torch.compile`."""
    load_thunder()
    from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject

    taken_by_torch = inspect.signature(torch.compile).parameters

    class Backend(ThunderCompiler):
        def __call__(self, gm: torch.fx.GraphModule, sample_args: list[torch.Tensor]) -> Any:
            with backend_context():
                return super().__call__(gm, sample_args)

    def thunderfx(function: Any, /, **options: Any) -> Any:
        torch_options = {name: value for name, value in options.items() if name in taken_by_torch}
        thunder_options = {name: value for name, value in options.items() if name not in taken_by_torch}
        if "transforms" in thunder_options:  # it appends to the list at each graph
            thunder_options["transforms"] = list(thunder_options["transforms"])
        backend = Backend(**thunder_options)  # type: ignore[no-untyped-call]
        return ThunderFXCompiledObject(backend, torch.compile(function, backend=backend, **torch_options))

    return thunderfx


def _check_versions() -> str:
    """Return thunder's version when it and torch can work together, warn when they are untested."""
    torch_version = str(torch.__version__)
    try:
        thunder_version = metadata.version("lightning-thunder")
    except metadata.PackageNotFoundError:
        raise UnsupportedEnvironmentError(
            f"thunderpatch needs lightning-thunder >=0.2.6,<0.3, found none beside torch {torch_version}: "
            f"{_INSTALL_THUNDER}"
        ) from None
    found = f"found torch {torch_version} and lightning-thunder {thunder_version}"

    torch_release, thunder_release = _release(torch_version), _release(thunder_version)
    if torch_release < _OLDEST_TORCH:
        raise UnsupportedEnvironmentError(f"thunderpatch needs torch 2.9 or newer, {found}: {_INSTALL_TORCH}")
    if not _OLDEST_THUNDER <= thunder_release < _NEXT_THUNDER_SERIES:
        raise UnsupportedEnvironmentError(
            f"thunderpatch needs lightning-thunder >=0.2.6,<0.3, {found}: {_INSTALL_THUNDER}"
        )
    if torch_release[:2] > _NEWEST_TESTED_TORCH or thunder_release > _NEWEST_TESTED_THUNDER:
        warnings.warn(
            f"thunderpatch is tested up to torch 2.15 and lightning-thunder 0.2.6, {found}; trying them. "
            f"If something fails: pip install 'torch<2.16' 'lightning-thunder==0.2.6'",
            ThunderPatchWarning,
            stacklevel=3,
        )
    return thunder_version


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def _import_thunder(thunder_version: str) -> ModuleType:
    """Import thunder with the lent names; on failure take away what the attempt has left."""
    if "thunder" not in sys.modules:
        # Parts of thunder without thunder itself: somebody's plain import failed before. They hold on to a
        # thunder that is gone, and would spoil this one.
        _forget_thunder(keep=frozenset())
    before = frozenset(sys.modules)
    try:
        with _lent_names():
            importlib.import_module("thunder.dynamo")
    except BaseException as error:
        _forget_thunder(keep=before)
        if isinstance(error, Exception):
            raise _broken_import(thunder_version, error) from error
        raise
    return sys.modules["thunder"]


def _broken_import(thunder_version: str, cause: Exception) -> UnsupportedEnvironmentError:
    torch_version = str(torch.__version__)
    if _release(torch_version)[:2] > _NEWEST_TESTED_TORCH:
        advice = f"this torch is newer than 2.15, the newest tested; go back: {_INSTALL_TORCH}"
    else:
        advice = f"these two do work together, so mend the installation: {_INSTALL_THUNDER} --force-reinstall"
    return UnsupportedEnvironmentError(
        f"lightning-thunder {thunder_version} cannot be imported with torch {torch_version} "
        f"({type(cause).__name__}: {cause}); {advice}"
    )


def _forget_thunder(keep: frozenset[str]) -> None:
    """Drop thunder's modules that are not in ``keep``, and the pytree nodes that a next import registers."""
    for name in list(sys.modules):
        if (name == "thunder" or name.startswith("thunder.")) and name not in keep:
            del sys.modules[name]
    if "thunder" in keep or "optree" not in sys.modules:
        return
    # optree refuses a class that is registered already, so that without this the next attempt would fail for
    # another reason than this one.
    optree = sys.modules["optree"]
    for node_type, entry in optree.register_pytree_node.get(namespace="thunder").items():
        if entry.namespace == "thunder":
            optree.unregister_pytree_node(node_type, namespace="thunder")


@contextmanager
def _lent_names() -> Iterator[None]:
    """Give torch the names that thunder reads at import and this torch lacks, until the end of the block."""
    function = torch.autograd.Function
    with ExitStack() as lent:
        for name in _NAMED_TENSOR_METHODS:
            if not hasattr(torch.Tensor, name):
                lent.enter_context(_replaced(torch.Tensor, name, _absent_method(name)))
        if not hasattr(function.apply, "__func__") and "apply" in vars(function):
            lent.enter_context(_replaced(function, "apply", _with_func(vars(function)["apply"])))
        yield


@contextmanager
def _replaced(owner: type, name: str, value: object) -> Iterator[None]:
    # From the class's own dictionary: getattr would bind the original, and may find that of a base class.
    local, original = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if local:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _absent_method(name: str) -> Callable[..., NoReturn]:
    """Return a function that thunder can register under ``name`` and that behaves as if it were not there."""

    def absent(self: torch.Tensor, *args: object, **kwargs: object) -> NoReturn:
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    absent.__name__ = absent.__qualname__ = name
    return absent


def _with_func(apply: Any) -> Any:
    """Return ``apply`` as a class method in Python; it still works, since other threads may be calling it."""

    def call(cls: type, /, *args: object, **kwargs: object) -> object:
        return apply.__get__(None, cls)(*args, **kwargs)

    return classmethod(call)
