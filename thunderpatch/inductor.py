"""A part that inductor compiled, as autograd sees it: one whose gradient can be differentiated again.

The backward that AOT autograd makes refuses `create_graph=True`. Here it stands inside a function of autograd that
runs it in ordinary training, and recomputes the part as captured where the gradient itself needs a history.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from . import graphs, symbols
from .dispatch import RunFailure
from .errors import CompileError
from .reach import Reach
from .recomputation import Observed, Recomputation, Region, is_tensor

_keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class InductorPart:
    """Runs what inductor made of a part; the first call settles which kind all are, since Dynamo guards that."""

    def __init__(self, compiled: Callable[..., Any], captured: fx.GraphModule, region: Region) -> None:
        self.compiled, self.region = compiled, region
        self._views = _returns_views(captured)
        self._layouts = [_strides(graphs.example(node)) for node in captured.graph.nodes if node.op == "placeholder"]
        self.reach = Reach(captured, len(pytree.tree_leaves(graphs.output(captured).args[0])))
        self._recomputation: Recomputation | None = None
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def _first_call(self, *args: Any) -> Any:
        self.compiled = _laid_out(self.compiled, self._layouts, args)
        try:
            return self._settle(*args)
        except Exception as error:
            raise RunFailure from error

    def _settle(self, *args: Any) -> Any:
        """Run for the first time, and choose how all calls run."""
        if not torch.is_grad_enabled() or not any(_wants_gradient(arg) for arg in args):
            result = self.compiled(*args)
            self._call = self.compiled
        elif self._views:  # a view has to stay one, for what writes to it
            result = self._once_only(*args)
            self._call = self._once_only
        else:
            result = _apply(self, Observed(args), *args)
            self._call = functools.partial(_apply, self, None)
        return result

    def recomputation(self, args: Sequence[Any], observed: Observed | None) -> Recomputation:
        """Return what a backward needs that is to be differentiated; made after the first call."""
        if self._recomputation is None:
            assert observed is not None
            self._recomputation = Recomputation(self.region, args, observed, {})
        return self._recomputation

    def _once_only(self, *args: Any) -> Any:
        result = self.compiled(*args)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        for node in {output.grad_fn for output in outputs if _wants_gradient(output) and output.grad_fn is not None}:
            node.register_prehook(self._refuse)
        return result

    def _refuse(self, grads: Any) -> None:
        if torch.is_grad_enabled():
            raise CompileError(
                f"{self.region.owner}: double backward (create_graph=True) does not work through a part of it that "
                "inductor compiled and that returns a view. Leave the region out: thunderpatch.disabled(model) around "
                "this step, or apply(..., exclude=...)."
            )


class _Differentiable(torch.autograd.Function):
    """Puts a compiled function's own piece of autograd's graph behind a node that can also recompute it."""

    @staticmethod
    def forward(ctx: Any, part: InductorPart, observed: Observed | None, *args: Any) -> Any:
        given = [_behind(arg) if _wants_gradient(arg) else arg for arg in args]
        hooked = _hooks(False) is not None
        ctx.saved = _InTheOpen() if hooked else contextlib.nullcontext()
        with torch.enable_grad(), ctx.saved:
            result = part.compiled(*given)
        if hooked:
            ctx.save_for_backward(*ctx.saved.hand_over())
        single = is_tensor(result)
        outputs = [result] if single else result
        # Edges and not tensors: they keep no values alive.
        ctx.inputs = [get_gradient_edge(g) if g is not arg else None for g, arg in zip(given, args, strict=True)]
        ctx.outputs = [get_gradient_edge(o) if is_tensor(o) and o.requires_grad else None for o in outputs]
        ctx.recomputation, ctx.reach = part.recomputation(args, observed), part.reach
        ctx.held = ctx.recomputation.hold(args)
        ctx.set_materialize_grads(False)
        plain = [output.detach() if is_tensor(output) else output for output in outputs]
        ctx.mark_non_differentiable(
            *[p for p, edge in zip(plain, ctx.outputs, strict=True) if edge is None and is_tensor(p)]
        )
        return plain[0] if single else tuple(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        recomputation: Recomputation = ctx.recomputation
        if torch.is_grad_enabled():
            inputs = recomputation.inputs(ctx.held, (), "double backward (create_graph=True)")
            return None, None, *recomputation.recomputed(inputs, grads, create_graph=True)
        pairs = [(edge, grad) for edge, grad in zip(ctx.outputs, grads, strict=True) if edge and grad is not None]
        wanted = [e if needed else None for e, needed in zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)]
        some = [edge for edge in wanted if edge]
        if not pairs or not some:
            return (None,) * (2 + len(wanted))
        edges, given = zip(*pairs, strict=True)
        keep = _keeps_graph()
        saved = ctx.saved_tensors  # a checkpoint gives them once
        opened = ctx.saved.opened(saved) if saved else contextlib.nullcontext()
        # Nothing was donated when it was compiled, but what runs the backward asks the setting of now.
        with opened, _no_donation() if keep else contextlib.nullcontext():
            found = iter(torch.autograd.grad(edges, some, given, retain_graph=keep, allow_unused=True))
        arrived = [next(found) if edge else None for edge in wanted]
        reached = ctx.reach.without([k for k, grad in enumerate(grads) if grad is None])
        if reached is None:
            return None, None, *arrived
        return None, None, *(grad if i in reached else None for i, grad in enumerate(arrived))


class _InTheOpen(torch.autograd.graph.saved_tensors_hooks):
    """Collects what a piece of autograd's graph saves, for the node that it stands behind to save instead.

    Hooks of the caller's then meet one node and one backward. A checkpoint computes its region again in each
    backward that asks for a saved tensor, and the backward of a part is one inside another.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        super().__init__(self._pack, self._tensors_at)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def _tensors_at(self, index: int) -> torch.Tensor:
        return self._tensors[index]

    def hand_over(self) -> list[torch.Tensor]:
        """Return what was saved, and keep none of it."""
        saved, self._tensors = self._tensors, []
        return saved

    @contextlib.contextmanager
    def opened(self, saved: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have the tensors back for the length of a backward."""
        self._tensors = list(saved)
        try:
            yield
        finally:
            self._tensors = []


# The hooks of the caller that is saving tensors now. Where torch does not tell, none are taken to be there.
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)


def _strides(value: Any) -> tuple[int, ...] | None:
    """Return the strides that inductor compiles for; None where it is not particular."""
    if not is_tensor(value) or value.layout is not torch.strided:
        return None
    return tuple(value.stride()) if all(type(size) is int for size in value.stride()) else None


def _laid_out(
    compiled: Callable[..., Any], layouts: Sequence[tuple[int, ...] | None], args: Sequence[Any]
) -> Callable[..., Any]:
    """Return `compiled` behind a copy of those arguments that are laid out otherwise than it was compiled for.

    They come from a part that thunder compiled: of `repeat`, say, it makes an expanded tensor. They are the same ones
    at each call.
    """
    moved = {
        place: layout
        for place, (layout, arg) in enumerate(zip(layouts, args, strict=True))
        if layout is not None
        and is_tensor(arg)  # a size is captured as a tensor where it comes out of one
        and any(size > 1 and a != b for size, a, b in zip(arg.shape, arg.stride(), layout, strict=True))
    }
    if not moved:
        return compiled

    def call(*args: Any) -> Any:
        given = list(args)
        for place, layout in moved.items():
            given[place] = torch.empty_strided(
                args[place].shape, layout, dtype=args[place].dtype, device=args[place].device
            ).copy_(args[place])
        return compiled(*given)

    return call


def _no_donation() -> Any:
    config = torch._functorch.config
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else contextlib.nullcontext()


class _Behind(torch.autograd.Function):
    """A node that a gradient arrives at, and that holds nothing of the value which passes it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, boxed: list[torch.Tensor]) -> torch.Tensor:
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)


