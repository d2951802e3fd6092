"""Tensors that a graph makes of numbers alone: ``torch.div(x.shape[1], 2, rounding_mode="trunc")``, and sizes of them.

thunder makes a number of it, where eager has a tensor, and no compiler takes a tensor for a size. Dynamo's capture
knows their values, since they follow from what it guards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from .quirks_mutation import mutated, storages
from .quirks_nodes import is_call, op_name, value

# All that these take, but for the tensor that comes first, are numbers.
OF_A_TENSOR = {
    *("view", "reshape", "flatten", "unflatten", "as_strided", "expand", "broadcast_to", "repeat", "tile", "pad"),
    *("narrow", "select", "split", "chunk", "tensor_split", "unfold", "roll", "permute", "transpose", "movedim"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}
FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn", "arange", "linspace", "eye"}


def numbers_in_place_of_tensors(gm: fx.GraphModule) -> None:
    """Edit a graph so that sizes in it are numbers, and what is made of numbers alone is a tensor in thunder too."""
    # What is changed in place has had other values before the one that is known at the end.
    written = set().union(*(storages(mutated(node)) for node in gm.graph.nodes))
    for node in list(gm.graph.nodes):
        constant = _constant(node)
        if constant is None or storages(node) & written:
            continue
        for user in list(node.users):
            if not constant.is_floating_point():
                _as_size(node, int(constant), user)
        if not node.users:
            gm.graph.erase_node(node)
        elif not node.all_input_nodes and op_name(node) not in ("tensor", "scalar_tensor", "as_tensor"):
            node.op, node.target, node.args = "call_function", torch.tensor, (constant.item(),)
            node.kwargs = {"dtype": constant.dtype, "device": constant.device}


def _constant(node: fx.Node) -> Tensor | None:
    """Return the value of a node that computes a single real number, where the capture knows it."""
    fake = value(node) if is_call(node) else None
    found = fake.constant if isinstance(fake, FakeTensor) else None
    known = isinstance(found, Tensor) and found.dim() == 0 and not found.is_complex() and found.dtype != torch.bool
    return found if known else None


def _as_size(node: fx.Node, number: int, user: fx.Node) -> None:
    """Let a user of a node that takes it for a size take the number."""

    def replaced(args: Any) -> Any:
        return fx.map_arg(args, lambda given: number if given is node else given)

    if op_name(user) in FACTORIES:
        user.args, user.kwargs = replaced(user.args), replaced(user.kwargs)
    elif op_name(user) in OF_A_TENSOR and user.args:
        user.args, user.kwargs = (user.args[0], *replaced(user.args[1:])), replaced(user.kwargs)
