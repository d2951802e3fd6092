"""The options of one `apply`: checked once, never mutated, and hashable so that equal ones share code."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import ArgumentError, UnsupportedEnvironmentError

# What thunder.jit takes by name (lightning-thunder 0.2.6) and the compile options that it and its executors
# look up by name. thunder itself accepts any keyword and ignores a misspelt one in silence.
_THUNDER = frozenset(
    [
        "langctx",
        "executors",
        "sharp_edges",
        "cache",
        "disable_torch_autograd",
        "transforms",
        "debug_options",
        "fusion_type",
        "skip_inplace_alias_updates",
        "disable_inplace_copy_check",
        "thunderfx_disable_split_autograd",
        "auto_recompute_intermediates",
        "disable_replace_uniform",
        "torch_compile_fullgraph",
        "sdpa_debug",
        "use_apex_cross_entropy",
        "cudnn_sdpa_bwd_may_cat_grad_qkv",
        "nv_enable_scatter",
        "nv_store_fusion_inputs",
        "nv_skip_cache",
        "nv_save_fake_inputs",
        "nv_enable_shape_only_fusion",
        "nv_enable_sdpa",
        "nv_enable_options",
        "nv_enable_matmul",
        "nv_enable_linear",
        "nv_enable_embedding",
        "nv_disable_options",
    ]
)
_TORCH = frozenset(["dynamic", "fullgraph", "mode", "options"])
_ELSEWHERE = {
    "backend": "thunder is the backend here; use torch.compile for another one",
    "disable": "use thunderpatch.disabled(model) to run the originals for a while",
    "recompile_limit": "thunderpatch gives each region a budget of its own",
    "isolate_recompiles": "thunderpatch isolates each region already",
}


@dataclass(frozen=True)
class Options:
    """One set of options. `key` decides equality: two equal ones share groups and compiled graphs."""

    thunder: Mapping[str, Any] = field(compare=False, hash=False)
    inductor: Mapping[str, Any] = field(compare=False, hash=False)
    dynamic: bool | None
    fullgraph: bool
    on_error: str
    check: bool
    direct: bool
    double_backward: bool
    isolate: bool
    key: tuple[Any, ...]

    def __str__(self) -> str:
        shown = dict(self.thunder)
        shown |= {"dynamic": self.dynamic} if self.dynamic is not None else {}
        shown |= {"fullgraph": True} if self.fullgraph else {}
        shown |= {"options": dict(self.inductor)} if self.inductor else {}
        shown |= {"on_error": self.on_error} if self.on_error != "raise" else {}
        shown |= {name: True for name in ("check", "double_backward", "isolate") if getattr(self, name)}
        shown |= {"direct": False} if not self.direct else {}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items()) or "defaults"


def read_options(
    given: Mapping[str, Any],
    *,
    on_error: str,
    check: bool,
    direct: bool,
    double_backward: bool = False,
    isolate: bool = False,
) -> Options:
    """Check the keywords of an `apply` and return them as `Options`.

    Everything is copied: neither thunder nor torch sees an object of the caller that it could append to.
    Raises `ArgumentError` for an unknown option or a value that thunder or torch would refuse later.
    """
    if on_error not in ("raise", "eager"):
        raise ArgumentError(f"on_error must be 'raise' or 'eager', not {on_error!r}")
    switches = {"check": check, "direct": direct, "double_backward": double_backward, "isolate": isolate}
    for name, value in switches.items():
        if value not in (True, False):
            raise ArgumentError(f"{name} must be True or False, not {value!r}")
    if isolate and "recompile_limit" not in inspect.signature(torch.compile).parameters:
        raise UnsupportedEnvironmentError(
            f"isolate=True needs torch 2.12 or newer, whose Dynamo looks into a proxy; this is {torch.__version__}"
        )
    for name in given:
        if name in _ELSEWHERE:
            raise ArgumentError(f"option {name!r} is not taken: {_ELSEWHERE[name]}")
        if name not in _THUNDER | _TORCH:
            near = difflib.get_close_matches(name, [*_THUNDER, *_TORCH], n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ArgumentError(f"{name!r} is neither a selector nor an option of thunderfx{hint}")
    dynamic, fullgraph = given.get("dynamic"), given.get("fullgraph", False)
    if dynamic not in (None, True, False):
        raise ArgumentError(f"dynamic must be None, True or False, not {dynamic!r}")
    if fullgraph not in (True, False):
        raise ArgumentError(f"fullgraph must be True or False, not {fullgraph!r}")
    thunder_options = {name: _copied(value) for name, value in given.items() if name in _THUNDER}
    _let_thunder_judge(thunder_options)
    inductor = _inductor_options(given.get("mode"), given.get("options"))
    rest = (dynamic, bool(fullgraph), on_error, check, direct, double_backward, isolate)
    return Options(thunder_options, inductor, *rest, key=(_frozen(thunder_options), _frozen(inductor), *rest))


def _let_thunder_judge(options: Mapping[str, Any]) -> None:
    from .compat import load_thunder

    thunder = load_thunder()
    try:
        thunder.jit(lambda x: x, **{name: _copied(value) for name, value in options.items()})
        for transform in options.get("transforms") or ():
            if not isinstance(transform, thunder.core.transform_common.Transform):
                raise TypeError(f"transforms holds {transform!r}, which is no thunder Transform")
    except Exception as error:
        raise ArgumentError(f"thunder refuses these options ({error}): {dict(options)!r}") from error


def _inductor_options(mode: Any, options: Any) -> dict[str, Any]:
    """What torch.compile's `mode` and `options` mean for the parts that thunder leaves to inductor."""
    if mode is None and options is None:
        return {}
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"options must be a dict of inductor settings, not {type(options).__name__}")
    if mode is not None and options:
        raise ArgumentError("give mode or options, not both, as torch.compile asks")
    import torch._inductor

    modes = torch._inductor.list_mode_options()
    if mode is not None and mode not in (known := ["default", *modes]):
        raise ArgumentError(f"mode must be one of {sorted(set(known))}, not {mode!r}")
    settings = dict(modes.get(mode, {}) if mode else options or {})
    known_settings = set(torch._inductor.list_options())
    for name in settings:
        if name.replace("-", "_") not in known_settings:
            near = difflib.get_close_matches(name, known_settings, n=3)
            raise ArgumentError(f"options: inductor has no setting {name!r}; near it: {', '.join(near)}")
    return settings


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


class _Same:
    """Stands for an object that cannot be hashed: equal only to itself."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _frozen(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value).__name__, value
