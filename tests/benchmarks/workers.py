"""A process for each peer: nothing that one compiles, caches or configures can help or hurt another.

The workers of one comparison live side by side and measure in turn, a short block each, so that a slow minute
of the machine falls on all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


class PeerError(Exception):
    """A peer could not do what it was asked: the message says why."""


class Worker:
    """The parent's side. `Worker(peer, workload, ...)` has built the model; nothing has been called yet."""

    def __init__(self, peer: str, workload: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.limit = float(settings["limit"])
        self._cache = tempfile.TemporaryDirectory(prefix="inductor-", ignore_cleanup_errors=True)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, peer, workload, settings), daemon=True)
        with _environment(int(settings["threads"]), self._cache.name):
            self._process.start()
        theirs.close()
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def ask(self, *request: Any) -> Any:
        """Have a method of `_Bench` called, as in `ask("time", "inference", 20)`; return what it returns."""
        self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(self.limit):
            raise PeerError(f"took more than {self.limit:.0f} s")
        try:
            ok, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise PeerError(f"its process ended ({self._process.exitcode})") from None
        if not ok:
            raise PeerError(answer)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._cache.cleanup()


@contextmanager
def _environment(threads: int, cache: str) -> Iterator[None]:
    """Start a process with one thread and with empty caches, so that each first call compiles everything."""
    changed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, peer: str, workload: str, settings: dict[str, Any]) -> None:
    import warnings

    warnings.simplefilter("ignore")
    try:
        bench = _Bench(peer, workload, settings)
    except BaseException as error:
        pipe.send((False, _said(error)))
        return
    pipe.send((True, None))
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(bench, name)(*arguments)))
        except Exception as error:
            pipe.send((False, _said(error)))


def _said(error: BaseException) -> str:
    if os.environ.get("BENCHMARK_TRACEBACK"):
        traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


class _Bench:
    """The worker's side: one peer and one workload."""

    def __init__(self, peer: str, workload: str, settings: dict[str, Any]) -> None:
        import torch
        import torch.utils.benchmark

        from . import models, peers

        torch.set_num_threads(int(settings["threads"]))
        torch.manual_seed(0)
        device = settings["device"]
        self._work = models.WORKLOADS[workload](device, **settings.get("sizes", {}))
        self._torch = torch
        self._clock = time.process_time if settings["clock"] == "cpu" else torch.utils.benchmark.timer
        # What a first call anywhere pays (thread pools, cuBLAS handles) is not what is compared here.
        self._run(self._work.model, "training step")
        self._work.model.zero_grad()
        self._model = peers.PEERS[peer](self._work)

    def first(self, mode: str) -> float:
        began = self._clock()  # waits for a GPU, as below
        self._run(self._model, mode)
        return self._clock() - began

    def time(self, mode: str, calls: int) -> float:
        """Return the seconds of one call, the mean over `calls`."""
        from torch.utils.benchmark import Timer

        names = {"run": self._run, "model": self._model, "mode": mode}
        threads = self._torch.get_num_threads()
        timer = Timer("run(model, mode)", timer=self._clock, globals=names, num_threads=threads)
        return timer.timeit(calls).median

    def result(self, mode: str) -> list[float]:
        """Return numbers by which two peers are told apart when they do not compute the same."""
        value = self._run(self._model, mode).detach().double()
        return [value.sum().item(), value.abs().sum().item(), value.abs().max().item()]

    def graphs(self) -> int:
        """Return how many graphs Dynamo has captured in this process."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def peak(self, mode: str) -> int:
        """Return the bytes that a call takes on the GPU at most, beyond what is there before it."""
        cuda = self._torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        self._run(self._model, mode)
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - before)

    def _run(self, model: Any, mode: str) -> Any:
        work = self._work
        with self._torch.set_grad_enabled(mode != "inference"):
            out = work.leaves(model(*work.args, **work.kwargs))
            if mode == "training step":
                out.sum().backward()
        return out
