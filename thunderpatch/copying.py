"""Copies of what a module is called with: tensors cloned, structures rebuilt, everything else shared."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Shared by a copy and what it was made of: code, modules, and what belongs to a model.
_SHARED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    nn.Module,
    nn.Parameter,
    torch.Generator,
)
_VALUES = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset)


class Storages:
    """Clones tensors so that those which share memory share it afterwards, with the strides they had.

    With `cast`, floating-point numbers come out in that dtype and complex ones in complex128.
    """

    def __init__(self, cast: torch.dtype | None = None) -> None:
        self._cast = cast
        self._known: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = {}

    def clone(self, tensor: Tensor) -> Tensor:
        """Return a detached copy that requires no gradient."""
        given = tensor.detach()
        dtype = self._dtype(given)
        plain = type(tensor) in (Tensor, nn.Parameter) and given.layout is torch.strided
        if not plain or given.is_quantized or given.is_meta or given.is_conj() or given.is_neg():
            return given.to(dtype, copy=True)
        storage = given.untyped_storage()
        key = (storage._cdata, dtype if dtype != given.dtype else torch.uint8)
        if key not in self._known:
            self._known[key] = (storage, self._flat(given, dtype))
        flat = self._known[key][1]
        whole = torch.empty(0, dtype=dtype, device=given.device)
        return whole.set_(flat.untyped_storage(), given.storage_offset(), given.size(), given.stride())

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        if self._cast is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.dtype
        return torch.complex128 if tensor.is_complex() else self._cast

    @staticmethod
    def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of all that the tensor's storage holds."""
        storage = tensor.untyped_storage()
        same = dtype == tensor.dtype
        flat = torch.empty(0, dtype=torch.uint8 if same else tensor.dtype, device=tensor.device)
        # A storage need not end where an element does.
        count = storage.nbytes() // flat.element_size()
        flat.set_(storage, 0, (count,), (1,))
        return flat.to(torch.uint8 if same else dtype, copy=True)


def rebuild(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `tensor(t)` for each tensor in it, one for all places where the same one stands.

    Containers and objects of any class are made anew, down to their attributes. Modules, parameters and code
    are shared, and what cannot be copied. `copy.deepcopy` would refuse tensors that have a history.
    """
    kept: list[Any] = []
    places: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if type(obj) in _VALUES:
                return None
            known = places.get(id(obj))
            if known is not None:
                return known
            if isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter):
                result = tensor(obj)
            elif isinstance(obj, _SHARED) or not _can_be_copied(obj):
                result = obj
            else:
                return None
            places[id(obj)] = len(kept)
            kept.append((obj, result))  # holding on to `obj`: its id must not be given to another
            return places[id(obj)]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Any:
            return kept[pid][1]

    buffer = io.BytesIO()
    Pickler(buffer, protocol=4).dump(value)
    buffer.seek(0)
    return Unpickler(buffer).load()


def _can_be_copied(value: Any) -> bool:
    try:
        return not isinstance(value.__reduce_ex__(4), str)  # a string names something global: shared
    except Exception:
        return False


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a structure, each once, in the order in which `rebuild` meets them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> None:
        found.append(tensor)

    rebuild(value, note)
    return found


def move(tensor: Tensor, by: float) -> None:
    """Multiply each floating-point number of `tensor`, in place, with one drawn from 1 - by to 1 + by."""
    if tensor.is_floating_point():
        with torch.no_grad():
            tensor.mul_(1 + by * (2 * torch.rand_like(tensor) - 1))


def in_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 or complex128 if it has floating-point numbers, else as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
