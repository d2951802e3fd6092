"""What the command line works on: a target names a model, an input specification makes its inputs."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .demo import MODELS
from .errors import ThunderPatchError
from .forms import INPUT_FORM, TARGET_FORM

R = TypeVar("R")
_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*|scalar)"
    r"(?::(?P<dtype>[^\W\d]\w*)(?::(?P<low>-?[\d.]+?)\.\.(?P<high>-?[\d.]+))?)?"
)


class UsageError(ThunderPatchError, ValueError):
    """The command line asks for something that is not there or cannot be read."""


@dataclass(frozen=True)
class Target:
    """A model with the inputs of one call; without any, `args` and `kwargs` are empty."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def has_inputs(self) -> bool:
        return bool(self.args or self.kwargs)


def load(
    name: str,
    inputs: Sequence[str] = (),
    *,
    dtype: str | None = None,
    device: str | None = None,
    training: bool | None = None,
) -> Target:
    """Return the model that `name` stands for, with inputs.

    `name` is a built-in model (a key of `demo.MODELS`), `package.module:factory` or `file.py:factory`. The
    factory is called without arguments and returns a model, or a pair of a model and its inputs: a tuple of
    positional ones, a dict of keyword ones, or a single tensor. A model in place of a factory is taken as it
    is. `inputs` (see `parse_input`) replace those of the factory. `dtype` is what floating-point parameters,
    buffers and inputs are cast to. `training` sets train or eval mode; by default the mode is the factory's.

    Raises:
        UsageError: there is no such target, or it is no model, or an input cannot be read.
    """
    cast = _floating(dtype) if dtype else None
    made = _call(name, find(name))
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} gives a {type(model).__name__}; expected a model (nn.Module), or a pair of a model and its inputs"
        )
    args, kwargs = _arguments(given)
    if inputs:
        parsed = [parse_input(spec, cast or torch.float32) for spec in inputs]
        args = tuple(value for key, value in parsed if key is None)
        kwargs = {key: value for key, value in parsed if key is not None}
    try:
        model.to(device=device, dtype=cast)
        args, kwargs = tree_map(lambda value: _moved(value, device, cast), (args, kwargs))
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
        raise UsageError(f"cannot move {name} to {device}: {error}") from error
    if training is not None:
        model.train(training)
    return Target(model, args, kwargs)


def find(name: str) -> Any:
    """Return what `package.module:attribute`, `file.py:attribute` or a built-in name stands for."""
    if name in MODELS:
        return MODELS[name]
    where, colon, attribute = name.rpartition(":")
    if not (where and colon and attribute):
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"no target is called {name!r}{hint} (expected {TARGET_FORM})")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [key for key in vars(module) if not key.startswith("_")]
            close = difflib.get_close_matches(part, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{where} has no {attribute!r}{hint}")
        found = getattr(found, part)
    return found


def parse_input(spec: str, default: torch.dtype = torch.float32) -> tuple[str | None, Tensor]:
    """Make the input that `[NAME=]SHAPE[:DTYPE[:LOW..HIGH]]` describes, with its keyword name or None.

    A shape is sizes joined by `x`, or `scalar`. Floating-point inputs (of dtype `default` if none is given)
    are drawn from a normal distribution, or evenly from the range; integer ones need a range, HIGH excluded.

    >>> name, ids = parse_input("ids=2x16:int64:0..128")
    >>> name, ids.shape, ids.dtype
    ('ids', torch.Size([2, 16]), torch.int64)
    """
    match = _INPUT.fullmatch(spec)
    if match is None:
        raise UsageError(f"cannot read the input {spec!r}: expected {INPUT_FORM}")
    name, bounded = match["name"], match["low"] is not None
    shape = [] if match["shape"] == "scalar" else [int(size) for size in match["shape"].split("x")]
    dtype = _dtype(match["dtype"]) if match["dtype"] else default
    if dtype is torch.bool:
        return name, torch.randint(2, shape).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        if not bounded:
            raise UsageError(f"the integer input {spec!r} needs a range, such as {spec}:0..128")
        return name, torch.randint(*_range(spec, int), shape, dtype=dtype)
    if not bounded:
        return name, torch.randn(shape, dtype=dtype)
    bottom, top = _range(spec, float)
    return name, torch.rand(shape, dtype=dtype) * (top - bottom) + bottom


def _range(spec: str, kind: Callable[[str], Any]) -> tuple[Any, Any]:
    low, high = spec.rpartition(":")[2].split("..")
    try:
        bottom, top = kind(low), kind(high)
    except ValueError:
        raise UsageError(f"cannot read the range {low}..{high} of {spec!r} as {kind.__name__} numbers") from None
    if bottom >= top:
        raise UsageError(f"the range {low}..{high} of {spec!r} is empty")
    return bottom, top


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    names = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
    close = difflib.get_close_matches(name, names, n=1)
    raise UsageError(f"torch has no dtype {name!r}" + (f"; did you mean {close[0]}?" if close else ""))


def _floating(name: str) -> torch.dtype:
    dtype = _dtype(name)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"a model cannot be cast to {name}; expected a floating-point dtype such as bfloat16")
    return dtype


def _call(name: str, found: Any) -> Any:
    if isinstance(found, nn.Module) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise UsageError(f"{name}() raised {type(error).__name__}: {error}") from error


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def _moved(value: Any, device: str | None, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)
    # As `python path` would have it: the file may import its neighbours, and find itself by name.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    _running(str(path), lambda: loader.exec_module(module))
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # what `python -m` does; an installed script does not
    return _running(name, lambda: importlib.import_module(name))


def _running(name: str, load: Callable[[], R]) -> R:
    try:
        return load()
    except Exception as error:
        raise UsageError(f"cannot import {name}: {type(error).__name__}: {error}") from error
