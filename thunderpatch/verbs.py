"""What each verb of the command line does: it takes the parsed arguments and returns whether all is well."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import thunderpatch

from . import plotting
from .errors import CompileError
from .progress import progress
from .tables import Column, plain, screen
from .target_runs import equals_unpatched, run_patched, run_unpatched
from .targets import Target, UsageError, find, load
from .verification import Verification


def demo(args: argparse.Namespace) -> bool:
    from .comparison import compare

    with progress("training as it is, patched, and in float64", 3 * args.steps) as advance:
        result = compare(
            args.steps,
            args.seed,
            args.device or "cpu",
            lambda step, loss: advance(f"step {step + 1}, loss {loss:.3f}"),
        )
    _show(result, args)
    return result.ok


def list_modules(args: argparse.Namespace) -> bool:
    target = _load(args)
    modules = thunderpatch.select(target.model, **_selectors(args))
    rows = [(fqn, type(module).__name__, _parameters(module)) for fqn, module in modules.items()]
    if args.json:
        print(json.dumps([dict(zip(("fqn", "cls", "parameters"), row, strict=True)) for row in rows], indent=2))
        return True
    columns: tuple[Column[tuple[str, str, int]], ...] = (
        Column("module", lambda row: row[0] or "(model)"),
        Column("class", lambda row: row[1]),
        Column("parameters", lambda row: f"{row[2]:,}", number=True, keep=1),
    )
    total = sum(1 for _ in target.model.modules())
    width = shutil.get_terminal_size().columns
    _print(screen(f"{len(rows)} of {total} modules selected", columns, rows, [], width), plain)
    return True


def report(args: argparse.Namespace) -> bool:
    _check_folder(args)
    target = _load(args, needs_inputs=True)
    backward, failure = bool(args.backward), None
    run_unpatched(target, backward)
    with thunderpatch.patched(target.model, **_selectors(args), **dict(args.option)):
        with progress("compiling and running", args.calls) as advance:
            try:
                for call in range(args.calls):
                    run_patched(target, backward)
                    advance(f"call {call + 1}")
            except CompileError as error:  # the report tells which module it is, and how the others fare
                failure = error
        result = thunderpatch.report(target.model)
        _save_reproducers(target, args, lambda: run_patched(target, backward))
    _show(result, args)
    if failure is not None:
        raise failure
    return result.ok


def verify(args: argparse.Namespace) -> bool:
    _check_folder(args)
    target, result = _measure("verify", args, grad=args.backward is not False)

    def again() -> None:  # `verify` has restored the model; its compiled code is found again
        patch = thunderpatch.patched(target.model, **_selectors(args), **dict(args.option))
        with patch, torch.set_grad_enabled(args.backward is not False):
            target.model(*target.args, **target.kwargs)

    _save_reproducers(target, args, again, verification=result)
    _show(result, args)
    return bool(result.ok)


def _check_folder(args: argparse.Namespace) -> None:
    if args.data and not args.reproducers:
        raise UsageError("--data belongs to --reproducers FOLDER")
    if args.reproducers:
        try:
            Path(args.reproducers).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--reproducers {args.reproducers}: {error.strerror}") from error


def _save_reproducers(
    target: Target, args: argparse.Namespace, run: Callable[[], object], verification: Verification | None = None
) -> None:
    if args.reproducers:
        scripts = thunderpatch.save_reproducers(
            target.model, args.reproducers, data=run if args.data else None, verification=verification
        )
        noun = "script" if len(scripts) == 1 else "scripts"
        print(f"{len(scripts)} {noun} written to {args.reproducers}", file=sys.stderr)


def culprits(args: argparse.Namespace) -> bool:
    target = _load(args, needs_inputs=args.check is None)
    judge = find(args.check) if args.check else equals_unpatched(target, bool(args.backward))
    if not callable(judge):
        raise UsageError(f"--check {args.check} is no function that takes the model")
    search = _function("find_culprits")
    found = search(target.model, lambda: judge(target.model), **_selectors(args), **_options(args))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(found) if found else "no module breaks the model")
    return not found


def bench(args: argparse.Namespace) -> bool:
    if args.plot:
        try:
            plotting.check(Path(args.plot))
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"--plot {args.plot}: {error}") from error
    _, result = _measure("benchmark", args, backward=bool(args.backward))
    _show(result, args)
    if args.plot:
        result.plot(args.plot)
    return True


def tune(args: argparse.Namespace) -> bool:
    _, result = _measure("tune", args, backward=bool(args.backward))
    _show(result, args)
    return True


def _measure(name: str, args: argparse.Namespace, **settings: Any) -> tuple[Target, Any]:
    target = _load(args, needs_inputs=True)
    given = {**_selectors(args), **_options(args), **settings}
    if clash := given.keys() & target.kwargs.keys():
        raise UsageError(f"the keyword input {min(clash)!r} is also a setting of {name}; pass it by position")
    return target, _function(name)(target.model, *target.args, **given, **target.kwargs)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """As one dict, apart from the model's own keywords."""
    return {"thunderfx_options": dict(args.option)} if args.option else {}


def _function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(thunderpatch, name)
    return function


def _load(args: argparse.Namespace, needs_inputs: bool = False) -> Target:
    torch.manual_seed(args.seed)
    target = load(args.target, args.input, dtype=args.dtype, device=args.device, training=args.training)
    if needs_inputs and not target.has_inputs:
        raise UsageError(f"{args.target} gives no inputs: return (model, inputs) from it, or add --input")
    return target


def _selectors(args: argparse.Namespace) -> dict[str, Any]:
    chosen = {name: getattr(args, name) for name in ("types", "names", "exclude", "repeated")}
    return {"nested": args.nested, **{name: value for name, value in chosen.items() if value}}


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _show(result: Any, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print(result)


def _print(result: Any, text: Callable[[Any], str] = str) -> None:
    """Print in colour on a terminal, where the result can; as plain text elsewhere."""
    console = Console(highlight=False)
    if console.is_terminal and hasattr(result, "__rich_console__"):
        console.print(result)
    else:
        print(text(result))