def _behind(value: torch.Tensor) -> torch.Tensor:
    """Return `value` with a history of its own. A parameter stays alive anyway: a leaf will do."""
    if type(value) is torch.nn.Parameter:
        return value.detach().requires_grad_()
    with torch.enable_grad():
        return _Behind.apply(_ANCHOR, [value.detach()])  # type: ignore[no-any-return, no-untyped-call]


def _wants_gradient(value: Any) -> bool:
    return is_tensor(value) and value.requires_grad


def _returns_views(part: fx.GraphModule) -> bool:
    """Whether an output lives in the memory of an input or of another output; True where that is not known."""
    results = next(node for node in part.graph.nodes if node.op == "output").all_input_nodes
    inputs = [graphs.example(node) for node in graphs.placeholders(part)]
    outputs = [graphs.example(node) for node in results]
    if not all(isinstance(value, (torch.Tensor, int, float, bool, *symbols.SYMBOLS)) for value in (*inputs, *outputs)):
        return True
    taken = {value.untyped_storage()._cdata for value in inputs if is_tensor(value)}
    made = [value.untyped_storage()._cdata for value in outputs if is_tensor(value)]
    return len(set(made)) < len(made) or not taken.isdisjoint(made)


# See `autograd._apply`.
_apply: Callable[..., Any] = getattr(super(torch.autograd.Function, _Differentiable), "apply", _Differentiable.apply)
