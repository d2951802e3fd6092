"""What the suite measures: models with the inputs to call them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model, what it is called with, and the blocks that the regional peers compile.

    `leaves` takes from a result the tensor that backward starts from and that peers are compared by.
    """

    model: nn.Module
    args: tuple[Any, ...]
    blocks: Sequence[nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: Callable[[Any], Tensor] = lambda result: result
    whole: bool = False  # the model itself is the region, as with a single layer


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.act, self.down = nn.GELU(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(device: str, depth: int = 32) -> Workload:
    """Equal blocks: of width 64 and 4 rows, where overhead is all, on a CPU; of real sizes on a GPU."""
    width, rows, dtype = (4096, 2048, torch.bfloat16) if device == "cuda" else (64, 4, torch.float32)
    model = Stack(depth, width).to(device, dtype)
    return Workload(model, (torch.randn(rows, width, device=device, dtype=dtype),), list(model.blocks))


def small_stack(device: str, depth: int = 32) -> Workload:
    """The same of width 64 on any device: what a call costs beside the computation."""
    model = Stack(depth, 64).to(device)
    return Workload(model, (torch.randn(4, 64, device=device),), list(model.blocks))


def relu(device: str) -> Workload:
    model = nn.ReLU()
    return Workload(model, (torch.randn(64, device=device, requires_grad=True),), [model], whole=True)


def llama(device: str, depth: int = 12, cached: bool = True) -> Workload:
    """A Llama of transformers, from a config, with a KV cache that starts empty."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    real = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    sizes = real if device == "cuda" else small
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=256))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    ids = torch.randint(256, (1, 512 if device == "cuda" else 16), device=device)
    return Workload(
        model, (), list(model.model.layers), {"input_ids": ids, "use_cache": cached}, lambda out: out.logits
    )


class Mixed(nn.Module):
    """Convolutions, tiny norms and wide MLPs: not everything here is worth compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x).relu()
        for norm in self.norms:
            x = norm(x)
        x = x.reshape(-1, 256)
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def mixed(device: str) -> Workload:
    model = Mixed().to(device)
    blocks = [*model.convs, *model.norms, *model.mlps]
    return Workload(model, (torch.randn(32, 8, 16, 16, device=device),), blocks)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "stack": stack,
    "small_stack": small_stack,
    "relu": relu,
    "llama": llama,
    "mixed": mixed,
}
