"""Errors and warnings. Each derives from the builtin that it refines."""

from __future__ import annotations


class ThunderPatchError(Exception):
    """The root of every error that thunderpatch raises on its own account."""


class SelectionError(ThunderPatchError, LookupError):
    """No module matches, or the selectors contradict each other or cannot be read."""


class ArgumentError(ThunderPatchError, TypeError):
    """An argument is of the wrong kind, or an option is not one that thunderfx takes."""


class AlreadyPatchedError(ThunderPatchError, ValueError):
    """A module is patched with other options than those asked for."""


class CompileError(ThunderPatchError, RuntimeError):
    """A region could not be compiled, or a compiled region cannot do what is asked of it."""


class DifferenceError(ThunderPatchError, ArithmeticError):
    """A patched module computes something else than its original."""


class UnsupportedEnvironmentError(ThunderPatchError, ImportError):
    """The installed torch and lightning-thunder cannot work together."""


class ThunderPatchWarning(UserWarning):
    """The root of every warning that thunderpatch issues."""


def interrupted(error: BaseException | None) -> bool:
    """Whether an error comes of a Ctrl-C: code that cleans up after one may raise something else in its place."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(one, KeyboardInterrupt) for one in seen)
