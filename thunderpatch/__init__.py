"""Run chosen submodules of a PyTorch model through thunderfx, in place, and put everything back.

    thunderpatch.apply(model, types=[nn.ReLU])        # patch
    thunderpatch.restore(model)                       # undo
    with thunderpatch.patched(model): ...             # both
"""

from __future__ import annotations

from .errors import (
    AlreadyPatchedError,
    ArgumentError,
    CompileError,
    SelectionError,
    ThunderPatchError,
    ThunderPatchWarning,
    UnsupportedEnvironmentError,
)
from .observe import report
from .patching import Patch, apply, disabled, is_patched, patched, restore, thunderfx
from .selection import select

__all__ = [
    "AlreadyPatchedError",
    "ArgumentError",
    "CompileError",
    "Patch",
    "SelectionError",
    "ThunderPatchError",
    "ThunderPatchWarning",
    "UnsupportedEnvironmentError",
    "apply",
    "disabled",
    "is_patched",
    "patched",
    "report",
    "restore",
    "select",
    "thunderfx",
]
