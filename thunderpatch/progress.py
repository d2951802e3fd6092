"""Progress of long work, on a terminal's stderr and nowhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress


@contextlib.contextmanager
def progress(text: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar for the length of a `with` statement; yields what advances it and names what was done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(text, total=total)
        yield lambda what: bar.update(task, advance=1, description=f"{text}: {what}")
