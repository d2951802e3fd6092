"""The handle on what one `apply` did: how much of it is in force, taken off or switched off."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from . import registry
from .errors import ArgumentError
from .options import Options
from .record import Record

if TYPE_CHECKING:
    from .reports import Report


class Patch:
    """A handle on what one `apply` installed, and on nothing else.

    `len(patch)` is the number of modules that it owns and that are still patched by it. Used in a `with`
    statement, it restores them at the end.
    """

    def __init__(self, model: nn.Module, installed: dict[str, nn.Module], options: Options) -> None:
        self._model = weakref.ref(model)
        self._owned = {fqn: weakref.ref(module) for fqn, module in installed.items()}
        self._proxies = {fqn: weakref.ref(vars(module)["forward"]) for fqn, module in installed.items()}
        self._options = options

    @property
    def modules(self) -> weakref.WeakValueDictionary[str, nn.Module]:
        """The modules that this handle owns, by FQN; weak, so that the handle keeps no model alive."""
        return weakref.WeakValueDictionary((fqn, module) for fqn, module in self._alive())

    def _alive(self) -> Iterator[tuple[str, nn.Module]]:
        for fqn, ref in self._owned.items():
            module, proxy = ref(), self._proxies[fqn]()
            if module is not None and proxy is not None:
                record = proxy._self_record
                # Installed again by a later handle, the record points to another proxy.
                if record.installed and record.proxy is not None and record.proxy() is proxy:
                    yield fqn, module

    def restore(self) -> int:
        """Put back what this handle installed; return how many that were. Again, it does nothing."""
        alive = list(self._alive())
        return sum(registry.uninstall(module) for _, module in reversed(alive))

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the originals for the length of a `with` statement; compiled code is kept."""
        with all_disabled([module for _, module in self._alive()]):
            yield

    def report(self) -> Report:
        """Return what ran where so far, for the model that was patched."""
        from .observe import report

        model = self._model()
        if model is None:
            raise ArgumentError("the model of this patch is gone; there is nothing to report")
        return report(model)

    def __len__(self) -> int:
        return sum(1 for _ in self._alive())

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        alive = list(self._alive())
        off = sum(1 for _, module in alive if (r := registry.active(module)) is not None and r.disabled)
        state = f"{len(alive)} active" if not off else f"{len(alive) - off} active, {off} disabled"
        return f"<Patch of {len(self._owned)} modules, {state}; {self._options}>"


@contextlib.contextmanager
def all_disabled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run the originals of these modules for the length of a `with` statement."""
    records: list[Record] = [record for m in modules if (record := registry.active(m)) is not None]
    for record in records:
        record.disabled += 1
    try:
        yield
    finally:
        for record in records:
            record.disabled -= 1
