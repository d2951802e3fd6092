"""Runs an entry's cases both ways and counts what came of them."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .comparing import differences
from .entries import UNINITIALISED, Case, Entry
from .running import Result, copied, run

# Makes a compiled callable of a module and counts thunder partitions: (call, partitions()).
Through = Callable[[nn.Module], tuple[Callable[..., Any], Callable[[], int]]]


@dataclass
class Outcome:
    """What came of one entry: cases compared, thunder partitions, and faults as "case: what"."""

    id: str
    cases: int = 0
    partitions: int = 0
    random: bool = False
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_entry(entry: Entry, through: Through, cases: int, cap: float) -> Outcome:
    """Run up to ``cases`` cases of ``entry`` and its special ones, starting none after ``cap`` seconds."""
    outcome = Outcome(entry.id)
    started = time.monotonic()
    if entry.name in UNINITIALISED:
        outcome.random = True
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in entry.make(cases):
            _run_case(case, entry, through, outcome)
            if time.monotonic() - started > cap:
                break
    outcome.seconds = time.monotonic() - started
    return outcome


def _eager(case: Case, seed: int, cast: torch.dtype | None = None) -> Result | None:
    module = copied(case.module, cast)
    torch.manual_seed(seed)
    try:
        return run(case, module, module, cast)
    except Exception:
        return None  # what eager refuses is nobody's promise


def _run_case(case: Case, entry: Entry, through: Through, outcome: Outcome) -> None:
    expected, again = _eager(case, 3), _eager(case, 4)
    if expected is None or again is None:
        return
    if any(w.endswith("e") or "differs" in w for w in differences(expected, again, lambda: None)):
        outcome.random = True
        return
    outcome.cases += 1
    torch._dynamo.reset()
    module = copied(case.module)
    call, partitions = through(module)
    torch.manual_seed(3)
    try:
        got = run(case, call, module)
    except Exception as error:
        outcome.raised.append(f"{case.label}: {type(error).__name__}: {str(error)[:300]}")
        return
    finally:
        outcome.partitions += partitions()
    wide = torch.complex128 if entry.dtype.is_complex else torch.float64
    exact = functools.cache(lambda: None if entry.dtype == wide else _eager(case, 3, torch.float64))
    for what in differences(expected, got, exact):
        (outcome.raised if "raises" in what else outcome.wrong).append(f"{case.label}: {what}")
