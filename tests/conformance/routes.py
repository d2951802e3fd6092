"""The ways to run a module: through thunderpatch, and through raw thunderfx to see what is wrong without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn

import thunderpatch
from thunderpatch import compat

Running = tuple[Callable[..., Any], Callable[[], int]]


def through_thunderpatch(module: nn.Module) -> Running:
    """Patch the module in place; return it and what counts its thunder partitions."""
    thunderpatch.apply(module)

    def partitions() -> int:
        return sum(row.thunder_partitions for row in thunderpatch.report(module).rows)

    return module, partitions


def through_thunderfx(module: nn.Module) -> Running:
    """Compile the module as thunderfx does; return the result and what counts its thunder partitions."""
    compat.load_thunder()
    from thunder.dynamo import ThunderCompiler

    compiler = ThunderCompiler()

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with compat.backend_context():
            return compiler(gm, inputs)

    def partitions() -> int:
        return sum(len(info.thunder_compiled_fns) for info in compiler.subgraph_infos)

    return torch.compile(module, backend=backend), partitions


THROUGH = {"thunderpatch": through_thunderpatch, "thunderfx": through_thunderfx}


def without_code(gm: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None = None) -> Any:
    """Stand in for `torch._inductor.compile`: all that it does before it writes C++, which then runs op by op.

    The compiler of C++ takes nine tenths of a run and is not what is tested here.
    """
    from torch._inductor.compile_fx import compile_fx

    def inner(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    return compile_fx(gm, inputs, inner_compile=inner, config_patches=options)
