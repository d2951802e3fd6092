"""What it costs to patch and to restore, without any call: seconds and bytes per module."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from torch import nn

from .results import Cell, Result

COUNTS = (1_000, 10_000)
PEERS = ("thunderfx(module.forward)", "by type", "by glob", "by predicate")


def patching(settings: dict[str, Any], tell: Callable[[str], None]) -> Result:
    """Per module: `apply` and `restore` beside the mere call of `thunderfx(module.forward)`."""
    import thunderpatch
    from thunderpatch.compat import load_thunderfx

    result = Result("patching", "apply and restore, per module", "us", PEERS)
    theirs = load_thunderfx()
    selectors: dict[str, dict[str, Any]] = {
        "by type": {"types": nn.ReLU},
        "by glob": {"names": "**.act"},
        "by predicate": {"where": lambda module, fqn: fqn.endswith(".act")},
    }
    for count in COUNTS:
        tell(f"patching: {count} modules")
        model = tree(count)
        some = [module for module in model.modules() if isinstance(module, nn.ReLU)][:500]

        def theirs_once(some: list[nn.Module] = some) -> None:
            for module in some:
                theirs(module.forward)

        def ours(chosen: dict[str, Any], model: nn.Module = model) -> Callable[[], None]:
            def once() -> None:
                assert len(thunderpatch.apply(model, **chosen)) == thunderpatch.restore(model)

            return once

        row = f"{count:,} modules"
        result.put(row, PEERS[0], Cell(_samples(theirs_once, len(some))))
        for peer, chosen in selectors.items():
            result.put(row, peer, Cell(_samples(ours(chosen), count)))
    return result


def memory(settings: dict[str, Any], tell: Callable[[str], None]) -> Result:
    """Bytes that Python holds per patched module, while patched and after restore."""
    import thunderpatch

    result = Result("memory", "Memory per patched module", "bytes", ("patched", "restored"))
    for count in COUNTS:
        tell(f"memory: {count} modules")
        model = tree(count)
        thunderpatch.apply(tree(1), types=nn.ReLU)  # what is there once, whatever the number
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            patch = thunderpatch.apply(model, types=nn.ReLU)
            patched = tracemalloc.get_traced_memory()[0]
            patch.restore()
            del patch
            restored = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        result.put(f"{count:,} modules", "patched", Cell([(patched - before) / count]))
        result.put(f"{count:,} modules", "restored", Cell([(restored - before) / count]))
    return result


def tree(count: int) -> nn.Module:
    """Return a model of `count` activations beside as many others, a hundred to a container."""

    def pair() -> nn.Module:
        return nn.ModuleDict({"norm": nn.Identity(), "act": nn.ReLU()})

    sizes = [min(100, count - start) for start in range(0, count, 100)]
    return nn.ModuleList(nn.ModuleList(pair() for _ in range(size)) for size in sizes)


def _samples(run: Callable[[], None], modules: int) -> list[float]:
    seconds = []
    for _ in range(5):
        began = time.process_time()
        run()
        seconds.append((time.process_time() - began) * 1e6 / modules)
    return [statistics.median(seconds[1:])]  # the first fills caches
