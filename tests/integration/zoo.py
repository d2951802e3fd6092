"""Architectures of transformers and diffusers from tiny configs, each patched and compared with eager.

    python -m tests.integration.zoo FOLDER

runs them all on the installed torch, one at a time, keeps the results in the folder, one file for each torch, and
writes what all of its files say as a table, `FOLDER/ZOO.md`.
"""

from __future__ import annotations

import copy
import importlib.metadata as metadata
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thunderpatch

from .architectures import ZOO, Entry

# What is patched in each architecture, by the column of the table. Names are the libraries' own for such modules.
PARTS: dict[str, Callable[[nn.Module, str], bool]] = {
    "norms": lambda module, fqn: type(module).__name__.endswith("Norm"),
    "feed-forwards": lambda module, fqn: type(module).__name__.endswith(
        ("MLP", "FFN", "FeedForward", "SparseMoeBlock", "Intermediate")
    ),
    "attention": lambda module, fqn: type(module).__name__.endswith("Attention"),
}
# Eager in float32 is this much off from float64 at most, times a factor for another order of the same sums.
FACTOR = 8
LIMIT_S = 900
PATH = re.compile(r"(/[\w.+-]+)+/")  # of the machine that ran it, in messages


@dataclass(frozen=True)
class Result:
    """What came of one architecture; `why` is empty where everything was equal with default settings."""

    name: str
    family: str
    model: str
    patched: int
    graphs: int
    why: str = ""
    with_eager: str = ""  # what came of it with on_error="eager", where the default failed
    parts: dict[str, str] = field(default_factory=dict)  # "equal", "none there", or why not
    seconds: float = 0.0


