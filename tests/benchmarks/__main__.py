"""`python -m tests.benchmarks FOLDER`: run the suite, print its tables, write results.json and pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from . import cases, patching
from .results import Result

CPU: dict[str, Callable[..., Result]] = {
    "patching": patching.patching,
    "memory": patching.memory,
    "leaf": cases.leaf,
    "per_call": cases.per_call,
    "first_step": cases.first_step,
    "first_llama": cases.first_llama,
    "llama_call": cases.llama_call,
    "tuned": cases.tuned,
    "growth": cases.growth,
}
# Six minutes on a GPU: what is about Python alone is not measured again.
CUDA: dict[str, Callable[..., Result]] = {
    "leaf": cases.leaf,
    "per_call": cases.per_call,
    "real_size": cases.real_size,
    "tuned": cases.tuned,
    "first_step": cases.first_step,
    "first_llama": cases.first_llama,
}
PACKAGES = (
    "torch",
    "lightning-thunder",
    "thunderpatch",
    "wrapt",
    "accelerate",
    "transformers",
    "nvfuser-cu128-torch28",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("folder", type=Path, help="where results.json and the pictures go")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--only", action="append", choices=sorted({*CPU, *CUDA}), help="one of the measurements")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a peer gets for one answer")
    parser.add_argument("--minutes", type=float, help="start no further measurement after so long")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of the process alone, for a machine that others use too; not for a GPU",
    )
    parser.add_argument("--depths", type=_numbers, help="numbers of blocks of the first training step")
    parser.add_argument("--llama-depths", type=_numbers, help="numbers of Llama layers")
    args = parser.parse_args()
    device = args.device or ("cuda" if _has_cuda() else "cpu")
    settings = {
        "device": device,
        "threads": args.threads,
        "limit": args.limit,
        "clock": args.clock,
        "depths": args.depths or ((8, 32) if device == "cuda" else (8, 32, 128)),
        "llama_depths": args.llama_depths or ((4,) if device == "cuda" else (1, 12)),
    }
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, markup=False)
    suite = CUDA if device == "cuda" else CPU
    chosen = {name: run for name, run in suite.items() if not args.only or name in args.only}
    written: dict[str, Any] = {"environment": environment(settings), "results": {}}
    console.print(", ".join(f"{name}: {value}" for name, value in written["environment"].items()))
    began = time.monotonic()
    for name, run in chosen.items():
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            console.print(f"\n{name}: not measured, {args.minutes:g} minutes are over")
            continue
        result = run(settings, _tell)
        _tell("")
        console.print()
        console.print(result.table(console.width))
        written["results"][name] = result.to_dict()
        # Written each time: what is measured stays when a later measurement fails.
        (args.folder / "results.json").write_text(json.dumps(written, indent=2))
        _draw(result, args.folder / f"{name}.png", console)


def environment(settings: dict[str, Any]) -> dict[str, Any]:
    """What the numbers depend on."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **found, "cpus": os.cpu_count(), **settings, "gpu": _gpu()}


def _draw(result: Result, path: Path, console: Console) -> None:
    try:
        result.draw(path)
    except ImportError:
        console.print(f"(no {path.name}: matplotlib is not installed)")


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text and os.environ.get("BENCHMARK_PROGRESS"):
        print(text, file=sys.stderr, flush=True)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
