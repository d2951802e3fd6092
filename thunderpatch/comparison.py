"""The main job on an embedded default: a small GPT trained as it is and patched, side by side."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import nn

from .demo import GPT, Training, train
from .observe import report
from .patching import patched
from .reports import Report
from .tables import Column, plain, table

# Eager and patched training each stray from the exact one by rounding, and the optimizer amplifies it. The
# error of eager is measured; the difference of two such errors gets this many times as much.
ALLOWANCE = 8


@dataclass(frozen=True)
class Comparison:
    """Three trainings of equal models on equal batches: eager, patched, and eager in float64.

    `report` is of the time when the model was patched; `left` names what was not as before after it was
    restored, and is empty when all is well.
    """

    eager: Training
    patched: Training
    exact: Training
    report: Report
    left: list[str]

    @property
    def difference(self) -> float:
        """The largest difference of losses, patched against eager."""
        return _largest(self.patched, self.eager)

    @property
    def allowed(self) -> float:
        """The `difference` that rounding explains: from the error of eager against float64."""
        resolution = torch.finfo(torch.float32).eps * max(self.exact.losses)
        return ALLOWANCE * (_largest(self.eager, self.exact) + resolution)

    @property
    def ok(self) -> bool:
        """Whether losses agree, nothing is left, and every call of every block ran compiled."""
        compiled = all(row.calls == row.compiled_calls > 0 for row in self.report)
        return self.difference <= self.allowed and compiled and not self.left

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "ok": self.ok,
            "difference": self.difference,
            "allowed": self.allowed,
            "left": self.left,
            "eager": asdict(self.eager),
            "patched": asdict(self.patched),
            "float64": asdict(self.exact),
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            f"torch {torch.__version__}, lightning-thunder {version('lightning-thunder')}, "
            f"Python {platform.python_version()}, threads: {torch.get_num_threads()}"
        )
        yield Text(
            f"A GPT of {len(self.report)} equal blocks, trained for {len(self.eager.losses)} steps on the "
            "text of Python's help(): as it is, and with thunderpatch.patched(model, repeated=True).\n"
        )
        yield self.report
        yield Text()
        yield table(_LOSSES, self._losses(), options.max_width)
        yield Text(
            f"Largest difference: {self.difference:.1e} "
            f"(allowed: {self.allowed:.1e}, {ALLOWANCE} times the error of float32)\n"
        )
        yield table(_TIMES, [("as it is", self.eager), ("patched", self.patched)], options.max_width)
        yield Text()
        if self.left:
            yield Text("Restored, but not all is as before:\n" + "\n".join(self.left), style="red")
        else:
            yield Text(
                "Restored: the attributes of every module, the state_dict's keys and the parameters' "
                "identities are those of before."
            )
        yield Text("all is well" if self.ok else "NOT well", style="bold green" if self.ok else "bold red")

    def _losses(self) -> list[tuple[int, float, float]]:
        last = len(self.eager.losses) - 1
        shown = sorted({0, last, *range(0, last, max(1, len(self.eager.losses) // 5))})
        return [(step, self.eager.losses[step], self.patched.losses[step]) for step in shown]


_LOSSES: tuple[Column[tuple[int, float, float]], ...] = (
    Column("step", lambda row: str(row[0] + 1), number=True),
    Column("loss as it is", lambda row: f"{row[1]:.6f}", number=True),
    Column("loss patched", lambda row: f"{row[2]:.6f}", number=True),
    Column("difference", lambda row: f"{abs(row[1] - row[2]):.1e}", number=True),
)
_TIMES: tuple[Column[tuple[str, Training]], ...] = (
    Column("", lambda row: row[0]),
    Column("first step, s", lambda row: f"{row[1].first_seconds:.2f}", number=True),
    Column("later steps, ms (median)", lambda row: f"{row[1].step_seconds * 1e3:.1f}", number=True),
)


def compare(
    steps: int = 20,
    seed: int = 0,
    device: str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> Comparison:
    """Train a small GPT of 12 equal blocks as it is, patched, and in float64, on the same batches.

    `on_step(step, loss)` is called after each of the `3 * steps` steps. The global random state is kept.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT().to(device)
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    eager = train(model, steps, seed, on_step)
    before = _traces(twin)
    with patched(twin, repeated=True):
        training = train(twin, steps, seed, on_step)
        seen = report(twin)
    left = [what for what, value in _traces(twin).items() if before.get(what) != value]
    return Comparison(eager, training, train(exact, steps, seed, on_step), seen, left)


def _largest(one: Training, other: Training) -> float:
    # torch's maximum, unlike Python's, is NaN where one of the values is.
    losses = torch.tensor([one.losses, other.losses], dtype=torch.float64)
    return (losses[0] - losses[1]).abs().max().item()


def _traces(model: nn.Module) -> dict[str, Any]:
    traces: dict[str, Any] = {
        f"attributes of {fqn or '(model)'}": [*vars(module)] for fqn, module in model.named_modules()
    }
    traces["keys of the state_dict"] = [*model.state_dict()]
    traces["identities of the parameters"] = [id(parameter) for parameter in model.parameters()]
    return traces
