"""Modules whose forward torch never calls, or skips when it takes a fused path."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from .errors import ThunderPatchWarning


def warn_where_never_called(model: nn.Module, targets: Mapping[str, nn.Module]) -> None:
    """Warn, once for all, of each target that will not be called, or not always, whatever its patch does."""
    reasons = {fqn: reason for fqn in targets if (reason := why_never_called(model, fqn))}
    if reasons:
        lines = "\n".join(f"  {fqn} ({type(targets[fqn]).__name__}): {why}" for fqn, why in reasons.items())
        warnings.warn(f"patched, but not always called:\n{lines}", ThunderPatchWarning, stacklevel=3)


def why_never_called(model: nn.Module, fqn: str) -> str | None:
    """Return why the module at `fqn` may not be called, as far as that can be seen from the modules above it."""
    above: nn.Module | None = model
    reason = None
    for part in filter(None, fqn.split(".")):
        if isinstance(above, nn.MultiheadAttention) and part == "out_proj":
            return "nn.MultiheadAttention reads its weight and never calls it"
        if isinstance(above, nn.TransformerEncoderLayer):
            reason = "nn.TransformerEncoderLayer skips it on its fused fast path (eval mode, no gradients)"
        above = above._modules.get(part) if above is not None else None
    return reason
