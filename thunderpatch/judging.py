"""Whether two outcomes of the same call agree, also where random numbers are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .masks import Masks, again
from .outcome import Outcome
from .tolerance import Difference, Yardstick


class Subject(Protocol):
    """What is judged: it can be run as it was written, and in float64."""

    def original(self, masks: Masks | None = None) -> Outcome:
        """Run what was written, from the random state that the compiled run begins with."""

    def exact(self, masks: Masks | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Run in float64 from the same inputs, and from inputs and parameters moved by a rounding step."""


@dataclass(frozen=True)
class Judgement:
    """The differences found, the worst first, and what they were measured by and against."""

    found: list[Difference]
    original: Outcome
    yardstick: Yardstick
    note: str = ""
    comparable: bool = True

    @property
    def ok(self) -> bool:
        return not self.found or self.found[0].ok

    def agrees(self, outcome: Outcome) -> bool:
        """Whether another outcome of the call, compiled in another way, agrees with the original."""
        found = self.yardstick.differences(self.original.values, outcome.values)
        return not found or found[0].ok


def judge(subject: Subject, original: Outcome, compiled: Outcome, yardstick: Yardstick) -> Judgement:
    """Compare `compiled` with `original`; where random numbers were drawn, in a way that can hold.

    That is with equal random numbers, where both drew equally many, or with the masks of dropout that thunder
    draws. What draws in yet another way is not comparable.
    """
    if not original.drew:
        return _measured(subject, original, compiled, yardstick)
    # No float64 here: it would draw other masks, and their difference would pass for rounding.
    found = yardstick.differences(original.values, compiled.values)
    if original.same_random_numbers(compiled) and (not found or found[0].ok):
        return Judgement(found, original, yardstick, "random, compared with the same random numbers")
    masks = Masks()
    masked = subject.original(masks)
    if subject.original(again(masks)).drew or not masked.same_random_numbers(compiled):
        note = "random: thunder draws its random numbers in another way"
        return Judgement([], original, yardstick, note, comparable=False)
    judgement = _measured(subject, masked, compiled, yardstick, masks)
    note = "; ".join(filter(None, ["random, compared with the same dropout masks", judgement.note]))
    return dataclasses.replace(judgement, note=note)


def _measured(
    subject: Subject, original: Outcome, compiled: Outcome, yardstick: Yardstick, masks: Masks | None = None
) -> Judgement:
    note = ""
    if yardstick.measures:
        try:
            exact, moved = subject.exact(masks)
            yardstick = dataclasses.replace(yardstick, exact=exact, moved=moved)
        except Exception as error:
            note = f"does not run in float64 ({spelled(error)}): compared with fixed tolerances"
    return Judgement(yardstick.differences(original.values, compiled.values), original, yardstick, note)


def spelled(error: BaseException) -> str:
    """Return an error in one line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"
