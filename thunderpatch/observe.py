"""Gathers what the registry and the compiled graphs know into a report; changes and keeps nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from . import registry, wording
from .errors import ArgumentError
from .forward import inlined_classes
from .fused import why_never_called
from .graph import Graph
from .record import Record
from .reports import Report, Row, Status


def report(model: nn.Module) -> Report:
    """Return what ran where so far: a row for each module of `model` that is or was patched.

    The rows tell the status and its reason, calls and compiled calls, and for the code that the module runs the
    graphs, their partitions, routes and graph breaks. Nothing is reset and nothing recompiles.
    Raises `ArgumentError` when `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"report takes a torch.nn.Module, not {type(model).__name__}")
    found = [(fqn, module, record) for fqn, module in model.named_modules() if (record := _latest(module)) is not None]
    records = {fqn: record for fqn, _, record in found}
    users: dict[Graph, list[str]] = {}
    for fqn, record in records.items():
        for graph in record.graphs:
            users.setdefault(graph, []).append(fqn)
    rows = []
    for fqn, module, record in found:
        status, reason = _status(model, fqn, module, record, _compiled_above(fqn, records))
        rows.append(_row(fqn, module, record, status, reason, users))
    return Report(rows, _code(users))


def _latest(module: nn.Module) -> Record | None:
    records = registry.records_of(module)
    return registry.active(module) or (max(records, key=lambda r: r.calls) if records else None)


def _compiled_above(fqn: str, records: dict[str, Record]) -> str | None:
    """Return the FQN of the nearest patched module above that has run compiled: it takes this one in."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if fqn in records and records[fqn].compiled_calls and records[fqn].installed:
            return fqn
    return None


def _row(
    fqn: str, module: nn.Module, record: Record, status: Status, reason: str, users: dict[Graph, list[str]]
) -> Row:
    graphs = list(record.graphs)
    sharing = _unique(user for graph in graphs for user in users[graph])
    return Row(
        fqn=fqn,
        cls=type(module).__name__,
        status=status,
        reason=reason,
        calls=record.calls,
        compiled_calls=record.compiled_calls,
        split_reasons=wording.splits(graphs),
        routes=wording.routes(graphs),
        recompiles=len(record.recompiled),
        recompile_reasons=_unique(record.recompiled),
        seconds={stage: record.seconds.get(stage, 0.0) for stage in ("dynamo", "thunder", "inductor")},
        shared_with=len(sharing) - 1 if sharing else 0,
        group=sharing[0] if sharing else "",
        **_code(graphs),
    )


def _code(graphs: Collection[Graph]) -> dict[str, Any]:
    """Return what a report tells of compiled code, by the names of a row's fields."""
    parts = [part for graph in graphs for part in graph.parts]
    ops = {kind: [count for ran_by, count in parts if ran_by == kind] for kind in ("thunder", "inductor", "eager")}
    return {
        "graphs": len(graphs),
        "graph_breaks": [place for graph in graphs for place in graph.breaks],
        **{f"{kind}_partitions": len(counts) for kind, counts in ops.items()},
        **{f"ops_{kind}": sum(counts) for kind, counts in ops.items()},
    }


def _status(model: nn.Module, fqn: str, module: nn.Module, record: Record, above: str | None) -> tuple[Status, str]:
    if not record.installed:
        return Status.RESTORED, ""
    if (displaced := _displaced(module, record)) is not None:
        return Status.DISPLACED, displaced
    if record.failure is not None:
        return Status.FAILED, record.failure
    if record.latched is not None:
        return Status.LATCHED, f"{type(record.latched).__name__}: {record.latched}"
    if record.disabled:
        return Status.DISABLED, "inside `with disabled(...)`"
    if record.calls > 0 and record.compiled_calls < record.calls and not _routed_eager(record):
        return Status.EAGER, "; ".join(_unique(record.reasons)) or "Dynamo captured no graph of it"
    if record.calls == 0:
        return _uncalled(model, fqn, record, above)
    routes = [route for graph in record.graphs for route in graph.routes]
    if _routed_eager(record):
        return Status.ROUTED, "; ".join(_unique(route.reason for route in routes if route.whole_graph_eager))
    kinds = {kind for graph in record.graphs for kind, _ in graph.parts}
    if "thunder" not in kinds and routes:
        return Status.ROUTED, "; ".join(wording.routes(record.graphs))
    if kinds - {"thunder"}:
        return Status.PARTLY, "; ".join(wording.routes(record.graphs)) or "thunder leaves operations to inductor"
    return Status.COMPILED, ""


def _displaced(module: nn.Module, record: Record) -> str | None:
    """Return what stands where the patch was put, if the patch is gone or what stands on top has not called it."""
    there = vars(module).get("forward")
    if registry.active(module) is None:
        return f"its forward was {'deleted' if there is None else f'replaced by a {type(there).__name__}'}"
    if registry.proxy_of(module) is None and not record.calls:
        return f"a {type(there).__name__} stands on top and has not called it"
    return None


def _routed_eager(record: Record) -> bool:
    return any(route.whole_graph_eager for graph in record.graphs for route in graph.routes)


def _uncalled(model: nn.Module, fqn: str, record: Record, above: str | None) -> tuple[Status, str]:
    if above is not None:
        return Status.INLINED, f"{above or 'the model'} is patched and compiles it as a part of itself"
    if record.bypassed:
        return Status.BYPASSED, "; ".join(f"{why} ({count} calls)" for why, count in record.bypassed.items())
    fused = why_never_called(model, fqn)
    if fused:
        return Status.BYPASSED, fused
    if inlined_classes.get(record.cls, -math.inf) >= record.since:  # not those of a model before
        return Status.INLINED, f"an outer torch.compile takes the originals of {record.cls.__name__} modules in"
    return Status.NEVER_CALLED, ""


def _unique(texts: Iterator[str] | list[str]) -> list[str]:
    return list(dict.fromkeys(texts))
