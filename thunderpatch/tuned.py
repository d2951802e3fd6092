"""The handle on what `tune` and `apply_plan` install: a patch for each candidate, and the plan behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from torch import nn

from .handle import Patch
from .patching import apply
from .plans import COLUMNS, Choice, Plan
from .tables import page, plain, screen


class Tuned:
    """A handle like `Patch` on what `tune` or `apply_plan` installed, with what was chosen and why.

    Prints as a table. `to_dict()` and `save(path)` keep the plan for `apply_plan`.
    """

    def __init__(self, plan: Plan, patches: Sequence[Patch]) -> None:
        self.plan = plan
        self._patches = list(patches)

    @property
    def choices(self) -> Sequence[Choice]:
        return self.plan.choices

    def __getitem__(self, fqn: str) -> Choice:
        for choice in self.choices:
            if choice.fqn == fqn:
                return choice
        raise KeyError(fqn)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that are patched by this handle, by FQN."""
        return {fqn: module for patch in self._patches for fqn, module in patch.modules.items()}

    def restore(self) -> int:
        """Put back what this handle installed; return how many that were. Again, it does nothing."""
        return sum(patch.restore() for patch in reversed(self._patches))

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the originals for the length of a `with` statement; compiled code is kept."""
        with contextlib.ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch.disabled())
            yield

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return self.plan.to_dict()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `apply_plan`."""
        self.plan.save(path)

    def __len__(self) -> int:
        return sum(map(len, self._patches))

    def __enter__(self) -> Tuned:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield screen(self.plan.verdict, COLUMNS, self.choices, self.plan.notes, options.max_width)

    def _repr_html_(self) -> str:
        return page(self.plan.verdict, COLUMNS, self.choices, self.plan.notes)


def install(model: nn.Module, plan: Plan) -> Tuned:
    """Patch `model` as planned: all of it, or nothing when some part fails."""
    patches: list[Patch] = []
    try:
        for name, options in plan.candidates.items():
            fqns = {choice.fqn for choice in plan.choices if choice.candidate == name}
            if fqns:
                chosen = {id(model.get_submodule(fqn)) for fqn in fqns}
                patches.append(apply(model, where=_is_one_of(chosen), nested="all", **options))
    except BaseException:
        for patch in reversed(patches):
            patch.restore()
        raise
    return Tuned(plan, patches)


def _is_one_of(ids: set[int]) -> Callable[[nn.Module, str], bool]:
    return lambda module, fqn: id(module) in ids
