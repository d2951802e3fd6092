"""The peers: each takes a workload and returns the model to call, configured as serves it best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from thunderpatch.compat import backend_context, load_thunder, load_thunderfx

from .models import Workload

Peer = Callable[[Workload], nn.Module]
_MORE_THAN_ANY = 100_000


def eager(work: Workload) -> nn.Module:
    return work.model


def thunderfx_whole(work: Workload) -> Any:
    return _thunderfx()(work.model)


def thunderfx_per_block(work: Workload) -> nn.Module:
    """One thunderfx for each block, Dynamo's limit raised by hand: left alone it would compile 8."""
    _raise_limits()
    compile_one = _thunderfx()
    if work.whole:
        return compile_one(work.model)  # type: ignore[no-any-return]  # thunder has no types
    for block in work.blocks:
        block.forward = compile_one(block.forward)
    return work.model


def module_compile(work: Workload) -> nn.Module:
    """NeMo's way: `nn.Module.compile` of each block with one ThunderCompiler."""
    _thunderfx()
    from thunder.dynamo import ThunderCompiler

    _raise_limits()
    backend = ThunderCompiler()
    for block in work.blocks:
        block.compile(backend=backend)
    return work.model


def accelerate_regions(work: Workload) -> nn.Module:
    try:
        from accelerate.utils import compile_regions
    except ImportError as error:
        raise Unavailable("accelerate is not installed") from error
    _raise_limits()
    model: nn.Module = compile_regions(work.model)
    return model


def inductor_per_block(work: Workload) -> nn.Module:
    _raise_limits()
    for block in work.blocks:
        block.compile()
    return work.model


def dynamo_per_block(work: Workload) -> nn.Module:
    """Dynamo with a backend that gives the graph back: the floor of a first call."""
    _raise_limits()
    for block in work.blocks:
        block.compile(backend=lambda gm, inputs: gm.forward)
    return work.model


def thunderpatch(work: Workload) -> nn.Module:
    return _patch(work)


def thunderpatch_inductor(work: Workload) -> nn.Module:
    """thunderpatch with thunder's torch_compile executor before the default ones."""
    _thunderfx()
    import thunder

    return _patch(work, executors=["torchcompile", *thunder.get_default_executors()])


def thunderpatch_tuned(work: Workload) -> nn.Module:
    """What `tune` chooses for a training step."""
    from thunderpatch import tune

    tune(work.model, *work.args, where=_one_of(work), backward=True, **work.kwargs)
    return work.model


def _patch(work: Workload, **options: Any) -> nn.Module:
    from thunderpatch import apply

    apply(work.model, where=_one_of(work), **options)
    return work.model


def _one_of(work: Workload) -> Callable[[nn.Module, str], bool]:
    chosen = {id(block) for block in work.blocks}
    return lambda module, fqn: id(module) in chosen


def _thunderfx() -> Callable[..., Any]:
    """Import thunder and lend it what it needs on this torch, for good: the process is the peer's own."""
    load_thunder()  # before the next line, which fails on a newer torch without it
    from thunder.dynamo import ThunderCompiler

    compile_graph = ThunderCompiler.__call__

    def compile_bridged(*args: Any, **kwargs: Any) -> Any:
        with backend_context():
            return compile_graph(*args, **kwargs)

    ThunderCompiler.__call__ = compile_bridged
    return load_thunderfx()


def _raise_limits() -> None:
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit = _MORE_THAN_ANY


class Unavailable(Exception):
    """The peer cannot run here; says why."""


PEERS: dict[str, Peer] = {
    "eager": eager,
    "thunderfx(model)": thunderfx_whole,
    "thunderfx per block": thunderfx_per_block,
    "Module.compile(ThunderCompiler)": module_compile,
    "accelerate compile_regions": accelerate_regions,
    "inductor per block": inductor_per_block,
    "Dynamo alone": dynamo_per_block,
    "thunderpatch": thunderpatch,
    "thunderpatch, torchcompile": thunderpatch_inductor,
    "thunderpatch, tuned": thunderpatch_tuned,
}
