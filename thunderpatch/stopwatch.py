"""How ways of running a module are timed against each other: in turn, in short blocks, until settled."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer

from .calls import Call, Inputs
from .copying import tensors_in
from .registry import proxy_of

_BLOCK = 5e-3  # seconds: long against the clock's resolution, short against whatever slows a machine down
_LEAST_ROUNDS, _MOST_TIMES = 9, 6
_SETTLED = 0.01
_BYTES_OF_INPUTS = 2**26


class Repeated:
    """A module's call, ready to be made again and again; with `backward`, its backward as well.

    To be made while the module is unpatched: one call tells whether it leaves its arguments as they are.
    Where it does not (it works in place, it fills a cache), each call gets a fresh copy, which is not timed.
    The backward starts from all that is differentiable in the result, or, where scalars are among it, from
    those: they are losses.
    """

    def __init__(self, module: nn.Module, call: Call, backward: bool) -> None:
        self._module, self._call, self._backward = module, call, backward
        self._starts: list[Tensor] | None = None
        self._number = 1
        self._inputs, self._reuses = call.fresh(), False
        before = _versions(self._inputs)
        with call.modes():
            self._step(self._inputs)
            self._reuses = _versions(self._inputs) == before
        self._timer = Timer(
            "step(next(inputs))",
            setup="inputs = iter(prepare())",
            globals={"step": self._step, "prepare": self._prepare},
            num_threads=torch.get_num_threads(),
        )

    def _step(self, inputs: Inputs) -> None:
        result = self._module(*inputs.args, **inputs.kwargs)
        if self._backward:
            roots = _roots(result)
            if self._starts is None:
                self._starts = [torch.ones_like(root) for root in roots]
            if roots:
                torch.autograd.backward(roots, self._starts)

    def _prepare(self) -> Iterable[Inputs]:
        if self._reuses:
            return itertools.repeat(self._inputs)
        return [self._call.fresh() for _ in range(max(self._number, 2))]

    def once(self) -> float:
        """Make one call on fresh arguments and return its seconds."""
        inputs = self._call.fresh()
        clock = torch.utils.benchmark.timer  # waits for a GPU
        with self._call.modes():
            began = clock()
            self._step(inputs)
            return clock() - began

    def seconds(self) -> float:
        """Return the seconds of one call, the mean of a short block of them."""
        with self._call.modes():
            return self._timer.timeit(self._number).mean

    def calibrate(self, seconds: float) -> None:
        """Choose how many calls make a block, from the seconds that one takes."""
        self._number = max(1, int(_BLOCK / max(seconds, 1e-7)))
        if not self._reuses:
            size = sum(tensor.nbytes for tensor in self._inputs.given) or 1
            self._number = min(self._number, max(1, _BYTES_OF_INPUTS // size))

    def peak_memory(self) -> int | None:
        """Return the bytes on the GPU that a call takes beyond what is there before; None without a GPU."""
        if not torch.cuda.is_initialized():
            return None
        inputs = self._call.fresh()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with self._call.modes():
            self._step(inputs)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def in_turn(sides: Sequence[Callable[[], float]], min_run_time: float) -> list[list[float]]:
    """Measure the sides in turn, and return the samples of each; the k-th samples were taken side by side.

    Every side gets `min_run_time` seconds at least, and more, up to six times that, until the median of each
    ratio to the first side is certain to one per cent.
    """
    samples: list[list[float]] = [[] for _ in sides]
    clock = torch.utils.benchmark.timer
    began = clock()
    for number in itertools.count(1):
        order = list(zip(sides, samples, strict=True))
        for side, taken in order if number % 2 else reversed(order):
            taken.append(side())
        spent = (clock() - began) / len(sides)
        settled = all(noise(ratios(samples[0], other)) < _SETTLED for other in samples[1:])
        if number >= _LEAST_ROUNDS and spent > min_run_time * (1 if settled else _MOST_TIMES):
            break
    return samples


def ratios(first: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return by how much the other side was slower, round by round."""
    return [b / a for a, b in zip(first, other, strict=True)]


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def noise(samples: Sequence[float]) -> float:
    """Return how uncertain the median is: half a notch of a box plot (McGill, Tukey and Larsen, 1978)."""
    low, _, high = quartiles(samples)
    return 1.57 * (high - low) / math.sqrt(len(samples))


@contextlib.contextmanager
def unpatched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take the proxies off for the length of a `with` statement, so that nothing of ours is in the way."""
    proxies = [(module, proxy) for module in modules if (proxy := proxy_of(module)) is not None]
    for module, proxy in proxies:
        if proxy._self_local is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = proxy._self_local
    try:
        yield
    finally:
        for module, proxy in proxies:
            vars(module)["forward"] = proxy


def _roots(result: Any) -> list[Tensor]:
    leaves = [result] if isinstance(result, Tensor) else tree_leaves(result)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [root for root in found if root.dim() == 0] or found


def _versions(inputs: Inputs) -> list[tuple[int, int]]:
    """What tells whether arguments were changed: the tensors in them, and how often each was written to."""
    tensors = tensors_in((inputs.args, inputs.kwargs))
    return [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
