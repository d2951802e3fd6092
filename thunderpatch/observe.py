"""Gathers what the registry and the compiled graphs know into a report; changes and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from . import registry
from .errors import ArgumentError
from .forward import inlined_classes
from .fused import why_never_called
from .record import Record
from .report import Report, Row, Status


def report(model: nn.Module) -> Report:
    """Return what ran where so far: a row for each module of `model` that is or was patched.

    The rows tell the status and its reason, calls and compiled calls, and for the code that the module runs the
    graphs, their partitions, routes and graph breaks. Nothing is reset and nothing recompiles.
    Raises `ArgumentError` when `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"report takes a torch.nn.Module, not {type(model).__name__}")
    found = [(fqn, module, _latest(module)) for fqn, module in model.named_modules()]
    present = {fqn: record for fqn, _, record in found if record is not None}
    sharing: dict[int, int] = {}
    for record in present.values():
        sharing[id(record.group)] = sharing.get(id(record.group), 0) + 1
    return Report(
        [
            _row(model, fqn, module, record, _compiled_above(fqn, present), sharing[id(record.group)])
            for fqn, module, record in found
            if record is not None
        ]
    )


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


def _row(model: nn.Module, fqn: str, module: nn.Module, record: Record, above: str | None, sharing: int) -> Row:
    status, reason = _status(model, fqn, module, record, above)
    graphs = list(record.graphs)
    parts = [part for graph in graphs for part in graph.parts]
    thunder = [ops for kind, ops in parts if kind == "thunder"]
    inductor = [ops for kind, ops in parts if kind == "inductor"]
    return Row(
        fqn=fqn,
        cls=type(module).__name__,
        status=status,
        reason=reason,
        calls=record.calls,
        compiled_calls=record.compiled_calls,
        graphs=len(graphs),
        graph_breaks=[place for graph in graphs for place in graph.breaks],
        thunder_partitions=len(thunder),
        inductor_partitions=len(inductor),
        ops_thunder=sum(thunder),
        ops_inductor=sum(inductor),
        split_reasons=_unique(text for graph in graphs for text in graph.splits),
        routes=_unique(
            f"{route.node or 'the graph'} to {route.target}: {route.reason}" for g in graphs for route in g.routes
        ),
        recompiles=len(record.recompiled),
        recompile_reasons=_unique(record.recompiled),
        seconds={
            "dynamo": record.dynamo_seconds,
            "thunder": sum(part.seconds for graph in graphs for part in graph.partitions),
            "inductor": sum(graph.seconds for graph in graphs),
        },
        shared_with=sharing - 1 if record.group is not None else 0,
        group=f"{record.cls.__name__}-{id(record.group):x}" if record.group is not None else "",
    )


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
    if any(kind != "thunder" for graph in record.graphs for kind, _ in graph.parts):
        routed = "; ".join(_unique(f"{route.node} goes to {route.target}: {route.reason}" for route in routes))
        return Status.PARTLY, routed or "thunder leaves some operations to inductor"
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
    if record.cls in inlined_classes:
        return Status.INLINED, f"an outer torch.compile takes the originals of {record.cls.__name__} modules in"
    return Status.NEVER_CALLED, ""


def _unique(texts: Iterator[str] | list[str]) -> list[str]:
    return list(dict.fromkeys(texts))
