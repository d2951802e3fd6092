"""Small programs for the tests: how they are made, and what a run of one shows."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

# What is written of two values, `a` and `b`, and of the module that the program is the forward of.
NEW = """
a.sin() | a.tanh() | a.relu() | torch.sigmoid(a) | a * 2 | a + 1 | -a | a.abs() | a.square() | a.exp().clamp(max=3)
a.clone() | a.contiguous() | a.detach() | a.float() | a.to(torch.float32) | a.type_as(a) | a.double().float()
torch.special.i1(a) | torch.special.erfcx(a) | a.cumsum(0) | a.flip(0) | a.softmax(-1) | a.sort(0).values | a.roll(1, 0)
nn.functional.layer_norm(a, a.shape[-1:]) | nn.functional.gelu(a) | nn.functional.silu(a) | a.masked_fill(a > 0.3, 0.5)
a.sum(0, keepdim=True).expand_as(a) | a.mean() | a.clamp(-1, 1) | torch.where(a > 0, a, a * 0.1)
a + b | a * b | a - b * 0.5 | torch.maximum(a, b) | torch.add(a, b, alpha=2) | torch.stack([a, b]).sum(0) | a @ b
torch.cat([a.flatten(), b.flatten()]) | a / (b.square() + 1) | torch.where(a > 0, a, b) | torch.lerp(a, b, 0.3)
torch.zeros_like(a) | torch.ones_like(a) | a.new_zeros(a.shape) | torch.zeros(a.shape) | torch.full_like(a, 0.5)
self.norm(a) | self.linear(a) | self.perceptron(a) | a @ b.t() | a > b | (a > 0).float() | a.half().float() | a.long()
a[[0, 2]] | a.topk(2).values | a.max(0).values | a.std(0)
torch.utils.checkpoint.checkpoint(torch.sin, a, use_reentrant=False) | a[a.argmax(0)]
a.index_add(0, torch.tensor([0, 1, 2, 3]), b) | nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])
torch.div(a.shape[0], 2) * a | a.unflatten(0, (2, -1)) | a.repeat(2, 1) | a.tril() | nn.functional.mse_loss(a, b)
a + self.buffer | a * self.count | a * self.weight | a + self.weight.sum() | self.weight.view(-1) | self.weight * 1
"""
VIEWS = """
a.chunk(2, -1)[0] | a.chunk(2, -1)[1] | a.t() | a[1:] | a[:, :2] | a[0:2] | a[::2] | a[..., None] | a.transpose(0, 1)
a.reshape(-1) | a.view(-1) | a.view(a.shape) | a.view_as(a) | a.flatten() | a.unsqueeze(0) | a.squeeze() | a.diagonal()
a.narrow(0, 0, 2) | a.select(0, 0) | a.split(2)[0] | a.unbind(0)[1] | a.expand(2, *a.shape) | a.unfold(0, 2, 1)
"""
CHANGES = """
a.add_(1) | a.mul_(2) | a += 1 | a *= 0.5 | a.zero_() | a.fill_(0.3) | a.relu_() | a.sin_() | a.tanh_() | a.exp_()
a.sigmoid_() | a.abs_() | a.clamp_(max=0.4) | a.cumsum_(0) | a.masked_fill_(a > 0.2, 0.1) | nn.functional.relu(a, True)
a.copy_(b) | a.add_(b) | a.mul_(b) | a.sub_(b, alpha=2) | a.addcmul_(b, b) | a[0] = 0.5 | a[1:] += 1 | a[0] = b[0]
a.index_fill_(0, torch.tensor([0]), 0.7) | self.buffer.add_(1) | self.buffer.mul_(0.5) | self.count += 1
self.buffer.copy_(a.detach().mean()) | self.buffer = self.buffer * 0.9 | self.count = self.count + 1
a[:, 0] = b[:, 1] | a[a > 0] = 0.1 | a.index_add_(0, torch.tensor([1]), b[:1]) | a.t().add_(1) | a.detach().mul_(2)
torch.add(a, b, out=a) | a.view(-1)[0] = 1.0 | a /= 2 | a **= 2 | a.tril_() | self.act(a)
"""
Lines = tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A forward of `x` and `y`, which of the two have a gradient, and whether gradients are recorded."""

    lines: Lines
    results: tuple[str, ...]
    graded: str = "xy"
    recorded: bool = True

    @property
    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def forward(self, x, y):\n{body}    return {', '.join(self.results)},\n"

    def module(self) -> nn.Module:
        """Return a module with the program as its class's forward."""
        name, found = f"<program {hash(self)}>", dict[str, Any]()
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        exec(compile(self.source, name, "exec"), {"nn": nn, "torch": torch}, found)
        return type("Module", (_Module,), found)()  # type: ignore[no-any-return]


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        self.perceptron = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("buffer", torch.tensor(0.3))
        self.register_buffer("count", torch.tensor(0))


def _choices(text: str) -> list[str]:
    return [choice.strip() for line in text.strip().splitlines() for choice in line.split(" | ")]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of up to 9 lines."""
    new, views, changes = map(_choices, (NEW, VIEWS, CHANGES))
    names, lines = ["x", "y"], []
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["new", "new", "view", "change", "change", "without gradients"]))
        text = draw(st.sampled_from({"new": new, "view": views}.get(kind, changes)))
        for letter in "ab":
            name = draw(st.sampled_from(names[::-1]))
            text = re.sub(rf"\b{letter}\b", name, text)
        if kind in ("new", "view"):
            names.append(f"v{len(names)}")
            text = f"{names[-1]} = {text}"
        lines.append(f"with torch.no_grad(): {text}" if kind == "without gradients" else text)
    results = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    graded = draw(st.sampled_from(["xy", "x", ""]))
    return Program(tuple(lines), tuple(results), graded, draw(st.booleans()) or bool(graded))


def shown(module: nn.Module, program: Program) -> list[Any]:
    """Return what two calls show: results, whether they have a gradient, gradients, inputs and buffers afterwards."""
    found: list[Any] = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(4, 4, generator=generator).requires_grad_(name in program.graded) for name in "xy"]
        given = [leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves]
        module.zero_grad()
        with torch.set_grad_enabled(program.recorded):
            results = module(*given)
        after = [value for value in (*results, *given) if value.requires_grad]
        if after:
            sum((value.square() * (i + 1)).sum() for i, value in enumerate(after)).backward()  # type: ignore[union-attr]
        found += [[value.requires_grad for value in results], [value.detach().clone() for value in (*results, *given)]]
        found += [[leaf.grad for leaf in (*leaves, *module.parameters())], [b.clone() for b in module.buffers()]]
    return found


def finite(found: list[Any]) -> bool:
    """Whether all numbers of a run are finite and of a size at which rounding does not decide."""
    numbers = [value for values in found for value in values if isinstance(value, Tensor)]
    return all(value.isfinite().all() and (value.abs() < 1e6).all() for value in numbers)
