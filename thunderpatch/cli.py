"""The command line: `thunderpatch VERB TARGET`.

Results go to stdout, progress and errors to stderr. The exit status is 0 when all is well, 1 for a finding (a
module that ran eager, a wrong value, a region that does not compile), and 2 when the command could not do its
work.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from .arguments import build_parser
from .errors import CompileError, ThunderPatchError, ThunderPatchWarning, interrupted

INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Without arguments it is `demo`."""
    given = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an FQN may hold what an ASCII log cannot
    args = build_parser().parse_args(given or ["demo"])
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Importing thunder tells of each optional executor that is not installed.
            warnings.filterwarnings("ignore", "transformer_engine module not found", module=r"thunder\.")
            with _ended_by_interrupts():
                from . import verbs  # imports torch, which takes seconds
            ok: bool = getattr(verbs, args.run)(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has enough. Python would flush to the closed pipe once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # SIGPIPE, which not every platform knows by name
    except (Exception, KeyboardInterrupt) as error:
        if interrupted(error):
            _complain("interrupted")
            return INTERRUPTED
        if args.traceback:
            traceback.print_exc()
        else:
            _complain(f"error: {_one_line(error)}")
        return 1 if isinstance(error, CompileError) else 2
    return 0 if ok else 1


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """End the process at once when it is interrupted in here.

    A KeyboardInterrupt in the midst of an import may be taken for a failure of it, by Python code or by C.
    """

    def end(*_: Any) -> None:
        _complain("interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _one_line(error: BaseException) -> str:
    if isinstance(error, ThunderPatchError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first} (--traceback shows where)"


def _complain(text: str) -> None:
    print(f"thunderpatch: {text}", file=sys.stderr)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, ThunderPatchWarning):
        _complain(f"warning: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)
