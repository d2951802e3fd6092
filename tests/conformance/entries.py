"""What is run: one entry per module class or op, dtype and variant, with a handful of cases each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

# What an op's sample generator may hand out before we stop listening; some have thousands.
LISTEN = 60
# Larger samples say nothing about rightness that smaller ones do not.
MAX_ELEMENTS = 20_000
UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


@dataclass
class Case:
    """One call: a module, its arguments, and whether the input is handed over as a non-leaf."""

    label: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    non_leaf: bool = False
    grad: bool = True


@dataclass(frozen=True)
class Entry:
    """One line of the databases: ``kind`` is module, op or inplace; ``make(n)`` yields up to n cases."""

    kind: str
    name: str
    dtype: torch.dtype
    make: Callable[[int], Iterator[Case]] = field(compare=False, repr=False)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.name}-{str(self.dtype).removeprefix('torch.')}"


class OpModule(nn.Module):
    """An op as a module of its own."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


class MethodModule(nn.Module):
    """A tensor method as a module of its own; Dynamo does not capture method descriptors that are held."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def forward(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, self.method)(*args, **kwargs)


def fresh_module(op: Callable[..., Any]) -> nn.Module:
    name = getattr(op, "__name__", "")
    base, held = (MethodModule, name) if getattr(Tensor, name, None) is op else (OpModule, op)
    # A class of its own for each case, so that no case finds another's compiled code.
    return type(base.__name__, (base,), {})(held)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def spread(items: list[Any], count: int) -> list[Any]:
    """Pick ``count`` of ``items``, evenly, the first always among them."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def special_values(tensor: Tensor) -> Tensor:
    """A copy with zeros, NaN and infinities strewn in; what is not floating point stays as it is."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    values = [0.0, float("nan"), float("inf"), -float("inf"), -0.0]
    flat = changed.view(-1)
    for position, value in zip(range(0, flat.numel(), max(1, flat.numel() // 5)), itertools.cycle(values)):
        flat[position] = value
    return changed.requires_grad_(tensor.requires_grad)


def zeroed(tensor: Tensor) -> Tensor:
    """A copy whose every third element is zero, where kinks and divisions hide."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[::3] = 0
    return changed.requires_grad_(tensor.requires_grad)


def emptied(tensor: Tensor) -> Tensor:
    """The same tensor with nothing along its first dimension."""
    return tensor.detach()[:0].requires_grad_(tensor.requires_grad) if tensor.dim() else tensor


def _op_samples(op: Any, dtype: torch.dtype, wanted: int) -> Iterator[tuple[str, Any, Any, Any]]:
    torch.manual_seed(0)
    listened = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), LISTEN)
    samples = []
    with contextlib.suppress(StopIteration):
        for sample in listened:
            if sum(t.numel() for t in tensors((sample.input, sample.args, sample.kwargs))) <= MAX_ELEMENTS:
                samples.append(sample)
    for index, sample in enumerate(spread(samples, wanted)):
        yield f"sample {index}", sample.input, sample.args, sample.kwargs
    for label, change in (("special", special_values), ("zeros", zeroed), ("empty", emptied)):
        for sample in samples[:1]:
            yield label, *pytree.tree_map_only(Tensor, change, (sample.input, sample.args, sample.kwargs))
    for sample in samples[-1:]:
        with contextlib.suppress(Exception):
            other = sample.noncontiguous()
            yield "noncontiguous", other.input, other.args, other.kwargs


def op_cases(op: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    for label, first, args, kwargs in _op_samples(op, dtype, count):
        yield Case(label, fresh_module(op.op), (first, *args), dict(kwargs))
        if label == "sample 0" and op.method_variant is not None and isinstance(first, Tensor):
            yield Case("method", fresh_module(op.method_variant), (first, *args), dict(kwargs))


def inplace_cases(op: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    for label, first, args, kwargs in _op_samples(op, dtype, count):
        if isinstance(first, Tensor):
            module = fresh_module(op.inplace_variant)
            yield Case(label, module, (first, *args), dict(kwargs), non_leaf=True)
            yield Case(label + " no grad", module, (first, *args), dict(kwargs), non_leaf=True, grad=False)


def module_cases(info: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for index, given in enumerate(spread(list(inputs), count)):
            made = given.constructor_input
            torch.manual_seed(1)
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            forward = given.forward_input
            if forward is None:
                continue
            label = f"{'train' if training else 'eval'} {index}"
            yield Case(label, module, tuple(forward.args), dict(forward.kwargs))
            if getattr(module, "inplace", None) is False:
                inplace = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
                inplace.inplace = True
                yield Case(label + " inplace", inplace, tuple(forward.args), dict(forward.kwargs), True)


def _entry(kind: str, source: Any, name: str, dtype: torch.dtype, make: Any) -> Entry:
    return Entry(kind, name, dtype, lambda count: make(source, dtype, count))


def all_entries() -> list[Entry]:
    """List every entry: modules, ops and in-place variants, in each dtype that they support."""
    entries = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        if not dtype.is_complex and dtype != torch.bfloat16:
            for info in module_db:
                entries.append(_entry("module", info, info.name, dtype, module_cases))
        for op in op_db:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
            entries.append(_entry("op", op, name, dtype, op_cases))
            if op.inplace_variant is not None:
                entries.append(_entry("inplace", op, name, dtype, inplace_cases))
    return entries
