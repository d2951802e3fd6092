"""The measurements of the suite, each a function that fills one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .results import Cell, Result
from .workers import PeerError, Worker

Settings = dict[str, Any]
Tell = Callable[[str], None]
ROUNDS = 15
REGIONAL = (
    "eager",
    "thunderfx(model)",
    "thunderfx per block",
    "Module.compile(ThunderCompiler)",
    "accelerate compile_regions",
    "inductor per block",
    "thunderpatch",
    "thunderpatch, torchcompile",
)
# Numbers of one computation differ by rounding alone; a peer that is further off does something else.
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-2}


def first_step(settings: Settings, tell: Tell) -> Result:
    """The first training step, by the number of equal blocks."""
    result = Result("first_step", "First training step of equal blocks", "s", REGIONAL)
    _firsts(result, settings, tell, "stack", settings["depths"], "training step", REGIONAL)
    return result


def growth(settings: Settings, tell: Tell) -> Result:
    """How the first training step grows with the depth, for those whose cost should not."""
    peers = ("eager", "Dynamo alone", "Module.compile(ThunderCompiler)", "inductor per block", "thunderpatch")
    result = Result("growth", "First training step, growth with the number of blocks", "s", peers)
    _firsts(result, settings, tell, "small_stack", (8, 128, 512), "training step", peers)
    return result


def first_llama(settings: Settings, tell: Tell) -> Result:
    """The first inference call of a Llama with a KV cache, which Dynamo traces layer by layer."""
    peers = ("eager", "Dynamo alone", *REGIONAL[1:])
    result = Result("first_llama", "First inference call of a Llama with a KV cache", "s", peers)
    _firsts(result, settings, tell, "llama", settings["llama_depths"], "inference", peers)
    return result


def per_call(settings: Settings, tell: Tell) -> Result:
    """What a block costs per call once all is compiled."""
    result = Result("per_call", "Per block and call, 32 blocks of width 64", "us", REGIONAL)
    modes = ("inference", "training forward", "training step")
    _steady(result, settings, tell, "small_stack", modes, calls=20, per=32)
    return result


def leaf(settings: Settings, tell: Tell) -> Result:
    """The smallest region: nn.ReLU on 64 floats."""
    result = Result("leaf", "nn.ReLU on 64 floats", "us", REGIONAL)
    _steady(result, settings, tell, "relu", ("inference", "training forward"), calls=2000, per=1)
    return result


def real_size(settings: Settings, tell: Tell) -> Result:
    """Blocks of real size, per call, on a GPU."""
    result = Result("real_size", "Per block and call, 8 blocks of width 4096, bfloat16", "us", REGIONAL)
    modes = ("inference", "training forward", "training step")
    _steady(result, {**settings, "sizes": {"depth": 8}}, tell, "stack", modes, calls=5, per=8)
    return result


def tuned(settings: Settings, tell: Tell) -> Result:
    """A mixed model: what `tune` chooses beside each candidate applied everywhere."""
    peers = ("eager", "thunderpatch", "thunderpatch, torchcompile", "thunderpatch, tuned")
    result = Result("tuned", "A training step of a mixed model", "ms", peers)
    _steady(result, settings, tell, "mixed", ("training step",), calls=5, per=1, scale=1e3)
    return result


def llama_call(settings: Settings, tell: Tell) -> Result:
    """A Llama's call once all is compiled."""
    result = Result("llama_call", "Llama, a call of the whole model", "ms", REGIONAL)
    sizes = {"depth": max(settings["llama_depths"])}
    _steady(result, {**settings, "sizes": sizes}, tell, "llama", ("inference",), calls=3, per=1, scale=1e3)
    return result


def _firsts(
    result: Result,
    settings: Settings,
    tell: Tell,
    workload: str,
    depths: Iterable[int],
    mode: str,
    peers: Sequence[str],
) -> None:
    hopeless: set[str] = set()  # what took too long once takes longer with more
    for depth in depths:
        row = f"{depth} blocks"
        for peer in peers:
            if peer in hopeless:
                result.put(row, peer, Cell(note="took too long with fewer blocks"))
                continue
            tell(f"{result.name}: {row}, {peer}")
            try:
                with _worker(peer, workload, {**settings, "sizes": {"depth": depth}}) as worker:
                    cell = Cell([worker.ask("first", mode)], _eager(worker, peer))
            except PeerError as error:
                cell = Cell(note=str(error))
                hopeless |= {peer} if "took more" in str(error) else set()
            result.put(row, peer, cell)


def _steady(
    result: Result,
    settings: Settings,
    tell: Tell,
    workload: str,
    modes: Iterable[str],
    *,
    calls: int,
    per: int,
    scale: float = 1e6,
) -> None:
    """Measure peers in turn, round by round, after each has compiled."""
    for mode in modes:
        workers: dict[str, Worker] = {}
        samples: dict[str, list[float]] = {peer: [] for peer in result.peers}
        truth: list[float] = []
        try:
            for peer in result.peers:
                tell(f"{result.name}: {mode}, {peer} compiles")
                try:
                    workers[peer] = _compiled(peer, workload, settings, mode, truth)
                except PeerError as error:
                    result.put(mode, peer, Cell(note=str(error)))
            for number in range(ROUNDS):
                tell(f"{result.name}: {mode}, round {number + 1} of {ROUNDS}")
                for peer, worker in workers.items():
                    samples[peer].append(worker.ask("time", mode, calls) * scale / per)
            for peer, worker in workers.items():
                result.put(mode, peer, Cell(samples[peer], _eager(worker, peer)))
        finally:
            for worker in workers.values():
                worker.close()


def _compiled(peer: str, workload: str, settings: Settings, mode: str, truth: list[float]) -> Worker:
    """Return a worker that has compiled all it will, and computes what the first one does (kept in `truth`)."""
    worker = Worker(peer, workload, settings)
    try:
        numbers = worker.ask("result", mode)
        worker.ask("time", mode, 2)
        truth.extend([] if truth else numbers)
        _compare(numbers, truth, TOLERANCE[settings["device"]])
    except PeerError:
        worker.close()
        raise
    return worker


def _eager(worker: Worker, peer: str) -> str:
    return "captured no graph: runs eager" if peer != "eager" and worker.ask("graphs") == 0 else ""


def _compare(numbers: Sequence[float], truth: Sequence[float], tolerance: float) -> None:
    size = max(map(abs, truth))
    if not all(abs(a - b) <= tolerance * size for a, b in zip(numbers, truth, strict=True)):
        raise PeerError(f"computes something else: sums {list(numbers)} against {list(truth)}")


@contextmanager
def _worker(peer: str, workload: str, settings: Settings) -> Iterator[Worker]:
    worker = Worker(peer, workload, settings)
    try:
        yield worker
    finally:
        worker.close()