def outcome(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run forward and backward; return the loss, every output and every gradient."""
    model.zero_grad()
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    loss = out[0].float().square().mean() if loss is None else loss
    loss.backward()
    leaves = torch.utils._pytree.tree_leaves(out.to_tuple())
    found = {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **grads}


def budget(model: nn.Module, inputs: dict[str, Any], eager: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far off each value may be, from how far eager is off from float64."""
    cast = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    eps = torch.finfo(torch.float32).eps
    coarse = {name: 64 * FACTOR * eps * max(1.0, float(value.abs().max())) for name, value in eager.items()}
    try:
        exact = outcome(copy.deepcopy(model).double(), cast)
    except RuntimeError:  # it casts to float32 somewhere inside, and mixes the two
        return coarse
    if not all(value.isfinite().all() for value in exact.values()):  # its masks are float32's least number
        return coarse
    errors = {name: float((value - exact[name]).abs().max()) for name, value in eager.items()}
    sizes = {name: eps * float(exact[name].abs().max()) for name in eager}
    # A gradient that is zero but for rounding is as far off as the others are large.
    least = eps * max(float(p.abs().max()) for p in exact.values()) / FACTOR
    return {name: FACTOR * max(errors[name], sizes[name], least) for name in eager}


def differences(
    model: nn.Module, inputs: dict[str, Any], eager: dict[str, torch.Tensor], most: dict[str, float]
) -> str:
    got = outcome(model, inputs)
    if got.keys() != eager.keys():
        return f"without a gradient: {sorted(eager.keys() ^ got.keys())}"
    for name, value in eager.items():
        error = float((got[name] - value).abs().max())
        if not error <= most[name]:
            return f"{name} is off by {error:.1e}, allowed {most[name]:.1e}"
    return ""


def unexplained(patch: thunderpatch.Patch) -> str:
    """Return the first module that did not run compiled, with the report's word for it."""
    for row in patch.report():
        if row.fqn in patch.modules and row.status not in ("compiled", "partly", "routed"):
            return f"{row.fqn} {row.status}: {row.reason}"
    return ""


def examine(entry: Entry, select: dict[str, Any] | None = None, on_error: str = "raise") -> Result:
    """Patch a fresh model of one architecture and compare it with eager, twice: as compiled and as found again."""
    began = time.perf_counter()
    model, inputs = entry.make()
    eager = outcome(model, inputs)
    most = budget(model, inputs, eager)
    patch = thunderpatch.apply(model, **(select or dict(entry.select)), on_error=on_error)
    rows = [row for row in patch.report() if row.fqn in patch.modules]
    try:
        why = differences(model, inputs, eager, most) or differences(model, inputs, eager, most)
        rows = [row for row in patch.report() if row.fqn in patch.modules]
        why = why or (unexplained(patch) if on_error == "raise" else "")
    except Exception as error:
        why = PATH.sub("", " ".join(f"{type(error).__name__}: {error}".split()))[:300]
    distinct = len({graph for row in rows for graph in _graphs(model, row.fqn)})
    took = round(time.perf_counter() - began, 1)
    return Result(entry.name, entry.family, type(model).__name__, len(patch), distinct, why, seconds=took)


def _graphs(model: nn.Module, fqn: str) -> Iterable[Any]:
    record = thunderpatch.registry.active(model.get_submodule(fqn))
    return record.graphs if record is not None else ()


def examine_all_ways(entry: Entry) -> Result:
    """Examine the blocks, with `on_error="eager"` too where the default is not equal, and each kind of part apart."""
    result = examine(entry)
    if result.why:
        result = replace(result, with_eager=examine(entry, on_error="eager").why or "equal")
    return replace(result, parts={part: examine_part(entry, part) for part in PARTS})


def examine_part(entry: Entry, part: str) -> str:
    try:
        return examine(entry, {"where": PARTS[part]}).why or "equal"
    except thunderpatch.SelectionError:
        return "none there"


def work(names: list[str], path: Path) -> None:
    """Append the result of each architecture to a file, one line of JSON each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        try:
            result = examine_all_ways(ZOO[name])
        except Exception as error:  # of eager, or of what built the model
            result = Result(name, ZOO[name].family, "", 0, 0, f"not examined: {type(error).__name__}: {error}"[:300])
        with path.open("a") as lines:
            print(json.dumps(asdict(result)), file=lines)


def read(path: Path) -> dict[str, Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def examine_all(path: Path) -> None:
    """Examine what is not in the file yet, in a process that is replaced when it crashes or hangs."""
    spawn = multiprocessing.get_context("spawn")
    while left := [name for name in ZOO if name not in read(path)]:
        process = spawn.Process(target=work, args=(left, path))
        process.start()
        seen, since = len(read(path)), time.monotonic()
        while process.is_alive() and time.monotonic() - since < LIMIT_S:
            process.join(1)
            if len(read(path)) != seen:
                seen, since = len(read(path)), time.monotonic()
        if process.is_alive() or process.exitcode:
            why = f"took more than {LIMIT_S} s" if process.is_alive() else f"ended its process ({process.exitcode})"
            process.kill()
            process.join()
            name = next(name for name in ZOO if name not in read(path))
            with path.open("a") as lines:
                print(json.dumps(asdict(Result(name, ZOO[name].family, "", 0, 0, why))), file=lines)


def versions() -> str:
    names = ("torch", "lightning-thunder", "transformers", "diffusers")
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in names)


def answers(result: Result) -> dict[str, str]:
    """Return what the table says of one architecture, by column."""
    why = f'{result.why}; with `on_error="eager"`: {result.with_eager or "not tried"}' if result.why else "equal"
    return {"blocks": why, **{part: result.parts.get(part, "not examined") for part in PARTS}}


def cell(answers: dict[str, str]) -> str:
    """Join the answers of each torch: once where all say the same."""
    if len(set(answers.values())) == 1:
        return next(iter(answers.values())).replace("|", "/")
    return "<br>".join(f"{torch}: {answer}" for torch, answer in answers.items()).replace("|", "/")


def table(runs: dict[str, dict[str, Result]]) -> str:
    """Return in Markdown what came of each architecture, given by the versions of a run and by name."""
    lines = [
        "# Model zoo",
        "",
        "Tiny models from configs, with random weights, patched and compared with eager: outputs, loss and all",
        "gradients, twice. Equal means: not further off than eager in float32 is from float64, times a small factor.",
        "Patched are the blocks (`repeated=True`; their number and the distinct graphs stand beside) or, in models of",
        "their own, all norms, feed-forwards or attention modules, as far as the classes' names tell them.",
        "Written by `python -m tests.integration.zoo FOLDER`.",
        "",
    ]
    for run, results in runs.items():
        equal = sum(not r.why for r in results.values())
        backed = sum(not r.why or r.with_eager == "equal" for r in results.values())
        parts = [answer for r in results.values() for answer in r.parts.values() if answer != "none there"]
        lines += [
            f"- {run}: blocks of {equal} of {len(results)} are equal with default settings, {backed} with "
            f'`on_error="eager"`; parts: {parts.count("equal")} of {len(parts)}.'
        ]
    lines += ["", "| architecture | family | model | modules | graphs | blocks | norms | feed-forwards | attention |"]
    lines += ["|" + "---|" * 9]
    for name in ZOO:
        found = {run.split(",")[0]: results[name] for run, results in runs.items() if name in results}
        r = next(iter(found.values()))
        said = {torch: answers(result) for torch, result in found.items()}
        cells = [cell({torch: columns[what] for torch, columns in said.items()}) for what in ("blocks", *PARTS)]
        lines.append(f"| {' | '.join([r.name, r.family, r.model, str(r.patched), str(r.graphs), *cells])} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    examine_all(folder / f"{versions()}.jsonl")
    (folder / "ZOO.md").write_text(table({path.stem: read(path) for path in sorted(folder.glob("torch *.jsonl"))}))
