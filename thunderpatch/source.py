"""A captured graph as Python source: its class, those of graphs inside it, and all that their code refers to."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from .quirks_nodes import Opaque


class Source:
    """The imports, stand-ins, classes and tensors that make up a captured graph, the class `Captured`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.imports: dict[str, None] = {}
        self.stand_ins: dict[str, None] = {}
        self.classes: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._write(gm, "Captured")

    def _write(self, gm: fx.GraphModule, name: str) -> None:
        code = gm.graph.python_code("self")
        for alias, value in code.globals.items():
            if re.search(rf"\b{alias}\b", code.src):
                self._refer(alias, value)
        own = list(self._attributes(gm, name))
        lines = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in own), ""]
        source = re.sub(r";  (\w+ = )+None$", "", code.src.strip(), flags=re.MULTILINE)
        body = textwrap.indent("\n".join([*(lines if own else []), source]), "    ")
        self.classes.append(f"\nclass {name}(torch.nn.Module):\n{body}\n")

    def _attributes(self, gm: fx.GraphModule, owner: str) -> Iterator[str]:
        """Yield a line for each attribute that the graph reads; write the graphs inside it first."""
        for target in dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "get_attr"):
            value: Any = gm
            for part in target.split("."):
                value = getattr(value, part)
            name = f"{owner}_{target.replace('.', '_')}"
            if isinstance(value, fx.GraphModule):
                self._write(value, name)
                # What runs a graph inside a graph, such as checkpointing, takes it as a graph module only.
                yield f"self.{target} = torch.fx.symbolic_trace({name}())"
            elif isinstance(value, torch.Tensor):
                self.tensors[name] = value.detach()
                yield f"self.{target} = SAVED[{name!r}]"
            else:
                yield f"self.{target} = None  # a {type(value).__name__}, which cannot be written down"

    def _refer(self, alias: str, value: Any) -> None:
        if isinstance(value, Opaque):
            self._stand_in(alias, value)
        elif isinstance(value, ModuleType):
            name = value.__name__
            self.imports[f"import {name}" if alias == name else f"import {name} as {alias}"] = None
        elif alias in ("inf", "nan"):
            self.imports[f"from math import {alias}"] = None
        elif (found := _import(alias, value)) is not None:
            self.imports[found] = None
        else:
            words = f"{alias} cannot be written down in a script"
            self.stand_ins[f"\ndef {alias}(*args, **kwargs):\n    raise NotImplementedError({words!r})\n"] = None

    def _stand_in(self, alias: str, value: Opaque) -> None:
        """Write what keeps an operation from thunder: a function that Dynamo does not look into."""
        if isinstance(value.target, str):
            call = f"first.{value.target}(*args, **kwargs)"
        else:
            name = _get_qualified_name(value.target)
            self.imports[f"import {name.split('.')[0]}"] = None
            call = f"{name}(first, *args, **kwargs)"
        self.stand_ins[
            f"\ndef {alias}(first, *args, **kwargs):\n    return {call}\n\n\n"
            f'if "--raw" not in sys.argv:\n    {alias} = torch.compiler.allow_in_graph({alias})\n'
        ] = None


def _import(alias: str, value: Any) -> str | None:
    """Return the import of a class or function that another program finds where it says it is."""
    if value is type(None):
        return f"from types import NoneType as {alias}"
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if not module or "." in name or module == "__main__" or module.startswith("thunderpatch"):
        return None
    if getattr(importlib.import_module(module), name, None) is not value:
        return None
    return f"from {module} import {name}" + (f" as {alias}" if alias != name else "")
