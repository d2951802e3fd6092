"""What thunder 0.2.x gets wrong: how each fault shows in a node, and where such a node goes instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from . import quirks_conditions as conditions
from .quirks_conditions import graded, method, named, until_2_11

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


_FUNCTORCH = ("torch._functorch.predispatch", "torch._functorch.eager_transforms", "torch._C._functorch")
QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "complex numbers",
        conditions.complex_numbers,
        "thunder's gradients of complex numbers lack conjugation, and inductor fails on some of their operations",
        EAGER,
    ),
    Quirk("empty tensor", conditions.empty, "thunder loses the gradient of an empty tensor, or fails on it", EAGER),
    Quirk(
        "unknown factory",
        conditions.unknown,
        "thunder does not know the function, which its splitter finds out too late",
    ),
    Quirk(
        "loss over classes",
        conditions.loss_over_classes,
        "thunder's loss fails as a sum, in 3 or over 4 dimensions, or without a gradient, and smooths ignored labels",
    ),
    Quirk("instance_norm statistics", conditions.norm_with_statistics, "thunder computes running statistics wrongly"),
    Quirk(
        "statistics alone",
        conditions.norm_that_nothing_reads,
        "thunder loses the running statistics of a normalisation of which nothing reads the result",
        EAGER,
    ),
    Quirk("interpolate nearest", conditions.nearest, "thunder rounds the positions of neighbours differently"),
    Quirk("rounded division", conditions.rounded_division, "thunder's gradient of a rounded division is not zero"),
    Quirk("prod", graded("prod"), "thunder's gradient of a product is NaN where an input is zero", EAGER),
    Quirk("index_reduce", until_2_11(named("index_reduce")), "inductor fails on what is laid out otherwise", EAGER),
    Quirk(
        "cumprod",
        until_2_11(graded("cumprod")),
        "inductor's gradient of a cumulative product is wrong at NaN and at zeros",
        EAGER,
    ),
    Quirk(
        "clamp",
        graded("clamp", "clip"),
        "thunder's gradient of clamp is 0 at its bounds, where eager's is 1",
    ),
    Quirk(
        "copysign",
        graded("copysign"),
        "thunder's gradient of copysign lacks the sign's and is wrong at zero and NaN",
    ),
    Quirk("atan2", graded("atan2", "arctan2"), "thunder's gradient of atan2 is NaN at the origin"),
    Quirk(
        "atleast",
        named("atleast_1d", "atleast_2d", "atleast_3d"),
        "thunder leaves the tensors of a sequence as they are",
    ),
    Quirk(
        "exponential unit",
        graded("elu", "celu", "selu", "mish"),
        "thunder's gradient is NaN above about 88, where an exponential overflows",
        THUNDER,
    ),
    Quirk(
        "sigmoid",
        graded("sigmoid", "expit", "special_expit"),
        "thunder's gradient of sigmoid is NaN below about -88",
        THUNDER,
    ),
    Quirk(
        "scalar tensor",
        conditions.scalar_among_larger,
        "thunder does not sum the gradient of a tensor without dimensions over what it was broadcast to",
    ),
    Quirk("pow", conditions.power, "thunder's gradient of x ** 0 is NaN at zero"),
    Quirk("take_along_dim", graded("take_along_dim"), "thunder's gradient fails on negative indices"),
    Quirk(
        "attention mask",
        conditions.masked_attention,
        "thunder's attention is NaN where a mask leaves nothing to look at, as for padding on the left",
    ),
    Quirk("normalize", graded("normalize"), "thunder's gradient of normalize is NaN at a vector of zeros"),
    Quirk(
        "max_pool1d", graded("max_pool1d"), "thunder shares a gradient among equal values, where eager takes the first"
    ),
    Quirk("max_pool3d", conditions.pool_without_stride, "thunder fails on max_pool3d whose stride is left out"),
    Quirk("dropout of all", conditions.drops_everything, "thunder's result does not require grad, where eager's does"),
    Quirk(
        "baddbmm",
        conditions.without_its_first,
        "thunder reads the first argument with beta=0, so that NaN in it spreads",
    ),
    Quirk("variance of all", conditions.unbiased_of_all, "thunder takes the flag `unbiased` for a dimension"),
    Quirk(
        "unfold", method("unfold"), "thunder takes the method for the function of that name, which does something else"
    ),
    Quirk(
        "where",
        method("where"),
        "thunder takes the tensor that the method belongs to for the condition",
        THUNDER,
    ),
    Quirk("masked_fill of bool", conditions.bool_filled_with_number, "thunder makes integers of a mask filled with 1"),
    Quirk("max of bool", conditions.largest_of_bools, "thunder asks for an argmax of bool, which torch does not have"),
    Quirk("max", graded("max"), "thunder's gradient of max is NaN everywhere when one input is"),
    Quirk("index_put", graded("index_put"), "thunder loses gradients of index_put"),
    Quirk(
        "piecewise constant",
        graded("ceil", "floor", "zero"),
        "thunder's result does not require grad, where eager's does",
    ),
    Quirk("autograd.Function", conditions.function_class, "thunder reads what this torch no longer writes"),
    Quirk("diagonal", named("diagonal"), "thunder returns a copy, not a view"),
    Quirk(
        "broadcast_to",
        method("broadcast_to"),
        "thunder knows the function and not the method, which its splitter mixes up",
    ),
    Quirk(
        "multilabel_margin_loss",
        named("multilabel_margin_loss"),
        "inductor counts the labels after the first -1, which end the list",
        EAGER,
    ),
    Quirk("hook", named("register_hook"), "a hook on a tensor is lost where a graph is cut before it", EAGER),
    Quirk(
        "number in a tensor",
        conditions.read_as_number,
        "inductor cannot compile what depends on a tensor's value",
        EAGER,
    ),
    Quirk("NaN in a grid", named("grid_sample", "grid_sampler", "grid_sampler_2d"), "inductor gives 0 there", EAGER),
    Quirk("relu of NaN", graded("relu"), "thunder turns NaN into 0 when a gradient is needed", THUNDER),
)
TRANSFORM = Quirk(
    "functorch",
    lambda node: getattr(node.target, "__module__", None) in _FUNCTORCH,
    "thunder does not know what vmap and grad are captured as",
)
# A part of it would be traced with inference mode switched on halfway: that fails, and leaves the thread's state wrong.
INFERENCE = Quirk(
    "inference mode",
    named("enter_inference_mode"),
    "neither thunder nor inductor makes what is computed in inference mode an inference tensor",
    EAGER,
)
NO_GRADIENT = Quirk(
    "no gradient",
    conditions.lacks_gradient,
    "thunder has no gradient for it, and wants one for all that a part with gradients computes",
)
HOOK = Quirk(
    "hook on a value",
    conditions.hook_on_what_is_used,
    "a hook on a value that is used elsewhere must find its gradient whole",
    EAGER,
)
SUBCLASS = Quirk(
    "tensor subclass", conditions.holds_subclass, "thunder does not know DTensor and what else wraps tensors"
)
