"""tune: patch only what pays, with what pays most."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import registry
from .calls import Call
from .capturing import capture_inputs
from .compat import load_thunder
from .contest import Candidates, Contest, only
from .copying import tensors_in
from .errors import AlreadyPatchedError, ArgumentError, ThunderPatchError
from .patching import apply
from .plans import ORIGINAL, Choice, Plan, check_fits, read_plan
from .preserving import preserved
from .progress import progress
from .selection import Nested, select
from .stopwatch import Repeated
from .tuned import Tuned, install

__all__ = ["apply_plan", "default_candidates", "tune"]


def default_candidates(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return what `tune` tries beside the original on a kind of device: options of thunderfx, by name.

    "thunderfx" is thunderfx as it is. On a CPU "torch_compile" has thunder's torch_compile executor in front
    of the default ones. On CUDA "nvfuser" has nvFuser there, where it is installed and not a default already,
    and "cuda graphs" thunder's CUDA graph transform.
    """
    thunder = load_thunder()
    defaults = [executor.name for executor in thunder.get_default_executors()]
    candidates: dict[str, dict[str, Any]] = {"thunderfx": {}}
    if device != "cuda":
        candidates["torch_compile"] = {"executors": ["torchcompile", *defaults]}
        return candidates
    if "nvfuser" not in defaults and thunder.extend.get_executor("nvfuser") is not None:
        candidates["nvfuser"] = {"executors": ["nvfuser", *defaults]}
    from thunder.transforms.cudagraph import CUDAGraphTransform

    candidates["cuda graphs"] = {"transforms": [CUDAGraphTransform()]}
    return candidates


def tune(
    model: nn.Module,
    *args: Any,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    backward: bool = False,
    candidates: Candidates | None = None,
    min_run_time: float = 0.2,
    thunderfx_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Patch each selected module with the candidate that runs it fastest, or leave it as it is.

    The selectors are those of `select`; with none given, the model itself is tuned. `candidates` are options
    of `apply` by name, `default_candidates(device)` if None; `thunderfx_options` are added to each. With
    `backward` a step is forward and backward, otherwise inference, with grad mode off.

    One eager run of `model(*args, **kwargs)` captures each module's inputs. Modules that run the same compiled
    graphs are equal, and one of them is measured for all: its original and the candidates in turn, as
    `benchmark` does. A candidate is chosen when it is faster than the original by more than the noise
    of the measurement and `verify` finds it equal to the original; otherwise the module stays unpatched.

    Returns a handle like `Patch`, with what was chosen and why; `save(path)` keeps it for `apply_plan`. Apart
    from the patches the model is as before. Raises what `select` raises, what the model raises unpatched, and
    `AlreadyPatchedError` when a selected module is patched.
    """
    modules = select(model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested)
    _none_patched(modules)
    with preserved(model), torch.set_grad_enabled(backward):
        calls = capture_inputs(model, modules, args, kwargs)
        device = _device(model, calls)
        given = default_candidates(device) if candidates is None else candidates
        options = {name: {**(thunderfx_options or {}), **more} for name, more in given.items()}
        if ORIGINAL in options or not options:
            raise ArgumentError(f"candidates: expected names of your own, not {ORIGINAL!r}; found {[*options]}")
        groups = _grouped(model, modules, calls, next(iter(options.values())), backward)
        choices = {fqn: _uncalled(fqn, module) for fqn, module in modules.items() if fqn not in calls}
        with progress("tuning", len(groups)) as advance:
            for group in groups:
                contest = Contest(model, modules[group[0]], calls[group[0]], backward)
                choice = contest.choose(group[0], options, min_run_time)
                choices |= {fqn: replace(choice, fqn=fqn) for fqn in group}
                advance(group[0])
    return install(model, Plan([choices[fqn] for fqn in modules], options, backward, device))


def apply_plan(
    model: nn.Module, plan: Tuned | Mapping[str, Any] | str | Path, candidates: Candidates | None = None
) -> Tuned:
    """Patch `model` as a former `tune` decided, without measuring.

    `plan` is what `tune` returned, its `to_dict()`, or the path of the file that its `save` wrote. `candidates`
    gives options by name where the file could not hold them; those of `default_candidates` are known.

    Raises `SelectionError` when the plan names a module that the model does not have, or has in another class,
    `ArgumentError` when it is no plan, and what `apply` raises. Whatever is raised, the model is as it was.
    """
    if isinstance(plan, Tuned):
        found = plan.plan
    else:
        data = json.loads(Path(plan).read_text(encoding="utf-8")) if isinstance(plan, (str, Path)) else plan
        if not isinstance(data, Mapping):
            raise ArgumentError(f"a plan is a mapping or a path to its file, not {type(data).__name__}")
        device = str(data.get("made_with", {}).get("device", "cpu"))
        found = read_plan(data, {**default_candidates(device), **(candidates or {})})
    check_fits(model, found)
    return install(model, found)


def _none_patched(modules: Mapping[str, nn.Module]) -> None:
    for fqn, module in modules.items():
        if registry.active(module) is not None:
            raise AlreadyPatchedError(
                f"{fqn or '(the model itself)'} ({type(module).__name__}) is patched already: restore it before "
                "it is tuned, or exclude it. Nothing was changed."
            )


def _grouped(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
    options: Mapping[str, Any],
    backward: bool,
) -> list[list[str]]:
    """Return the FQNs of equal modules together: those that run the very same compiled graphs.

    That is surer than to compare classes, shapes and settings, and costs a tracing that a patch needs anyway.
    """
    groups: dict[Any, list[str]] = {}
    for fqn, call in calls.items():
        module = modules[fqn]
        step = Repeated(module, call, backward)
        ran: tuple[int, ...] = ()
        try:
            with apply(model, where=only(module), nested="all", **options):
                record = registry.active(module)
                step.once()
                ran = tuple(id(graph) for graph in record.graphs) if record is not None else ()
        except ThunderPatchError:
            pass  # told where the candidate is tried; a module of its own until then
        groups.setdefault((type(module), ran) if ran else fqn, []).append(fqn)
    return list(groups.values())


def _device(model: nn.Module, calls: Mapping[str, Call]) -> str:
    tensors = [*model.parameters(), *(t for call in calls.values() for t in tensors_in((call.args, call.kwargs)))]
    return "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"


def _uncalled(fqn: str, module: nn.Module) -> Choice:
    return Choice(fqn, type(module).__name__, ORIGINAL, "the model did not call it")
