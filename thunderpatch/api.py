"""The public names, where they are defined. They need torch, which `thunderpatch` itself imports when it is used."""

from __future__ import annotations

from .culprits import find_culprits
from .errors import (
    AlreadyPatchedError,
    ArgumentError,
    CompileError,
    DifferenceError,
    SelectionError,
    ThunderPatchError,
    ThunderPatchWarning,
    UnsupportedEnvironmentError,
)
from .gains import Benchmark
from .handle import Patch
from .numerics import verify
from .observe import report
from .patching import apply, disabled, is_patched, patched, restore, thunderfx
from .reproducers import save_reproducers
from .selection import select
from .timing import benchmark
from .tuning import apply_plan, tune
from .verification import Verification

__all__ = [
    "AlreadyPatchedError",
    "ArgumentError",
    "Benchmark",
    "CompileError",
    "DifferenceError",
    "Patch",
    "SelectionError",
    "ThunderPatchError",
    "ThunderPatchWarning",
    "UnsupportedEnvironmentError",
    "Verification",
    "apply",
    "apply_plan",
    "benchmark",
    "disabled",
    "find_culprits",
    "is_patched",
    "patched",
    "report",
    "restore",
    "save_reproducers",
    "select",
    "thunderfx",
    "tune",
    "verify",
]
