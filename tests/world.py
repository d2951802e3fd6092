"""Two ranks on gloo, started once, that run one check after another."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_spawn = multiprocessing.get_context("spawn")


class RankFailed(AssertionError):
    """What a check raised on one of the ranks, or that it did not come back."""


class World:
    """Ranks that wait for checks; a check is a module's function without arguments, and every rank runs it.

    `collective_timeout` is how long a rank waits for the others in a collective, in seconds.
    """

    def __init__(self, size: int = 2, collective_timeout: float = 60) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        store = str(Path(self._folder.name, "store"))
        for rank in range(size):
            ours, theirs = _spawn.Pipe()
            arguments = (rank, size, store, collective_timeout, theirs)
            process = _spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, check: Callable[[], Any], timeout: float = 240) -> list[Any]:
        """Run `check` on all ranks and return what it returned on each; raise what failed."""
        found = self.outcomes(check, timeout)
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(found) if not good]
        if failures:
            raise RankFailed("\n".join(failures))
        return [value for _, value in found]

    def outcomes(self, check: Callable[[], Any], timeout: float = 240) -> list[tuple[bool, Any]]:
        """Run `check` on all ranks; return for each whether it got through, and its result or its traceback."""
        for pipe in self._pipes:
            pipe.send(check)
        found: list[tuple[bool, Any]] = []
        for pipe in self._pipes:
            try:
                found.append(pipe.recv() if pipe.poll(timeout) else (False, f"hangs: no answer in {timeout} s"))
            except EOFError:
                found.append((False, "the process has ended"))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # The ranks do not see pytest's settings.
    warnings.simplefilter("ignore")
    from thunderpatch import ThunderPatchWarning

    warnings.simplefilter("error", ThunderPatchWarning)
    waits = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=waits)
    while True:
        check = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((True, check()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
