"""A small residual block, a network of three, and the proof that all of their calls ran compiled."""

from __future__ import annotations

import torch
from torch import nn

import thunderpatch

WIDTH = 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(3)), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ran(model: nn.Module, calls: int) -> None:
    """Check that each patched module was called so often, each time compiled."""
    rows = thunderpatch.report(model).rows
    assert {(row.fqn, row.calls, row.compiled_calls) for row in rows} == {(row.fqn, calls, calls) for row in rows}
    assert rows
