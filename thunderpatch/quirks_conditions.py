"""How faults of thunder show in a node of a captured graph: a condition for each that is not just an op's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .quirks_nodes import argument, inputs, needs_grad, op_name, outputs, tensors, thunder_takes, value


def complex_numbers(node: fx.Node) -> bool:
    if not any(t.is_complex() for t in [*inputs(node), *outputs(node)]):
        return False
    return needs_grad(node) or op_name(node) in _WRONG_IN_COMPLEX or not thunder_takes(node)


# Without a gradient too: the mean beside a variance is real, and a sigmoid at infinity not NaN.
_WRONG_IN_COMPLEX = ("var_mean", "std_mean", "sigmoid", "expit", "special_expit")


def holds_subclass(node: fx.Node) -> bool:
    return any(is_traceable_wrapper_subclass(t) for t in [*inputs(node), *outputs(node)])


def scalar_among_larger(node: fx.Node) -> bool:
    """Whether a tensor without dimensions meets larger ones; on CPU thunder does not broadcast it."""
    given = inputs(node)
    scalars = any(t.dim() == 0 and t.requires_grad and t.device.type == "cpu" for t in given)
    return scalars and needs_grad(node) and any(t.dim() > 0 for t in given)


def empty(node: fx.Node) -> bool:
    return any(t.numel() == 0 for t in [*inputs(node), *outputs(node)])


def unknown(node: fx.Node) -> bool:
    """Whether this is a factory that thunder lacks and its splitter takes for known, having no tensor to try it on."""
    target: Any = node.target
    if not inspect.isbuiltin(target) or target.__module__ in ("_operator", "builtins", "math") or inputs(node):
        return False
    from thunder.torch import _torch_to_thunder_function_map

    return isinstance(value(node), torch.Tensor) and target not in _torch_to_thunder_function_map


def function_class(node: fx.Node) -> bool:
    known = "args_tensor_mask" in node.kwargs  # what thunder reads, and torch has dropped in 2.11
    return node.target is torch.ops.higher_order.autograd_function_apply and not known


def norm_that_nothing_reads(node: fx.Node) -> bool:
    """Whether this is a normalisation that does not lead to a result of the graph."""
    if op_name(node) != "batch_norm":
        return False
    found = [node]
    for reached in found:
        found += [user for user in reached.users if user not in found]
    return not any(reached.op == "output" for reached in found)


def loss_over_classes(node: fx.Node) -> bool:
    if op_name(node) not in ("cross_entropy", "nll_loss", "nll_loss_nd"):
        return False
    if op_name(node) == "nll_loss" and argument(node, 4, "ignore_index") is None and not needs_grad(node):
        return True
    scores, target = (tensors([argument(node, 0, "input")]), tensors([argument(node, 1, "target")]))
    if not scores or not target or target[0].is_floating_point():
        return False
    summed = argument(node, 6, "reduction", "mean") == "sum"
    smoothed = op_name(node) == "cross_entropy" and bool(argument(node, 7, "label_smoothing", 0.0))
    return scores[0].dim() not in (2, 4) or summed or smoothed


def norm_with_statistics(node: fx.Node) -> bool:
    updates = argument(node, 5, "use_input_stats", True) and argument(node, 1, "running_mean") is not None
    return op_name(node) == "instance_norm" and bool(updates)


def nearest(node: fx.Node) -> bool:
    if op_name(node) != "interpolate" or not str(argument(node, 3, "mode", "nearest")).startswith("nearest"):
        return False
    # Where sizes grow by a power of two, positions are exact in floating point, however they are computed.
    pairs = [
        pair
        for x, y in zip(inputs(node), outputs(node), strict=False)
        for pair in zip(x.shape[2:], y.shape[2:], strict=True)
    ]
    return any(after % before or (after // before) & (after // before - 1) for before, after in pairs)


def rounded_division(node: fx.Node) -> bool:
    return op_name(node) in ("div", "divide") and node.kwargs.get("rounding_mode") is not None and needs_grad(node)


def power(node: fx.Node) -> bool:
    exponent = argument(node, 1, "exponent")
    return op_name(node) == "pow" and needs_grad(node) and (exponent == 0 or isinstance(exponent, fx.Node))


def read_as_number(node: fx.Node) -> bool:
    """Whether a tensor says where, so that how to compile depends on what is in it."""
    start, index = argument(node, 2, "start"), argument(node, 1, "index")
    if op_name(node) == "narrow":
        return isinstance(value(start), torch.Tensor)
    return op_name(node) == "put" and needs_grad(node) and any(t.dim() == 0 for t in tensors([index]))


def lacks_gradient(node: fx.Node) -> bool:
    """Whether thunder would take the node, which needs no gradient, and could not differentiate it.

    Of nodes that need one the splitter finds out itself.
    """
    sources = [n for n in node.all_input_nodes if any(map(_differentiable, tensors(n)))]
    if needs_grad(node) or not sources or not thunder_takes(node):
        return False
    source = sources[0]
    before = source.meta.get("example_value")
    try:
        source.meta["example_value"] = pytree.tree_map_only(Tensor, _graded, before)
        return not thunder_takes(node)
    finally:
        source.meta["example_value"] = before


def _graded(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(_differentiable(tensor))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def drops_everything(node: fx.Node) -> bool:
    return op_name(node) == "dropout" and argument(node, 1, "p", 0.5) == 1 and needs_grad(node)


def without_its_first(node: fx.Node) -> bool:
    return op_name(node) == "baddbmm" and argument(node, 3, "beta", 1) == 0


def unbiased_of_all(node: fx.Node) -> bool:
    return op_name(node) in ("var", "std", "var_mean", "std_mean") and isinstance(argument(node, 1, "unbiased"), bool)


def pool_without_stride(node: fx.Node) -> bool:
    return op_name(node) == "max_pool3d" and argument(node, 2, "stride") is None and needs_grad(node)


def masked_attention(node: fx.Node) -> bool:
    mask = argument(node, 3, "attn_mask")
    return op_name(node) == "scaled_dot_product_attention" and mask is not None and needs_grad(node)


def bool_filled_with_number(node: fx.Node) -> bool:
    filled = op_name(node) == "masked_fill" and all(t.dtype == torch.bool for t in outputs(node))
    return filled and not isinstance(argument(node, 2, "value"), bool)


def largest_of_bools(node: fx.Node) -> bool:
    return op_name(node) == "max" and len(outputs(node)) == 2 and inputs(node)[0].dtype == torch.bool


def hook_on_what_is_used(node: fx.Node) -> bool:
    """Whether a hook goes on a value that the graph has used by another name, and so by another way of the gradient."""
    return op_name(node) == "register_hook" and len(node.all_input_nodes[0].users) > 1


def until_2_11(matches: Callable[[fx.Node], bool]) -> Callable[[fx.Node], bool]:
    # A string is compared as a version here.
    return lambda node: matches(node) and torch.__version__ < "2.12"


def method(name: str) -> Callable[[fx.Node], bool]:
    return lambda node: node.op == "call_method" and node.target == name


def named(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: op_name(node) in names


def graded(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: op_name(node) in names and needs_grad(node)
