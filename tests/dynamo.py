"""The graph that Dynamo makes of a call, for tests of what is done with it, and what raw thunder makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import fx

from thunderpatch import compat


def captured(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """Return the graph that Dynamo makes of a call, before anything else has seen it."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (gm,) = found
    return gm


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one's own: torch's are not compiled by every torch when they are called directly."""
    return lambda *args: function(*args)


def raw(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as thunderfx does."""
    compat.load_thunder()
    from thunder.dynamo import ThunderCompiler

    compiler = ThunderCompiler()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with compat.backend_context():
            return compiler(gm, inputs)

    return torch.compile(own(function), backend=backend)
