"""find_culprits: which patched modules make a check of the whole model fail, alone or together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from . import registry
from .errors import ArgumentError
from .patching import apply
from .progress import progress
from .selection import Nested, select


def find_culprits(
    model: nn.Module,
    check: Callable[[], Any],
    *,
    types: Any = None,
    names: Any = None,
    where: Callable[[nn.Module, str], bool] | None = None,
    exclude: Any = None,
    repeated: bool = False,
    nested: Nested = "outermost",
    thunderfx_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Find a smallest set of modules whose patching makes `check()` fail, and return their FQNs.

    `check` takes nothing and tests `model`: a true value is good, a false one or an exception is bad. It must
    answer alike when asked again, so it should set its own seed and leave the model's state as it found it.

    The selectors are those of `select`, `thunderfx_options` the options of `apply`, as a dict. The modules
    are patched and restored again and again; their code is kept, so that nothing compiles twice. Of n
    modules, k that fail together take about k * log2(n) + k checks, by bisection; without any one of those
    returned, the others pass.

    Returns an empty list when the check passes with everything patched. Raises `ArgumentError` when it fails
    with everything switched off, since then no patch is to blame; and what `select` and `apply` raise. The
    model is afterwards patched as it was before.

    >>> import torch, thunderpatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> thunderpatch.find_culprits(model, lambda: model(torch.ones(2, 4)).min() >= 0, types=torch.nn.ReLU)
    []
    """
    modules = select(model, types=types, names=names, where=where, exclude=exclude, repeated=repeated, nested=nested)
    new = {id(module) for module in modules.values() if registry.active(module) is None}
    with contextlib.ExitStack() as stack:
        if new:
            options = thunderfx_options or {}
            stack.enter_context(apply(model, where=lambda m, fqn: id(m) in new, nested="all", **options))
        patched = {fqn: m for fqn, m in modules.items() if registry.active(m) is not None}
        expected = 4 + math.ceil(math.log2(max(2, len(patched))))
        advance = stack.enter_context(progress("looking for culprits", expected))
        trial = _Trial(patched, check, advance)
        return _search(trial, list(patched))


def _search(trial: _Trial, names: list[str]) -> list[str]:
    if trial.passes(()):
        if trial.passes(names):
            return []
    else:
        raise ArgumentError(
            f"the check fails with all {len(names)} selected modules switched off ({trial.reason}): "
            "no patch is to blame. Make it pass on the model as it is first."
        )
    found: list[str] = []
    suspects = names
    while trial.passes(found):
        # The first `low` suspects pass together with what is found, the first `high` fail: close in on the
        # border.
        low, high = 0, len(suspects)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if trial.passes([*found, *suspects[:middle]]) else (low, middle)
        found.append(suspects[high - 1])
        suspects = suspects[: high - 1]
    for name in list(found) if len(found) > 1 else ():
        rest = [other for other in found if other != name]
        if not trial.passes(rest):
            found = rest
    return [name for name in names if name in found]


class _Trial:
    """Runs the check with some of the modules patched; what was asked before is remembered."""

    def __init__(
        self, modules: Mapping[str, nn.Module], check: Callable[[], Any], advance: Callable[[str], None]
    ) -> None:
        self._modules, self._check, self._advance = modules, check, advance
        self._known: dict[frozenset[str], bool] = {}
        self.reason = ""  # of the last failure

    def passes(self, names: Sequence[str]) -> bool:
        chosen = frozenset(names)
        if chosen not in self._known:
            with self._only(chosen):
                self._known[chosen] = self._ask()
            verdict = "good" if self._known[chosen] else "bad"
            self._advance(f"{len(chosen)} of {len(self._modules)} patched: {verdict}")
        return self._known[chosen]

    def _ask(self) -> bool:
        try:
            good = bool(self._check())
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            return False
        self.reason = "" if good else "it returned a false value"
        return good

    @contextlib.contextmanager
    def _only(self, chosen: frozenset[str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, module in self._modules.items():
                if name not in chosen:
                    stack.enter_context(_off(module))
            yield


@contextlib.contextmanager
def _off(module: nn.Module) -> Iterator[None]:
    """Take the patch off a module for a while; below somebody's wrapper, where it cannot come off, switch it off."""
    record, proxy = registry.active(module), registry.proxy_of(module)
    assert record is not None
    if proxy is None:
        record.disabled += 1
    else:
        registry.uninstall(module)
    try:
        yield
    finally:
        if proxy is None:
            record.disabled -= 1
        else:
            registry.install(module, proxy)
