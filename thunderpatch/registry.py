"""Which modules are patched: records by module, weakly keyed; putting a proxy in place and taking it out.

Whether a patch is in force is asked of the module itself: its instance `forward` is looked at, by type and
never by attribute, since a foreign wrapper that delegates attributes would answer for the proxy inside it.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .compiler import Compiler
from .errors import ThunderPatchWarning
from .forward import PatchedForward
from .patchable import forward_of
from .record import Record
from .regions import is_method_of
from .tree import grow


class ModuleRef(weakref.ref[nn.Module]):
    """A weak reference that is the same as another while both are of one module, by identity.

    A class may define when its modules are equal, and whether they can be hashed. torch's own reference by
    identity asks the module for an attribute that it has not, which costs microseconds for an `nn.Module`.
    """

    __slots__ = ("_id",)
    _id: int

    def __new__(cls, module: nn.Module, callback: Callable[[Any], object] | None = None) -> ModuleRef:
        self = super().__new__(cls, module, callback)
        self._id = id(module)
        return self

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        module = self()
        if module is None:  # gone: its number may be that of another by now
            return self is other
        return isinstance(other, ModuleRef) and module is other()

    def __ne__(self, other: object) -> bool:  # else that of `weakref.ref`, which asks the modules
        return not self == other


# module -> its records, one for each set of options that it was ever patched with. They stay when the patch
# is taken off, and with them the compiled code.
_records: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ModuleRef)


def records_of(module: nn.Module) -> list[Record]:
    """Return the module's records, those of former patches included."""
    return list(_records.get(module, {}).values())


def active(module: nn.Module) -> Record | None:
    """Return the record of the patch that is on the module now, under a foreign wrapper or not."""
    if "forward" not in vars(module):  # somebody deleted it
        return None
    return _in_force(records_of(module))


def _in_force(records: list[Record]) -> Record | None:
    return next((record for record in records if record.installed and _alive(record)), None)


def _alive(record: Record) -> bool:
    # A proxy that was replaced rather than wrapped is referred to by nobody, and gone.
    return record.proxy is not None and record.proxy() is not None


def record_for(module: nn.Module, fqn: str, compiler: Compiler) -> Record:
    """Return the module's record under this compiler, the former one if there was one."""
    known = _records.setdefault(module, {})
    record: Record | None = known.get(compiler.options.key)
    if record is None:
        record = known[compiler.options.key] = Record(module, fqn, compiler)
    return record


def proxy_of(module: nn.Module) -> PatchedForward | None:
    """Return the proxy that is the module's instance forward, in force or inert; None for anything else."""
    found = vars(module).get("forward")
    return found if type(found) is PatchedForward else None


def displaced(module: nn.Module) -> bool:
    """Whether the module is patched and somebody has put another forward on top."""
    return active(module) is not None and proxy_of(module) is None


def build(module: nn.Module, fqn: str, compiler: Compiler) -> PatchedForward:
    """Return a proxy for the module's forward; the module is not touched."""
    record = record_for(module, fqn, compiler)
    stale = proxy_of(module)  # an inert one that somebody has put back: never wrap it
    local = stale._self_local if stale is not None else vars(module).get("forward")
    return PatchedForward(local if local is not None else class_forward(module), module, record, local)


def class_forward(module: nn.Module) -> Callable[..., Any]:
    """Return what `module.forward` is when nothing is set on the instance."""
    own = forward_of(type(module))
    # What is no descriptor (a callable object) is the same for class and instance.
    bind = getattr(type(own), "__get__", None)
    forward: Any = own if bind is None else bind(own, module, type(module))
    return forward  # type: ignore[no-any-return]


def install(module: nn.Module, proxy: PatchedForward) -> None:
    """Put the proxy in place."""
    record: Record = proxy._self_record
    record.proxy = weakref.ref(proxy)
    if record.group is not None and not record.group.runs(module, proxy.__wrapped__):
        record.start_over()
    record.installed, record.since = True, time.monotonic()
    vars(module)["forward"] = proxy


def uninstall(module: nn.Module) -> bool:
    """Put the module's own forward back; return whether there was anything of ours.

    A wrapper that somebody has put on top stays. What it wraps becomes inert: the same to its caller.
    """
    proxy, records = proxy_of(module), records_of(module)
    record = _in_force(records) if "forward" in vars(module) else None
    for known in records:
        if known.installed:
            known.installed = False
    if proxy is not None:
        if proxy._self_local is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = proxy._self_local
    elif record is not None:
        warnings.warn(
            f"{record.name} is restored below another wrapper of its forward "
            f"({type(vars(module)['forward']).__name__}), which stays and calls the original from now on",
            ThunderPatchWarning,
            stacklevel=4,
        )
    return record is not None or proxy is not None


def adopt(module: nn.Module, original: Callable[..., Any], proxy: PatchedForward, local: Any) -> PatchedForward:
    """Return a proxy for a copy of a patched module: patched in its own right, on the same compiled code."""
    source: Record = proxy._self_record
    record = record_for(module, source.fqn, source.compiler)
    record.installed, record.latched, record.since = source.installed, source.latched, source.since
    if is_method_of(module, original):  # anything else may know the source's weights
        record.group = source.group
        if () in source.lanes:
            record.lanes = {(): source.lanes[()]}
    copy = PatchedForward(original, module, record, local)
    record.proxy = weakref.ref(copy)
    return copy


def patched_below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `model` that carry anything of ours, by FQN."""
    seen: set[int] = set()  # by identity, since a class may define when its instances are equal
    for fqn, module, _ in grow(model).places:
        if id(module) in seen:
            continue
        seen.add(id(module))
        # A shallow copy has the proxy of the module that it was copied from, and no record.
        if proxy_of(module) is not None or active(module) is not None:
            yield fqn, module
