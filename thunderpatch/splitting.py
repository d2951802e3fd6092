"""thunder's splitter: which parts of a captured graph thunder compiles, and which inductor does."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from . import graphs
from .compat import load_thunder
from .dispatch import Partition
from .inductor import InductorPart
from .options import Options
from .quirks_nodes import nested, runs_as_captured
from .recomputation import Region


def split(
    gm: fx.GraphModule, options: Options, owner: str, seconds: defaultdict[str, float]
) -> tuple[Callable[..., Any], Any, list[Partition]]:
    """Return a function that runs the parts of a graph, thunder's account of them, and those that thunder has.

    What it takes is added to `seconds`: that of inductor, which compiles its parts here, and that of thunder.
    """
    began, before = time.perf_counter(), seconds["inductor"]
    try:
        return _split(gm, options, owner, seconds)
    finally:
        seconds["thunder"] += time.perf_counter() - began - (seconds["inductor"] - before)


def _split(
    gm: fx.GraphModule, options: Options, owner: str, seconds: defaultdict[str, float]
) -> tuple[Callable[..., Any], Any, list[Partition]]:
    thunder = load_thunder()
    from thunder.dynamo.splitter import _splitter
    from thunder.dynamo.utils import recompile_graph, remove_empty_autocast
    from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform

    # The splitter edits nodes; what was captured stays as it is, to fall back on and to differentiate twice.
    gm = graphs.copied(gm)
    for body in (gm, *nested(gm)):
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
            # thunder refuses the reentrant way, which differs in how eager's backward goes about it and not in a graph.
            node.update_kwarg("use_reentrant", False)
    _describable(gm)
    remove_empty_autocast(gm)
    recompile_graph(gm)
    settings = dict(options.thunder)
    settings.setdefault("fusion_type", "dataflow")
    settings.setdefault("thunderfx_disable_split_autograd", True)
    # Dynamo's guards hold for every call that gets here: thunder need not check tensors again.
    prune = ExtractionOnlyPrologueTransform(skip_check_on_input_tensors=True)
    settings["transforms"] = [*(settings.get("transforms") or ()), prune]
    inductor = functools.partial(_inductor, dict(options.inductor) or None, seconds)
    jit = functools.partial(_jit, functools.partial(thunder.jit, **settings), bool(options.thunder.get("transforms")))
    divided, info = _splitter(gm, jit, inductor, [], settings)
    whole: Any = info.original_split_graph_module
    captured = whole.split_graph_module
    parts, partitions = dict[str, Any](), list[Partition]()
    for name, child in divided.named_children():
        original = getattr(captured, name.replace("thunder_", "submod_").replace("inductor_", "submod_"))
        if name.startswith("thunder_"):
            partitions.append(Partition(child, original, owner, options))
            parts[name] = partitions[-1]
        elif runs_as_captured(original):
            parts[name] = original.forward
        else:
            parts[name] = InductorPart(child, original, Region.of(original, owner, options))
    return _straight(divided, parts), info, partitions


def _describable(gm: fx.GraphModule) -> None:
    """Let those views stand for themselves that torch cannot describe by their base where a graph is cut.

    A complex view of real values it would make by `view_as_complex`, which takes no base but one whose last dimension
    is 2; and where a view begins may be known to a tensor alone (`narrow`).
    """
    for node in gm.graph.nodes:
        fake = graphs.example(node)
        if not isinstance(fake, FakeTensor) or fake._base is None:
            continue
        recast = fake.is_complex() and not fake._base.is_complex()
        if recast or not isinstance(fake.storage_offset(), int):
            with fake.fake_mode:
                alone = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            node.meta["example_value"] = alone.requires_grad_(fake.requires_grad)


def fused(divided: fx.GraphModule, partition: Partition) -> Callable[..., Any] | None:
    """Return a function without the split graph around it, where that does nothing but call one partition."""
    nodes = list(divided.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_module"]
    results = nodes[-1].args[0]
    if len(calls) != 1 or calls[0].kwargs or not all(arg in inputs for arg in calls[0].args):
        return None
    parts = [(operator.getitem, (calls[0], k)) for k in range(len(results))]
    if list(results) != [calls[0]] and [(node.target, node.args) for node in results] != parts:
        return None
    if len(nodes) > len(inputs) + 2 + (len(parts) if list(results) != [calls[0]] else 0):
        return None
    return partition.fused([inputs.index(arg) for arg in calls[0].args], len(inputs), len(results))


def backward_too() -> contextlib.AbstractContextManager[Any]:
    """Let inductor compile the backward of its parts together with their forward, to run as often as asked.

    It would wait for the first backward, and a failure there is too late to be answered. The settings are private to
    the length of a compilation; torch 2.9 lacks the first.
    """
    config = torch._functorch.config
    # A donated buffer would make `retain_graph=True`, which eager takes, an error.
    wanted = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    return config.patch({name: value for name, value in wanted.items() if hasattr(config, name)})  # type: ignore[no-any-return]


def _inductor(
    options: dict[str, Any] | None, seconds: defaultdict[str, float], part: fx.GraphModule, inputs: list[Any]
) -> Callable[..., Any]:
    """Let inductor compile a part, unless that holds an operation which only eager gets right."""
    return part.forward if runs_as_captured(part) else inductor_compile(part, _sized(inputs), options, seconds)


def inductor_compile(
    gm: fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None, seconds: defaultdict[str, float]
) -> Callable[..., Any]:
    """Let inductor compile a graph, and add what that takes to `seconds`."""
    began = time.perf_counter()
    try:
        return torch._inductor.compile(gm, inputs, options=options)  # type: ignore[no-any-return]
    finally:
        seconds["inductor"] += time.perf_counter() - began


def _sized(inputs: Sequence[Any]) -> list[Any]:
    """Return the fake inputs under a mode that can name a size which it does not know, as a loop over tensors asks."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return [
        mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value for value in inputs
    ]


class _Jitted(nn.Module):
    """What thunder made of a plain function, in the form in which the splitter takes it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self._lc_cd, self._lc_cs = function._lc_cd, function._lc_cs

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _jit(jit: Callable[..., Any], as_module: bool, part: fx.GraphModule, **options: Any) -> nn.Module:
    """Let thunder compile a partition, by its bare code where that says it all.

    thunder interprets what it is given line by line: a module's way to its forward costs it as much again as the code
    of a small graph. The caller's transforms may look for a module (`as_module`).
    """
    if as_module or any(node.op in ("get_attr", "call_module") for node in part.graph.nodes):
        for body in (part, *nested(part)):
            # Each has a class of its own. Its `__call__` explains an error by the line that raised it: interpreted by
            # thunder, that takes minutes.
            if "__call__" in vars(type(body)):
                del type(body).__call__
        return jit(part, **options)  # type: ignore[no-any-return]
    return _Jitted(jit(functools.partial(type(part).forward, None), **options))


def _straight(split: fx.GraphModule, parts: dict[str, Any]) -> Callable[..., Any]:
    """Return the split graph as a plain function, its parts reached without a module's __getattr__ and __call__."""
    shell = _Shell()
    for node in split.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target).split(".")[0]
            setattr(shell, name, getattr(split, name))
    for name, part in parts.items():
        setattr(shell, name, part)
    forward = type(split).forward
    return functools.partial(forward, shell)


class _Shell:
    """Holds the parts of a split graph under the names that its code uses."""
