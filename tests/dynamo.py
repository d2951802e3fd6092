"""The graph that Dynamo makes of a call, for tests of what is done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import fx


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
