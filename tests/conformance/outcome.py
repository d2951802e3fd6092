"""Runs an entry's cases both ways and counts what came of them."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .comparing import differences
from .entries import UNINITIALISED, Call, Case, Entry
from .running import Result, copied, run

CASE_SECONDS = 60
# Makes a compiled callable of a module and counts thunder partitions: (call, partitions()).
Through = Callable[[nn.Module], tuple[Callable[..., Any], Callable[[], int]]]


@dataclass
class Outcome:
    """What came of one entry: cases compared, thunder partitions, and faults as "case: what"."""

    id: str
    cases: int = 0
    partitions: int = 0
    random: bool = False
    together: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    seconds: float = 0.0


class TooSlow(BaseException):
    """Not an Exception, so that nothing on the way takes it for a failure to compile."""


@contextlib.contextmanager
def limit(seconds: int, outcome: Outcome, label: str) -> Iterator[None]:
    """Give up on a case after a time; a compiler that does not end is reported, not waited for."""

    def give_up(signum: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    except TooSlow:
        outcome.slow.append(f"{label}: more than {seconds} s")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_entry(
    entry: Entry, through: Through, cases: int, cap: float, stop: Callable[[Outcome], bool] | None = None
) -> Outcome:
    """Run up to ``cases`` cases of ``entry`` and its special ones, starting none after ``cap`` seconds."""
    outcome = Outcome(entry.id)
    started = time.monotonic()
    if entry.name in UNINITIALISED:
        outcome.random = True
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in entry.make(cases):
            with limit(CASE_SECONDS, outcome, case.label):
                _run_case(case, entry, through, outcome)
            if time.monotonic() - started > cap or (stop is not None and stop(outcome)):
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


def _comparable(case: Case, outcome: Outcome) -> list[Call]:
    """Return the calls that eager takes and answers in the same way twice."""
    found = []
    for call in case.calls:
        expected, again = _eager(case.only(call), 3), _eager(case.only(call), 4)
        if expected is None or again is None:
            continue
        if any("requires_grad" not in difference for difference in differences(expected, again, lambda: None)):
            outcome.random = True
        else:
            found.append(call)
    return found


def _run_case(case: Case, entry: Entry, through: Through, outcome: Outcome) -> None:
    calls = _comparable(case, outcome)
    outcome.cases += len(calls)
    faults = _faults(case.only(*calls), entry, through, outcome) if calls else []
    if not faults:
        return
    # Something is wrong: one by one, to say what.
    for call in calls:
        for fault in _faults(case.only(call), entry, through, outcome):
            (outcome.raised if "raises" in fault else outcome.wrong).append(f"{case.label}, {call.label}: {fault}")
    if not outcome.raised and not outcome.wrong:
        outcome.together += [f"{case.label}, all calls together: {fault}" for fault in faults]


def _faults(case: Case, entry: Entry, through: Through, outcome: Outcome) -> list[str]:
    expected = _eager(case, 3)
    if expected is None:
        return ["eager raises with all calls together"] if len(case.calls) > 1 else []
    torch._dynamo.reset()
    module = copied(case.module)
    call, partitions = through(module)
    torch.manual_seed(3)
    try:
        got = run(case, call, module)
    except Exception as error:
        return [f"raises {type(error).__name__}: {str(error)[:300]}"]
    finally:
        outcome.partitions += partitions()
    wide = torch.complex128 if entry.dtype.is_complex else torch.float64
    exact = functools.cache(lambda: None if entry.dtype == wide else _eager(case, 3, torch.float64))
    return differences(expected, got, exact)
