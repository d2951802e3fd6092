"""Small models of plain torch.nn for the command line, and a loop that trains the language model.

Each factory in `MODELS` returns a model and a tuple of inputs for it. They are sized for a CPU: built and run
once in well under a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 64
VOCABULARY = 256  # bytes are the tokens


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A causal language model: token ids of shape (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, depth: int = 12, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ViT(nn.Module):
    """A vision transformer: images (batch, 3, 32, 32) to logits (batch, 10)."""

    def __init__(self, depth: int = 6, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


class BasicBlock(nn.Module):
    """The residual block of ResNet-18, its activations in place."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(y)) + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """ResNet-18 at a small width: images (batch, 3, 32, 32) to logits (batch, 10)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, channels_in = [], width
        for stage, stride in enumerate((1, 2, 2, 2)):
            channels = width * 2**stage
            blocks += [BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


class MixerBlock(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.norm1, self.across_patches = nn.LayerNorm(width), mlp(length, 2 * length)
        self.norm2, self.across_channels = nn.LayerNorm(width), mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.across_channels(self.norm2(x))
        return out


class MLPMixer(nn.Module):
    """An MLP-Mixer: images (batch, 3, 32, 32) to logits (batch, 10)."""

    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    return GPT(), (torch.randint(VOCABULARY, (4, CONTEXT)),)


def vit() -> tuple[nn.Module, tuple[Any, ...]]:
    return ViT(), (torch.randn(4, 3, 32, 32),)


def resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    return ResNet(), (torch.randn(4, 3, 32, 32),)


def mlp_mixer() -> tuple[nn.Module, tuple[Any, ...]]:
    return MLPMixer(), (torch.randn(4, 3, 32, 32),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": gpt,
    "vit": vit,
    "resnet": resnet,
    "mlp-mixer": mlp_mixer,
}


def text() -> bytes:
    """Return real English text, about 450 kB: the reference topics that Python's own `help()` shows."""
    return "\n".join(topics.values()).encode()


@dataclass
class Training:
    """What `train` saw: per step the loss and the seconds it took."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def first_seconds(self) -> float:
        """The seconds of the first step, in which whatever is compiled lazily compiles."""
        return self.seconds[0]

    @property
    def step_seconds(self) -> float:
        """The median seconds of the later steps."""
        return statistics.median(self.seconds[1:])


def train(
    model: nn.Module,
    steps: int = 20,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    batch: int = 8,
) -> Training:
    """Train a language model like `GPT` to predict the next byte of `text()`.

    The batches depend on `seed` alone, so that two trainings of equal models can be compared step by step;
    they follow the model's device. `steps` is 2 or more. `on_step(step, loss)` is called after each step. The
    optimizer is AdamW with a learning rate of 3e-3.
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2 (the first one includes compilation), not {steps}")
    device = next(model.parameters()).device
    tokens = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = Training()
    for step in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (batch, 1), generator=generator)
        windows = tokens[starts + torch.arange(CONTEXT + 1)].to(device, torch.int64)
        began = time.perf_counter()
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.losses.append(loss.item())  # also waits for a GPU to finish the step
        training.seconds.append(time.perf_counter() - began)
        if on_step is not None:
            on_step(step, training.losses[-1])
    return training
