"""Writes each compiled graph of a model as a script of its own, which compares thunder with eager."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from . import graphs, registry, standalone
from .errors import ArgumentError
from .graph import Graph
from .source import Source
from .verification import Verification


def save_reproducers(
    model: nn.Module,
    folder: str | Path,
    *,
    data: Callable[[], object] | None = None,
    verification: Verification | None = None,
) -> list[Path]:
    """Write a script for each graph that the modules of `model` ran, and return the paths of the scripts.

    A script is named by the FQN and needs torch and lightning-thunder, not thunderpatch. It runs the graph eager and
    through thunder's backend of `torch.compile`, forward and backward, with the options of the patch, prints what
    differs, and ends with status 0 when nothing does, 1 when something does or thunder raises, 2 when it cannot tell.
    Operations that are routed around thunder are so in the script too; `--raw` hands them to thunder. A graph that
    runs uncompiled, after an error or because thunder gets it wrong, has a script that shows that.

    Inputs are made from their shape, stride, dtype and device. With `data`, a function that calls the patched model,
    they are saved as that call gives them, in a `.pt` file beside the script; where it does not run a graph, they are
    made. With `verification`, the result of `verify`,
    only modules that differ or raise get a script, which tells how.

    The folder is made if need be; scripts of the same names are overwritten. A module that Dynamo captured no graph of
    has none. Nothing is compiled or reset, but for what `data` calls. Raises `ArgumentError` when `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"save_reproducers takes a torch.nn.Module, not {type(model).__name__}")
    found = _graphs(model)
    if verification is not None:
        wrong = {row.fqn: f"{row.verdict}: {'; '.join(row.differing) or row.note}" for row in verification.failures}
        found = {g: wrong_in for g, names in found.items() if (wrong_in := {n: wrong[n] for n in names if n in wrong})}
    inputs = _inputs_of_a_call(list(found), data) if data is not None else {}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    taken: set[str] = set()
    for graph, names in found.items():
        path = folder / f"{_file_name(next(iter(names)), taken)}.py"
        path.write_text(_script(graph, names, path, inputs.get(graph)), encoding="utf-8")
        written.append(path)
    return written


def _graphs(model: nn.Module) -> dict[Graph, dict[str, str]]:
    """Return the graphs that ran, each with the FQN and class of every module that runs it."""
    found: dict[Graph, dict[str, str]] = {}
    for fqn, module in model.named_modules():
        for record in registry.records_of(module):
            for graph in record.graphs:
                found.setdefault(graph, {})[fqn] = type(module).__name__
    return found


def _inputs_of_a_call(wanted: list[Graph], call_model: Callable[[], object]) -> dict[Graph, list[Any]]:
    """Call the model and return what each graph was called with first."""
    seen: dict[Graph, list[Any]] = {}

    def noting(graph: Graph, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*inputs: Any) -> Any:
            if graph not in seen:
                seen[graph] = [_saved(value) for value in inputs]
            return call(*inputs)

        return note

    with contextlib.ExitStack() as stack:
        for graph in wanted:
            stack.callback(setattr, graph, "call", graph.call)
            graph.call = noting(graph, graph.call)
        call_model()
    return seen


def _saved(value: Any) -> Any:
    copy = standalone.copied(value)
    return copy.detach() if isinstance(copy, torch.Tensor) else copy


def _file_name(fqn: str, taken: set[str]) -> str:
    """Return a name that is safe on every file system and not yet taken, whatever the case of its letters."""
    plain = re.sub(r"[^\w.-]", "_", fqn, flags=re.ASCII)[:120].strip(".") or "model"
    name, number = plain, 1
    while name.lower() in taken:
        number += 1
        name = f"{plain}-{number}"
    taken.add(name.lower())
    return name


def _script(graph: Graph, names: Mapping[str, str], path: Path, inputs: list[Any] | None) -> str:
    """Return the text of a script; write the tensors that it loads beside it."""
    nodes = graphs.placeholders(graph.sample)
    text = Source(graph.sample)
    beside: dict[str, Any] = {**text.tensors}
    if inputs is not None:
        beside |= {f"input {i}": value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    saved = path.with_suffix(".pt")
    saved.unlink(missing_ok=True)
    if beside:
        torch.save(beside, saved)
    options, left_out = _options(graph)
    grad, dtype, deterministic, precision, autocast, _ = graph.settings
    state = f"{grad}, {dtype}, {deterministic}, {precision!r}, {dict(autocast)!r}"
    own, imports = _harness()
    return "\n".join(
        [
            _heading(graph, names, left_out),
            *sorted({*imports, *text.imports}, key=lambda line: (line.startswith("from"), line)),
            "",
            *text.stand_ins,
            *text.classes,
            "",
            *(["SAVED = torch.load(Path(__file__).with_suffix('.pt'))"] if beside else []),
            f"OPTIONS = {options}  # of thunder.jit",
            f"INDUCTOR = {dict(graph.options.inductor)!r}  # of the parts that go to inductor",
            "",
            "",
            "def inputs():",
            "    return [",
            *(f"        {_input(i, node, inputs)},  # {node.name}" for i, node in enumerate(nodes)),
            "    ]",
            "",
            "",
            "# From here on, what is done with the graph.",
            own,
            "",
            'if __name__ == "__main__":',
            f"    with surroundings({state}):",
            "        torch.manual_seed(0)",
            "        sys.exit(compare(Captured(), inputs(), OPTIONS, INDUCTOR))",
            "",
        ]
    )


def _heading(graph: Graph, names: Mapping[str, str], left_out: list[str]) -> str:
    lines = ["A graph that thunderpatch captured, eager against lightning-thunder. It is run by:", ""]
    lines += [f"  {fqn or '(the model itself)'}: {what}" for fqn, what in names.items()]
    lines += ["", f"Options: {graph.options}"]
    lines += [f"Not in this script, since it cannot be written down: {what}" for what in left_out]
    for route in graph.routes:
        where = f"{route.node} goes to {route.target}" if route.node else f"The whole graph runs {route.target}"
        lines.append(f"{where}: {route.reason}")
    if graph.error is not None:
        lines.append(f"It runs uncompiled after {type(graph.error).__name__}: {graph.error}")
    if graph.routes and not graph.eager:
        lines.append("With --raw, thunder gets these operations too.")
    thunder = importlib.metadata.version("lightning-thunder")
    lines += ["", f"Written with torch {torch.__version__} and lightning-thunder {thunder}."]
    lines += ["Exit status: 0 all values agree, 1 some differ or thunder raises, 2 it cannot be told."]
    # What an option or an error holds must not end the docstring.
    body = "\n".join(lines).replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f'"""{body}\n"""\n\nfrom __future__ import annotations\n'


def _options(graph: Graph) -> tuple[str, list[str]]:
    """Return thunder's options as Python text, and in words those that have none."""
    kept, left_out = {}, []
    for name, value in graph.options.thunder.items():
        if name == "executors" and value is not None:  # by name, as thunder takes them too
            value = [getattr(executor, "name", executor) for executor in value]
        try:
            ast.literal_eval(repr(value))
            kept[name] = value
        except (ValueError, SyntaxError):
            left_out.append(f"{name}={value!r}")
    return repr(kept), left_out


def _input(position: int, node: fx.Node, inputs: list[Any] | None) -> str:
    value = graphs.example(node)
    parameter = node.type is nn.Parameter
    if not isinstance(value, torch.Tensor):
        return repr(value if inputs is None else inputs[position])
    if inputs is not None:
        loaded = f"SAVED['input {position}']"
        loaded = f"torch.nn.Parameter({loaded}, {value.requires_grad})" if parameter else loaded
        loaded += ".requires_grad_()" if value.requires_grad and not parameter else ""
        return loaded if value.is_leaf else f"{loaded}.clone()"
    if value.layout is not torch.strided:
        raise ArgumentError(f"input {node.name} is {value.layout}: save it with data=lambda: model(...)")
    given = f"tensor({tuple(value.shape)}, {tuple(value.stride())}, {value.dtype}, {str(value.device)!r}"
    # What a model keeps in a buffer and does not learn may be a variance.
    marks = {
        "requires_grad": value.requires_grad,
        "leaf": value.is_leaf,
        "parameter": parameter,
        "positive": "_buffers_" in node.name,
    }
    given += "".join(f", {name}={mark}" for name, mark in marks.items() if mark is not (name == "leaf"))
    return f"{given})"


def _harness() -> tuple[str, list[str]]:
    """Return the functions of `standalone` as text, and the imports that they need."""
    lines = inspect.getsource(standalone).splitlines()
    imports = [line for line in lines if re.match(r"(import|from) (?!__future__)", line)]
    start = next(i for i, line in enumerate(lines) if line.startswith("EQUAL"))
    return "\n".join(lines[start:]), [*imports, "import sys", "from pathlib import Path"]
