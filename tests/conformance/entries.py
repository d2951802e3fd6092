"""What is run: one entry per module class or op, dtype and variant, with a handful of cases each."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.bool, torch.uint8, torch.float16),
)
UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")

# Eager's own gradient at NaN depends on whether the element falls into a vector or into the rest of the loop.
NO_NAN = ("hardtanh", "relu6", "hardshrink", "softshrink", "hardsigmoid", "hardswish", "elu", "celu", "selu")
# What NaN and infinity become in a convolution depends on how the algorithm pads;
# in the mean of a batch, how the variance beside it is computed.
NO_SPECIAL = ("conv", "batch_norm", "instance_norm")
# Eager itself reads where it must not, or falls over NaN, given the lengths and values that are made up here.
ONLY_SAMPLES = ("_segment_reduce", "pdist", "eigvals")


@dataclass
class Call:
    """The arguments of one call, and what they are called in a finding."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Case:
    """A module and the calls that one run of it makes; ``non_leaf`` gives first arguments a history."""

    label: str
    module: nn.Module
    calls: list[Call]
    non_leaf: bool = False
    grad: bool = True

    def only(self, *calls: Call) -> Case:
        """The same case with some of its calls."""
        return replace(self, calls=list(calls))


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
    """An op as a module of its own, which calls it once for each of a list of arguments.

    Compiling is what costs: a graph with all samples of an op takes hardly longer than with one.
    """

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.op = op

    def forward(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [self.op(*args, **kwargs) for args, kwargs in calls]


class MethodModule(nn.Module):
    """A tensor method as a module of its own; Dynamo does not capture method descriptors that are held."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.method = op.__name__

    def forward(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [getattr(args[0], self.method)(*args[1:], **kwargs) for args, kwargs in calls]


class InnerModule(MethodModule):
    """A tensor method in place on a value that the module has made itself."""

    def forward(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [getattr(args[0] * 1, self.method)(*args[1:], **kwargs) for args, kwargs in calls]


class BesideModule(OpModule):
    """An op of what needs no gradient, in a graph where something else does."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__(op)
        self.weight = nn.Parameter(torch.tensor([1.5]))

    def forward(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        results = pytree.tree_leaves(super().forward(calls))
        return [*results, *(r * self.weight for r in results if isinstance(r, Tensor) and r.is_floating_point())]


def is_method(op: Callable[..., Any]) -> bool:
    return getattr(Tensor, getattr(op, "__name__", ""), None) is op


def fresh_module(op: Callable[..., Any], base: type[nn.Module] = OpModule) -> nn.Module:
    # A class of its own for each case, so that no case finds another's compiled code.
    return type(base.__name__, (base,), {})(op)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def spread(items: list[Any], count: int) -> list[Any]:
    """Pick ``count`` of ``items``, evenly, the first always among them."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def _changeable(tensor: Tensor) -> bool:
    """Whether other values may be put in; indices stay as they are, and what is sparse has no place for them."""
    dense = tensor.layout is torch.strided and tensor.numel() > 0
    return dense and (tensor.is_floating_point() or tensor.is_complex())


def special_values(tensor: Tensor, nan: float = float("nan")) -> Tensor:
    """A copy with zeros, NaN, infinities and large numbers strewn in."""
    if not _changeable(tensor):
        return tensor
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    values = [0.0, nan, float("inf"), -float("inf"), -0.0, 200.0, -200.0]
    flat = changed.view(-1)
    for position, value in zip(range(0, flat.numel(), max(1, flat.numel() // 7)), itertools.cycle(values)):
        flat[position] = value
    return changed.requires_grad_(tensor.requires_grad)


def zeroed(tensor: Tensor) -> Tensor:
    """A copy whose every third element is zero, where kinks and divisions hide."""
    if not _changeable(tensor):
        return tensor
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[::3] = 0
    return changed.requires_grad_(tensor.requires_grad)


def levelled(tensor: Tensor) -> Tensor:
    """A copy of nothing but zeros: vectors without a length, and equal elements of which one is to be chosen."""
    if not _changeable(tensor):
        return tensor
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def emptied(tensor: Tensor) -> Tensor:
    """The same tensor with nothing along its first dimension."""
    sliced = tensor.dim() and tensor.layout is torch.strided
    return tensor.detach()[:0].requires_grad_(tensor.requires_grad) if sliced else tensor


def _op_samples(
    op: Any, dtype: torch.dtype, wanted: int, *, inplace: bool = False
) -> Iterator[tuple[str, Any, Any, Any]]:
    torch.manual_seed(0)
    needs_grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    listened = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=needs_grad), LISTEN)
    samples = []
    with contextlib.suppress(StopIteration):
        for sample in listened:
            if inplace and sample.broadcasts_input:
                continue  # the result has no room in the input
            if sum(t.numel() for t in tensors((sample.input, sample.args, sample.kwargs))) <= MAX_ELEMENTS:
                samples.append(sample)
    for index, sample in enumerate(spread(samples, wanted)):
        yield f"sample {index}", sample.input, sample.args, sample.kwargs
    name = op.name.rpartition(".")[2]
    special = functools.partial(special_values, nan=0.0) if name in NO_NAN else special_values
    for label, change in (("special", special), ("zeros", zeroed), ("level", levelled), ("empty", emptied)):
        left_out = name in ONLY_SAMPLES or (label == "special" and any(part in name for part in NO_SPECIAL))
        for sample in samples[: 0 if left_out else 1]:
            yield label, *pytree.tree_map_only(Tensor, change, (sample.input, sample.args, sample.kwargs))
    for sample in samples[-1:]:
        with contextlib.suppress(Exception):
            other = sample.noncontiguous()
            yield "noncontiguous", other.input, other.args, other.kwargs


def op_cases(op: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    calls = [Call(label, (first, *args), dict(kwargs)) for label, first, args, kwargs in _op_samples(op, dtype, count)]
    yield Case("function", fresh_module(op.op), calls)
    yield Case("function, no grad", fresh_module(op.op), calls, grad=False)
    apart = [Call(c.label, *pytree.tree_map_only(Tensor, Tensor.detach, (c.args, c.kwargs))) for c in calls]
    yield Case("beside a gradient", fresh_module(op.op, BesideModule), apart)
    if op.method_variant is not None and is_method(op.method_variant):
        own = [call for call in calls if isinstance(call.args[0], Tensor)]
        yield Case("method", fresh_module(op.method_variant, MethodModule), own[:1])


def inplace_cases(op: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    samples = [s for s in _op_samples(op, dtype, count, inplace=True) if isinstance(s[1], Tensor)]
    calls = [Call(label, (first, *args), dict(kwargs)) for label, first, args, kwargs in samples]
    method = is_method(op.inplace_variant)
    module = fresh_module(op.inplace_variant, MethodModule if method else OpModule)
    yield Case("in place", module, calls, non_leaf=True)
    yield Case("in place, no grad", module, calls, non_leaf=True, grad=False)
    if method:
        yield Case("in place inside", fresh_module(op.inplace_variant, InnerModule), calls)


def module_cases(info: Any, dtype: torch.dtype, count: int) -> Iterator[Case]:
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for index, given in enumerate(spread([i for i in inputs if i.forward_input is not None], count)):
            made, forward = given.constructor_input, given.forward_input
            torch.manual_seed(1)
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            call = Call(str(index), tuple(forward.args), dict(forward.kwargs))
            label = "train" if training else "eval"
            yield Case(label, module, [call])
            yield Case(label + ", no grad", module, [call], grad=False)
            if getattr(module, "inplace", None) is False:
                inplace = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
                inplace.inplace = True
                yield Case(label + ", in place", inplace, [call], non_leaf=True)


def _entry(kind: str, source: Any, name: str, dtype: torch.dtype, make: Any) -> Entry:
    return Entry(kind, name, dtype, lambda count: make(source, dtype, count))


def all_entries() -> list[Entry]:
    """List every entry: modules, ops and in-place variants, in each dtype that they support."""
    entries = []
    for dtype in DTYPES:
        if dtype in (torch.float32, torch.float64):
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
