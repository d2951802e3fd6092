"""What `tune` found: the choice for each module and why, as data that a file can hold."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import ArgumentError, SelectionError
from .gains import seconds
from .tables import Column, Note

ORIGINAL = "original"
_FORMAT = 1


@dataclass(frozen=True)
class Trial:
    """One candidate on one group of equal modules.

    `ratio` is its time over the original's, the median of blocks measured side by side, and `noise` how
    uncertain that is. `first_call` are the seconds of the first call, compilation included. `refused` says why
    the candidate cannot be chosen, and is empty otherwise.
    """

    candidate: str
    seconds: float = math.nan
    ratio: float = math.nan
    noise: float = math.nan
    first_call: float = math.nan
    refused: str = ""

    @property
    def gains(self) -> bool:
        """Whether it is faster than the original by more than the noise."""
        return not self.refused and self.ratio + self.noise < 1.0


@dataclass(frozen=True)
class Choice:
    """What one module runs from now on: the name of a candidate, or "original", and why.

    `original` are the seconds of one call as it was; `measured_on` is the FQN of the equal module that was
    measured for it.
    """

    fqn: str
    cls: str
    candidate: str
    why: str
    original: float = math.nan
    measured_on: str = ""
    trials: Sequence[Trial] = ()

    @property
    def ratio(self) -> float:
        """The time of the choice over the original's."""
        found = [trial.ratio for trial in self.trials if trial.candidate == self.candidate]
        return found[0] if found else 1.0


COLUMNS: tuple[Column[Choice], ...] = (
    Column("module", lambda row: row.fqn or "(the model itself)"),
    Column("class", lambda row: row.cls, keep=4),
    Column("runs", lambda row: row.candidate, style=lambda row: "" if row.candidate == ORIGINAL else "green"),
    Column("original", lambda row: seconds(row.original), keep=2, number=True),
    Column("chosen/original", lambda row: f"{row.ratio:.2f}", keep=1, number=True),
    Column("measured on", lambda row: row.measured_on if row.measured_on != row.fqn else "", keep=5),
    Column("why", lambda row: row.why, keep=3),
)


@dataclass
class Plan:
    """Which candidate each module runs. `candidates` are options of thunderfx by name.

    `to_dict()` is plain data, which `apply_plan` takes. Options that JSON cannot hold (transforms, say) are
    None there: `apply_plan` finds them again by the candidate's name.
    """

    choices: Sequence[Choice]
    candidates: Mapping[str, Mapping[str, Any]]
    backward: bool = False
    device: str = "cpu"
    made_with: Mapping[str, Any] = field(default_factory=lambda: _environment())

    def to_dict(self) -> dict[str, Any]:
        candidates = {name: _as_json(options) for name, options in self.candidates.items()}
        return {
            "format": _FORMAT,
            "made_with": {**self.made_with, "device": self.device},
            "backward": self.backward,
            "candidates": candidates,
            "modules": [_finite(asdict(choice)) for choice in self.choices],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")

    @property
    def verdict(self) -> str:
        """One line: how many modules run what."""
        counts: dict[str, int] = {}
        for choice in self.choices:
            counts[choice.candidate] = counts.get(choice.candidate, 0) + 1
        kept = counts.pop(ORIGINAL, 0)
        parts = [f"{count} run with {name!r}" for name, count in counts.items()]
        return "; ".join([*parts, f"{kept} of {len(self.choices)} keep the original"])

    @property
    def notes(self) -> list[Note]:
        names: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices:
            for trial in choice.trials:
                if trial.refused:
                    names.setdefault((trial.candidate, trial.refused), []).append(choice.fqn or "(model)")
        return [Note(candidate, fqns, text) for (candidate, text), fqns in names.items()]


def read_plan(data: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Turn what `Plan.to_dict` gave back into a plan; `known` are candidates by name.

    Raises `ArgumentError` where it is no such thing, or where a candidate's options are not to be found.
    """
    try:
        written_as = data["format"]
        choices = [_choice(row) for row in data["modules"]]
        stored, made_with = dict(data["candidates"]), dict(data["made_with"])
        backward = bool(data["backward"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"this is no plan of thunderpatch.tune: {type(error).__name__}: {error}; "
            "give what Tuned.to_dict() returned or Tuned.save() wrote"
        ) from error
    if written_as != _FORMAT:
        raise ArgumentError(f"the plan has format {written_as!r}, this thunderpatch reads {_FORMAT}")
    found = {name: known.get(name) if options is None else options for name, options in stored.items()}
    candidates = {name: options for name, options in found.items() if options is not None}
    missing = {choice.candidate for choice in choices} - {ORIGINAL} - candidates.keys()
    if missing:
        name = min(missing)
        raise ArgumentError(
            f"the plan uses the candidate {name!r}, whose options are not in it: "
            f"give them again, apply_plan(..., candidates={{{name!r}: {{...}}}})"
        )
    return Plan(choices, candidates, backward, made_with.pop("device", "cpu"), made_with)


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Raise `SelectionError` where a module of the plan is not in `model`, or is of another class there."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for choice in plan.choices:
        found = modules.get(choice.fqn)
        if found is None or type(found).__name__ != choice.cls:
            what = "no such module" if found is None else f"a {type(found).__name__}"
            raise SelectionError(
                f"the plan was made for another model: expected {choice.fqn or '(the model itself)'} to be a "
                f"{choice.cls}, found {what}; tune this model anew"
            )


def _choice(row: Mapping[str, Any]) -> Choice:
    def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: math.nan if value is None else value for name, value in values.items()}

    trials = [Trial(**numbers(trial)) for trial in row["trials"]]
    return Choice(**{**numbers(row), "trials": trials})


def _as_json(options: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(options), default=_executor_name))
    except (TypeError, ValueError):
        return None


def _executor_name(value: Any) -> Any:
    from .compat import load_thunder

    if isinstance(value, load_thunder().extend.Executor):
        return value.name  # by which thunder takes executors too
    raise TypeError(type(value).__name__)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "lightning-thunder": version("lightning-thunder"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
