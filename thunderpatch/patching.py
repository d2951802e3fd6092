"""apply, restore, patched, disabled, thunderfx: what a user does to a model."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from . import fused, registry
from .attribution import watch
from .compat import load_thunder, load_thunderfx
from .errors import AlreadyPatchedError, ArgumentError
from .forward import PatchedForward
from .handle import Patch, all_disabled
from .options import Options, read_options
from .regions import compiler_for
from .selection import Nested, select
from .tree import describe

T = TypeVar("T")


def apply(
    model: nn.Module,
    *,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    on_error: str = "raise",
    check: bool = False,
    direct: bool = True,
    double_backward: bool = False,
    isolate: bool = False,
    **thunderfx_options: Any,
) -> Patch:
    """Make the selected modules of `model` run through thunderfx, in place.

    The selectors are those of `select`; with none given, the model itself is compiled, as `thunderfx(model)`
    would. `thunderfx_options` are the keywords of `thunder.jit` and torch.compile's `dynamic`, `fullgraph`,
    `mode` and `options`. `on_error="raise"` raises `CompileError` when a region cannot be compiled, `"eager"`
    lets that module run its original from then on, with a warning. `check=True` compares each compiled
    graph's first run with the original. `direct=False` leaves thunder's own checks in each call.
    `double_backward=True` keeps each region's inputs until its backward, for steps that differentiate a gradient
    (`create_graph=True`); without it such a step works where the inputs are alive anyway, and else raises.
    `isolate=True` keeps the regions inside an outer `torch.compile` (torch >= 2.12), by a graph break around each;
    without it the outer compiler takes the originals in.

    Nothing is compiled yet: that happens at a module's first call. Applying again with equal options changes
    nothing. Returns a `Patch`, which owns what was installed.

    Raises `SelectionError` when nothing matches, `AlreadyPatchedError` when a selected module is patched
    with other options, `ArgumentError` for an unknown option, `UnsupportedEnvironmentError` when thunder
    cannot run here. Whatever is raised, the model is as it was.

    >>> import torch, thunderpatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> thunderpatch.apply(model, types=torch.nn.ReLU)
    <Patch of 1 modules, 1 active; defaults>
    """
    load_thunder()
    options = read_options(
        thunderfx_options,
        on_error=on_error,
        check=check,
        direct=direct,
        double_backward=double_backward,
        isolate=isolate,
    )
    compiler = compiler_for(options, watch, watch.owner)
    with _uncollected():
        chosen = select(model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested)
        new = {fqn: module for fqn, module in chosen.items() if not _patched_alike(fqn, module, options)}
        proxies = {fqn: registry.build(module, fqn, compiler) for fqn, module in new.items()}
    fused.warn_where_never_called(model, new)
    with _uncollected():
        return _install(model, new, proxies, options)


def _install(
    model: nn.Module, new: dict[str, nn.Module], proxies: dict[str, PatchedForward], options: Options
) -> Patch:
    """Put all proxies in place, or none."""
    done: list[nn.Module] = []
    try:
        for fqn, module in new.items():
            registry.install(module, proxies[fqn])
            done.append(module)
        return Patch(model, new, options)
    except BaseException:
        for module in reversed(done):
            registry.uninstall(module)
        raise


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, which would look through all that is being made, again and again, for nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _patched_alike(fqn: str, module: nn.Module, options: Options) -> bool:
    record = registry.active(module)
    if record is None:
        return False
    if record.compiler.options.key != options.key:
        raise AlreadyPatchedError(
            f"{describe(fqn, module)} is patched with {record.compiler.options}, and was now asked for "
            f"with {options}: restore it first, or exclude it. Nothing was changed."
        )
    return True


def restore(
    model: nn.Module,
    *,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "all",
) -> int:
    """Put the selected modules of `model` back exactly as they were; all of them when no selector is given.

    Returns how many that were; 0 when nothing was patched. Compiled code is kept as long as the model lives.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"restore takes a torch.nn.Module, not {type(model).__name__}")
    some = types is not None or names is not None or where is not None or exclude is not None or repeated
    with _uncollected():
        if some:
            by = {"types": types, "names": names, "where": where, "exclude": exclude}
            modules = list(select(model, **by, repeated=repeated, nested=nested).values())
        else:
            modules = [module for _, module in registry.patched_below(model)]
    return sum(registry.uninstall(module) for module in reversed(modules))


@contextlib.contextmanager
def patched(model: nn.Module, **selectors_and_options: Any) -> Iterator[Patch]:
    """Apply for the length of a `with` statement; takes what `apply` takes.

    At the end exactly what this statement installed comes off. Entered again, nothing is compiled again.
    """
    patch = apply(model, **selectors_and_options)
    try:
        yield patch
    finally:
        patch.restore()


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Run the originals of all that is patched in `model` for the length of a `with` statement."""
    with all_disabled([module for _, module in registry.patched_below(model)]):
        yield


def is_patched(module: nn.Module) -> bool:
    """Whether this module itself, not one below it, runs through thunderfx: patched and not restored."""
    return registry.active(module) is not None


def thunderfx(module: T, /, **thunderfx_options: Any) -> T:
    """Compile like `thunder.dynamo.thunderfx`, but give a module back: the very one, patched in place.

    Anything that is no module is handed to thunder's own function. Errors are those of `apply`.
    """
    if isinstance(module, nn.Module):
        apply(module, **thunderfx_options)
        return module
    return load_thunderfx()(module, **thunderfx_options)  # type: ignore[no-any-return]
