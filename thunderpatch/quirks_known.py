"""What thunder 0.2.x gets wrong: how each fault shows in a node, and where such a node goes instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .quirks_nodes import argument, inputs, needs_grad, op_name, outputs, tensors, thunder_takes, value

INDUCTOR, EAGER, THUNDER = "inductor", "eager", "thunder"


@dataclass(frozen=True)
class Quirk:
    """One fault of thunder: ``matches`` recognises the nodes that show it, ``reason`` says what is wrong.

    ``target`` is where such a node goes: to inductor; to thunder, in other words that it gets right; or, as it is, to
    neither, which takes the operations around it that thunder does not run along.
    """

    name: str
    matches: Callable[[fx.Node], bool]
    reason: str
    target: str = INDUCTOR


def _complex(node: fx.Node) -> bool:
    if not any(t.is_complex() for t in [*inputs(node), *outputs(node)]):
        return False
    return needs_grad(node) or not thunder_takes(node)


def holds_subclass(node: fx.Node) -> bool:
    return any(is_traceable_wrapper_subclass(t) for t in [*inputs(node), *outputs(node)])


def _scalar_among_larger(node: fx.Node) -> bool:
    """Whether a tensor without dimensions meets larger ones; on CPU thunder does not broadcast it."""
    given = inputs(node)
    scalars = any(t.dim() == 0 and t.requires_grad and t.device.type == "cpu" for t in given)
    return scalars and needs_grad(node) and any(t.dim() > 0 for t in given)


def _empty(node: fx.Node) -> bool:
    return any(t.numel() == 0 for t in [*inputs(node), *outputs(node)])


def _unknown(node: fx.Node) -> bool:
    """Whether this is a factory that thunder lacks and its splitter takes for known, having no tensor to try it on."""
    target: Any = node.target
    if not inspect.isbuiltin(target) or target.__module__ in ("_operator", "builtins", "math") or inputs(node):
        return False
    from thunder.torch import _torch_to_thunder_function_map

    return isinstance(value(node), torch.Tensor) and target not in _torch_to_thunder_function_map


def _function_class(node: fx.Node) -> bool:
    known = "args_tensor_mask" in node.kwargs  # what thunder reads, and torch has dropped in 2.11
    return node.target is torch.ops.higher_order.autograd_function_apply and not known


def _loss_over_classes(node: fx.Node) -> bool:
    if op_name(node) not in ("cross_entropy", "nll_loss", "nll_loss_nd"):
        return False
    scores, target = (tensors([argument(node, 0, "input")]), tensors([argument(node, 1, "target")]))
    if not scores or not target or target[0].is_floating_point():
        return False
    summed = argument(node, 6, "reduction", "mean") == "sum"
    smoothed = op_name(node) == "cross_entropy" and bool(argument(node, 7, "label_smoothing", 0.0))
    return scores[0].dim() not in (2, 4) or summed or smoothed


def _norm_with_statistics(node: fx.Node) -> bool:
    updates = argument(node, 5, "use_input_stats", True) and argument(node, 1, "running_mean") is not None
    return op_name(node) == "instance_norm" and bool(updates)


def _nearest(node: fx.Node) -> bool:
    if op_name(node) != "interpolate" or not str(argument(node, 3, "mode", "nearest")).startswith("nearest"):
        return False
    # Where sizes grow by a power of two, positions are exact in floating point, however they are computed.
    pairs = [
        pair
        for x, y in zip(inputs(node), outputs(node), strict=False)
        for pair in zip(x.shape[2:], y.shape[2:], strict=True)
    ]
    return any(after % before or (after // before) & (after // before - 1) for before, after in pairs)


def _rounded_division(node: fx.Node) -> bool:
    return op_name(node) in ("div", "divide") and node.kwargs.get("rounding_mode") is not None and needs_grad(node)


def _power(node: fx.Node) -> bool:
    exponent = argument(node, 1, "exponent")
    return op_name(node) == "pow" and needs_grad(node) and (exponent == 0 or isinstance(exponent, fx.Node))


def _read_as_number(node: fx.Node) -> bool:
    """Whether a tensor says where, so that how to compile depends on what is in it."""
    start, index = argument(node, 2, "start"), argument(node, 1, "index")
    if op_name(node) == "narrow":
        return isinstance(value(start), torch.Tensor)
    return op_name(node) == "put" and needs_grad(node) and any(t.dim() == 0 for t in tensors([index]))


def _masked_attention(node: fx.Node) -> bool:
    mask = argument(node, 3, "attn_mask")
    return op_name(node) == "scaled_dot_product_attention" and mask is not None and needs_grad(node)


def _hook_on_what_is_used(node: fx.Node) -> bool:
    """Whether a hook goes on a value that the graph has used by another name, and so by another way of the gradient."""
    return op_name(node) == "register_hook" and len(node.all_input_nodes[0].users) > 1


def _until_2_11(*names: str) -> Callable[[fx.Node], bool]:
    # A string is compared as a version here.
    return lambda node: op_name(node) in names and needs_grad(node) and torch.__version__ < "2.12"


def _method(name: str) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_method" and node.target == name


def _named(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: op_name(node) in names


def _graded(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: op_name(node) in names and needs_grad(node)


_FUNCTORCH = ("torch._functorch.predispatch", "torch._functorch.eager_transforms", "torch._C._functorch")
QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "complex numbers",
        _complex,
        "thunder's gradients of complex numbers lack conjugation, and inductor fails on some of their operations",
        EAGER,
    ),
    Quirk("empty tensor", _empty, "thunder loses the gradient of an empty tensor, or fails on it", EAGER),
    Quirk(
        "unknown factory",
        _unknown,
        "thunder does not know the function, which its splitter finds out too late",
    ),
    Quirk(
        "loss over classes",
        _loss_over_classes,
        "thunder's loss fails as a sum and in 3 or over 4 dimensions, and smooths ignored labels",
    ),
    Quirk("instance_norm statistics", _norm_with_statistics, "thunder computes running statistics wrongly"),
    Quirk("interpolate nearest", _nearest, "thunder rounds the positions of neighbours differently"),
    Quirk("rounded division", _rounded_division, "thunder's gradient of a rounded division is not zero"),
    Quirk("prod", _graded("prod"), "thunder's gradient of a product is NaN where an input is zero", EAGER),
    Quirk("index_reduce", _until_2_11("index_reduce"), "inductor fails on what is laid out otherwise", EAGER),
    Quirk(
        "cumprod",
        _until_2_11("cumprod"),
        "inductor's gradient of a cumulative product is wrong at NaN and at zeros",
        EAGER,
    ),
    Quirk(
        "clamp",
        _graded("clamp", "clip"),
        "thunder's gradient of clamp is 0 at its bounds, where eager's is 1",
    ),
    Quirk(
        "copysign",
        _graded("copysign"),
        "thunder's gradient of copysign lacks the sign's and is wrong at zero and NaN",
    ),
    Quirk("atan2", _graded("atan2", "arctan2"), "thunder's gradient of atan2 is NaN at the origin"),
    Quirk(
        "atleast",
        _named("atleast_1d", "atleast_2d", "atleast_3d"),
        "thunder leaves the tensors of a sequence as they are",
    ),
    Quirk(
        "exponential unit",
        _graded("elu", "celu", "selu", "mish"),
        "thunder's gradient is NaN above about 88, where an exponential overflows",
        THUNDER,
    ),
    Quirk(
        "sigmoid",
        _graded("sigmoid", "expit", "special_expit"),
        "thunder's gradient of sigmoid is NaN below about -88",
        THUNDER,
    ),
    Quirk(
        "scalar tensor",
        _scalar_among_larger,
        "thunder does not sum the gradient of a tensor without dimensions over what it was broadcast to",
    ),
    Quirk("pow", _power, "thunder's gradient of x ** 0 is NaN at zero"),
    Quirk("take_along_dim", _graded("take_along_dim"), "thunder's gradient fails on negative indices"),
    Quirk(
        "attention mask",
        _masked_attention,
        "thunder's attention is NaN where a mask leaves nothing to look at, as for padding on the left",
    ),
    Quirk("max", _graded("max"), "thunder's gradient of max is NaN everywhere when one input is"),
    Quirk("index_put", _graded("index_put"), "thunder loses gradients of index_put"),
    Quirk(
        "piecewise constant",
        _graded("ceil", "floor", "zero"),
        "thunder's result does not require grad, where eager's does",
    ),
    Quirk("autograd.Function", _function_class, "thunder reads what this torch no longer writes"),
    Quirk("diagonal", _named("diagonal"), "thunder returns a copy, not a view"),
    Quirk(
        "broadcast_to",
        _method("broadcast_to"),
        "thunder knows the function and not the method, which its splitter mixes up",
    ),
    Quirk(
        "multilabel_margin_loss",
        _named("multilabel_margin_loss"),
        "inductor counts the labels after the first -1, which end the list",
        EAGER,
    ),
    Quirk("hook", _named("register_hook"), "a hook on a tensor is lost where a graph is cut before it", EAGER),
    Quirk("number in a tensor", _read_as_number, "inductor cannot compile what depends on a tensor's value", EAGER),
    Quirk("as_strided in place", _method("as_strided_"), "inductor loses the new shape", EAGER),
    Quirk("NaN in a grid", _named("grid_sample", "grid_sampler", "grid_sampler_2d"), "inductor gives 0 there", EAGER),
    Quirk("relu of NaN", _graded("relu"), "thunder turns NaN into 0 when a gradient is needed", THUNDER),
)
TRANSFORM = Quirk(
    "functorch",
    lambda node: getattr(node.target, "__module__", None) in _FUNCTORCH,
    "thunder does not know what vmap and grad are captured as",
)
# A part of it would be traced with inference mode switched on halfway: that fails, and leaves the thread's state wrong.
INFERENCE = Quirk(
    "inference mode",
    _named("enter_inference_mode"),
    "neither thunder nor inductor makes what is computed in inference mode an inference tensor",
    EAGER,
)
HOOK = Quirk(
    "hook on a value",
    _hook_on_what_is_used,
    "a hook on a value that is used elsewhere must find its gradient whole",
    EAGER,
)
SUBCLASS = Quirk("tensor subclass", holds_subclass, "thunder does not know DTensor and what else wraps tensors")
