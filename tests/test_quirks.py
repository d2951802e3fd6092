from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dynamo import own, raw
from torch import Tensor, fx

from thunderpatch import compat
from thunderpatch.quirks import IN_PLACE, Route, reroute
from thunderpatch.quirks_known import EAGER, INDUCTOR, QUIRKS, THUNDER
from thunderpatch.quirks_mutation import mutated

NAN = float("nan")


def given(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


@dataclass(frozen=True)
class Evidence:
    """A function that raw thunderfx gets wrong on these inputs."""

    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 3)
    return y.relu()


COMPLEX = torch.complex64
EVIDENCE: dict[str, Evidence] = {
    "complex numbers": Evidence(lambda x: x * x, lambda: (normal(3, dtype=COMPLEX),)),
    "empty tensor": Evidence(lambda x: x.chunk(2)[0] * 2, lambda: (normal(0, 3),)),
    "unknown factory": Evidence(lambda x: torch.linspace(0, 1, 3) * x, lambda: (normal(3),)),
    "loss over classes": Evidence(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda: (normal(4, 3), torch.tensor([0, -100, 2, 1])),
    ),
    "instance_norm statistics": Evidence(
        lambda x, mean, var: F.instance_norm(x, mean, var),
        lambda: (normal(2, 3, 5), torch.zeros(3), torch.ones(3)),
    ),
    "statistics alone": Evidence(
        lambda x, weight, mean, var: (F.batch_norm(x, mean, var, weight, training=True), weight * 2)[1],
        lambda: (normal(4, 3, grad=False), normal(3), torch.zeros(3), torch.ones(3)),
    ),
    "interpolate nearest": Evidence(lambda x: F.interpolate(x, scale_factor=0.6), lambda: (normal(1, 1, 4),)),
    "rounded division": Evidence(
        lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda: (given(1.0, 5.0), given(0.0, 2.0))
    ),
    "prod": Evidence(lambda x: x.prod(), lambda: (given(0.0, 2.0),)),
    "cumprod": Evidence(lambda x: x.cumprod(0), lambda: (given(0.0, 0.0, NAN),)),
    "clamp": Evidence(lambda x: x.clamp(0.0, 1.0), lambda: (given(0.0, 1.0),)),
    "copysign": Evidence(torch.copysign, lambda: (given(NAN), given(0.0))),
    "atan2": Evidence(torch.atan2, lambda: (given(0.0), given(0.0))),
    "sigmoid": Evidence(torch.sigmoid, lambda: (given(-100.0),)),
    "exponential unit": Evidence(F.elu, lambda: (given(200.0),)),
    "scalar tensor": Evidence(lambda x, y: x * y.sum(), lambda: (normal(3), normal(3))),
    "pow": Evidence(lambda x: x**0, lambda: (given(0.0, 1.0),)),
    "take_along_dim": Evidence(
        lambda x, i: torch.take_along_dim(x, i, 0), lambda: (given(1.0, 2.0), torch.tensor([-1]))
    ),
    "atleast": Evidence(lambda x, y: torch.atleast_3d([x, y]), lambda: (normal(2, 2), normal(2))),
    "attention mask": Evidence(
        lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        lambda: (normal(1, 2, 3, 4), torch.tensor([[[[False] * 3, [True] * 3, [True] * 3]]])),
    ),
    "normalize": Evidence(lambda x: F.normalize(x), lambda: (given(0.0, 0.0).detach().view(1, 2).requires_grad_(),)),
    "max_pool1d": Evidence(lambda x: F.max_pool1d(x, 2), lambda: (torch.ones(1, 1, 4, requires_grad=True),)),
    "max_pool3d": Evidence(lambda x: F.max_pool3d(x, 2), lambda: (normal(1, 2, 2, 2),)),
    "dropout of all": Evidence(lambda x: F.dropout(x, 1.0), lambda: (normal(3),)),
    "baddbmm": Evidence(
        lambda x, y: torch.baddbmm(x, y, y, beta=0), lambda: (torch.full((1, 2, 2), NAN), normal(1, 2, 2))
    ),
    "where": Evidence(
        lambda x, condition: x.where(condition, ~x),
        lambda: (torch.tensor([True, False]), torch.tensor([False, True])),
    ),
    "masked_fill of bool": Evidence(
        lambda x, mask: x.masked_fill(mask, 1), lambda: (torch.tensor([True, False]), torch.tensor([False, True]))
    ),
    "max of bool": Evidence(lambda x: x.max(0), lambda: (torch.tensor([True, False]),)),
    "max": Evidence(lambda x: x.max(), lambda: (given(1.0, NAN, 2.0),)),
    "index_put": Evidence(
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        lambda: (normal(3), torch.tensor([0, 1]), normal(2)),
    ),
    "piecewise constant": Evidence(torch.floor, lambda: (normal(3),)),
    "autograd.Function": Evidence(lambda x: Tripled.apply(x), lambda: (normal(3),)),
    "NaN in a grid": Evidence(
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        lambda: (normal(1, 1, 2, 2), torch.full((1, 1, 1, 2), NAN)),
    ),
    "multilabel_margin_loss": Evidence(
        lambda x, y: F.multilabel_margin_loss(x, y),
        lambda: (normal(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0]])),
    ),
    "hook": Evidence(hooked, lambda: (normal(3),)),
    "diagonal": Evidence(torch.diagonal, lambda: (normal(3, 3),)),
    "variance of all": Evidence(lambda x: torch.var_mean(x, True), lambda: (normal(3, 3, grad=False),)),
    "unfold": Evidence(lambda x: x.unfold(0, 2, 1), lambda: (normal(5, 5, grad=False),)),
    "relu of NaN": Evidence(F.relu, lambda: (given(NAN, 1.0),)),
}
# The tracer of thunder takes minutes to say that it lacks the method; inside Dynamo, inductor's error becomes a
# graph break.
TOLD_OTHERWISE = {"broadcast_to", "number in a tensor", "index_reduce"}
TARGETS = {quirk.name: quirk.target for quirk in QUIRKS}

NEAR_MISSES: dict[str, Evidence] = {
    "a complex value without a gradient": Evidence(lambda x: x * x, lambda: (normal(3, dtype=COMPLEX, grad=False),)),
    "a loss over a batch of classes": Evidence(F.cross_entropy, lambda: (normal(4, 3), torch.tensor([0, 1, 2, 1]))),
    "a loss against probabilities": Evidence(
        lambda x, y: F.cross_entropy(x, y), lambda: (normal(4, 3, 5), torch.rand(4, 3, 5))
    ),
    "instance_norm without statistics": Evidence(F.instance_norm, lambda: (normal(2, 3, 5),)),
    "batch_norm with statistics": Evidence(
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
        lambda: (normal(2, 3, 5), torch.zeros(3), torch.ones(3)),
    ),
    "interpolate to twice the size": Evidence(lambda x: F.interpolate(x, scale_factor=2.0), lambda: (normal(1, 1, 4),)),
    "plain division": Evidence(torch.div, lambda: (normal(3), given(1.0, 2.0, 3.0))),
    "clamp without a gradient": Evidence(lambda x: x.clamp(0.0, 1.0), lambda: (normal(3, grad=False),)),
    "attention without a mask": Evidence(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda: (normal(1, 2, 3, 4),)
    ),
    "a square": Evidence(lambda x: x**2, lambda: (normal(3),)),
    "torch.where": Evidence(
        lambda x, condition: torch.where(condition, x, -x), lambda: (normal(2), torch.tensor([False, True]))
    ),
    "a mask filled with True": Evidence(
        lambda x, mask: x.masked_fill(mask, True), lambda: (torch.tensor([True, False]), torch.tensor([False, True]))
    ),
    "amax": Evidence(lambda x: x.amax(), lambda: (normal(3),)),
    "relu without a gradient": Evidence(F.relu, lambda: (normal(3, grad=False),)),
    "var_mean over a dimension": Evidence(lambda x: torch.var_mean(x, 0), lambda: (normal(3, 2, grad=False),)),
    "an op of what needs no gradient": Evidence(lambda x, y: x * torch.exp(y), lambda: (normal(3), torch.ones(3))),
    "an op without a gradient, where nothing has one": Evidence(torch.trunc, lambda: (normal(3, grad=False),)),
    "a view of a buffer that is changed and read": Evidence(
        lambda x, y: (y[:1].add_(1), x + y)[1], lambda: (normal(3, grad=False), torch.ones(3))
    ),
    "an in-place op on a value of the graph": Evidence(lambda x: (x * 2).relu_(), lambda: (normal(3),)),
    "a counter": Evidence(lambda x, n: x * n.add_(1), lambda: (normal(3), torch.zeros(()))),
    "a change of an input without a gradient": Evidence(lambda x: x.mul_(2), lambda: (normal(3, grad=False),)),
}


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


def captured(function: Callable[..., Any], *inputs: Any) -> tuple[list[Route], fx.GraphModule]:
    """Return the routes of the one graph that Dynamo captures of a function, and the graph as edited."""
    compat.load_thunder()
    found: list[tuple[list[Route], fx.GraphModule]] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        with compat.backend_context():
            found.append((reroute(gm), gm))
        gm.recompile()
        return gm.forward

    torch.compile(own(function), backend=backend)(*inputs)
    assert len(found) == 1
    return found[0]


def facts(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Any]:
    """Return what a run shows: outputs, whether they need and share, gradients, inputs afterwards."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    passed = [x * 1 if x.requires_grad else x for x in leaves]
    out = function(*passed)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    shown: list[Any] = [[o.requires_grad for o in outputs], [o.shape for o in outputs]]
    shown.append([[o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in passed] for o in outputs])
    roots = [o for o in [*outputs, *passed] if o.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    total = sum((o.abs() if o.is_complex() else o).sum() for o in roots)
    gradients = torch.autograd.grad(total, wanted) if roots else ()
    return [*shown, *(x.detach() for x in [*outputs, *passed, *gradients])]


def same(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b) or a[:3] != b[:3]:
        return False
    return all(torch.allclose(x, y, equal_nan=True) for x, y in zip(a[3:], b[3:], strict=True))


def raw_is_right(evidence: Evidence) -> bool:
    torch.manual_seed(0)
    inputs = evidence.inputs()
    try:
        expected = facts(evidence.function, inputs)
    except RuntimeError:
        return True  # what eager refuses is nobody's promise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return same(expected, facts(raw(evidence.function), inputs))
        except Exception:
            return False


def test_each_quirk_has_evidence() -> None:
    assert {quirk.name for quirk in QUIRKS} == {*EVIDENCE, *TOLD_OTHERWISE}


# Told apart from the others by its time: thunder tries for minutes before it gives up on it.
SLOW = {"unknown factory"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.conformance) if name in SLOW else name for name in EVIDENCE]
)
def test_the_fault_is_still_in_thunder(name: str) -> None:
    """Fails on the day that thunder is right: then the quirk goes."""
    if name == "hook" and not ONLY_HERE[name]() and torch_says_nothing_of_the_tensors_of_a_function():
        pytest.skip("this torch captures a hook as an autograd.Function, on which thunder fails for another reason")
    right = (name == "clamp" and not eager_has_a_gradient_at_the_bounds_of_clamp()) or (
        name in ONLY_HERE and not ONLY_HERE[name]()
    )
    assert raw_is_right(EVIDENCE[name]) == right, f"thunder has {name!r} right now: take it off the list"


def torch_says_nothing_of_the_tensors_of_a_function() -> bool:
    """What thunder reads is there up to torch 2.10."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend("args_tensor_mask" not in n.kwargs for n in gm.graph.nodes if "apply" in n.name)
        return gm.forward

    torch.compile(Tripled.apply, backend=backend)(normal(3))
    assert len(found) == 1
    return found[0]


def eager_has_a_gradient_at_the_bounds_of_clamp() -> bool:
    """It is 1 up to torch 2.14 and 0, as thunder's, in 2.15."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    x.clamp(0.0, 1.0).sum().backward()
    return bool(x.grad.all())


def test_thunder_still_lacks_the_method_broadcast_to() -> None:
    compat.load_thunder()
    from thunder.core.proxies import TensorProxy
    from thunder.torch.langctx import torchctx

    assert not torchctx.has_method("broadcast_to") and not hasattr(TensorProxy, "broadcast_to")


def inductor_takes_cumprod_apart() -> bool:
    """It does up to torch 2.11, and what it makes of it has another gradient at NaN."""
    x = given(0.0, 0.0, NAN)
    compiled = torch.compile(lambda x: x.cumprod(0), backend="aot_eager_decomp_partition")
    gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, lambda x: x.cumprod(0))]
    return not torch.allclose(*gradients, equal_nan=True)


def eager_takes_negative_indices() -> bool:
    try:
        return bool(torch.take_along_dim(torch.ones(2), torch.tensor([-1]), 0).all())
    except RuntimeError:
        return False


def eager_has_a_gradient_of_atan2_at_the_origin() -> bool:
    x, y = given(0.0), given(0.0)
    torch.atan2(x, y).backward()
    return x.grad is not None and not bool(x.grad.isnan())


def dynamo_takes_a_hook_into_its_graph() -> bool:
    found: list[bool] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(any("hook" in n.name for n in gm.graph.nodes))
        return gm.forward

    torch.compile(own(hooked), backend=backend)(normal(3))
    torch._dynamo.reset()
    return any(found)


def inductor_counts_labels_after_the_end() -> bool:
    """torch 2.15 does no longer."""
    evidence = EVIDENCE["multilabel_margin_loss"]
    inputs = evidence.inputs()
    wrong = not torch.allclose(torch.compile(own(evidence.function))(*inputs), evidence.function(*inputs))
    torch._dynamo.reset()
    return wrong


# What depends on the torch: whether the fault is there.
ONLY_HERE: dict[str, Callable[[], bool]] = {
    "autograd.Function": torch_says_nothing_of_the_tensors_of_a_function,
    "cumprod": inductor_takes_cumprod_apart,
    "atan2": eager_has_a_gradient_of_atan2_at_the_origin,
    "hook": dynamo_takes_a_hook_into_its_graph,
    "multilabel_margin_loss": inductor_counts_labels_after_the_end,
    "take_along_dim": eager_takes_negative_indices,
}


def test_inductor_still_cannot_compile_what_depends_on_a_value() -> None:
    _, gm = captured(lambda x, i, y: x.put(i, y) + 1, normal(1), torch.tensor(0), normal(1))
    assert "outside_thunder_put" in gm.code
    fakes = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    with pytest.raises(Exception, match="_local_scalar_dense"):
        torch._inductor.compile(gm, fakes)


def test_inductor_fails_on_the_mean_of_index_reduce_over_strided_tensors_up_to_torch_2_11() -> None:
    x = torch.empty_strided((5, 5, 5), (50, 10, 2)).normal_().requires_grad_()
    y = torch.empty_strided((5, 2, 5), (100, 10, 2)).normal_().requires_grad_()
    i = torch.tensor([0, 1])
    function = raw(lambda x, i, y: torch.index_reduce(x, 1, i, y, "mean", include_self=False))
    if torch.__version__ < "2.12":
        with pytest.raises(Exception, match="copy_"):
            function(x, i, y)
    else:
        torch.testing.assert_close(function(x, i, y), torch.index_reduce(x, 1, i, y, "mean", include_self=False))


@pytest.mark.parametrize("name", [name for name in EVIDENCE if TARGETS[name] != THUNDER])
def test_what_thunder_gets_wrong_goes_where_it_is_right(name: str) -> None:
    evidence = EVIDENCE[name]
    if name in ONLY_HERE and not ONLY_HERE[name]():
        pytest.skip("not a fault of this torch")
    torch._dynamo.reset()
    routes, _ = captured(evidence.function, *evidence.inputs())
    assert name in {route.quirk for route in routes}
    assert {route.target for route in routes} == {TARGETS[name]}


def test_a_graph_of_nothing_but_what_runs_eager_runs_as_captured() -> None:
    (route,), gm = captured(lambda x: x.prod(), given(0.0, 2.0))
    assert route.whole_graph_eager and "NaN" in route.reason
    assert "outside_thunder" not in gm.code


def test_a_method_goes_where_its_function_goes() -> None:
    assert [r.quirk for r in captured(lambda x: x.clip(0.0, 1.0), normal(3))[0]] == ["clamp"]
    assert [r.quirk for r in captured(lambda x: torch.clamp(x, 0.0, 1.0), normal(3))[0]] == ["clamp"]
    assert [r.quirk for r in captured(lambda x: x.broadcast_to((2, 3)), normal(3))[0]] == ["broadcast_to"]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_thunder_gets_right_stays(name: str) -> None:
    evidence = NEAR_MISSES[name]
    assert captured(evidence.function, *evidence.inputs())[0] == []


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_stays_is_right_in_raw_thunder(name: str) -> None:
    if name != "an in-place op on a value of the graph":  # its relu is spelled out, for NaN
        assert raw_is_right(NEAR_MISSES[name])


IN_PLACE_ON_INPUT = {
    "method": lambda x: x.relu_(),
    "flag": lambda x: F.relu(x, inplace=True),
    "positional flag": lambda x: F.elu(x, 1.0, True),
    "augmented": lambda x: x.__imul__(2),
    "item": lambda x: x.__setitem__(0, 0.0),
    "view": lambda x: x.view(-1).mul_(2),
    "out": lambda x: torch.mul(x.detach(), 2, out=x.detach()),
    "copy": lambda x: x.copy_(x * 2),
}


@pytest.mark.parametrize("name", IN_PLACE_ON_INPUT)
def test_a_changed_input_with_a_gradient_makes_the_graph_eager(name: str) -> None:
    function = IN_PLACE_ON_INPUT[name]

    def changed(x: Tensor) -> Tensor:
        function(x)
        return x * 3

    routes, gm = captured(changed, normal(3) * 1)
    assert [(route.quirk, route.node, route.target) for route in routes] == [(IN_PLACE, "", EAGER)]
    assert "outside_thunder" not in gm.code


WITHOUT_A_GRADIENT = [torch.trunc, lambda y: torch.remainder(y, 2), lambda y: torch.minimum(y, y + 1)]


@pytest.mark.parametrize("op", WITHOUT_A_GRADIENT)
def test_what_thunder_cannot_differentiate_goes_to_inductor_where_something_else_has_a_gradient(
    op: Callable[[Tensor], Tensor],
) -> None:
    evidence = Evidence(lambda x, y: x * op(y), lambda: (normal(3), normal(3, grad=False)))
    routes, _ = captured(evidence.function, *evidence.inputs())
    assert [(route.quirk, route.target) for route in routes] == [("no gradient", INDUCTOR)]
    assert not raw_is_right(evidence), "thunder has this right now"


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "of a buffer that nothing reads": lambda x, b: (b[0].add_(1), x + 1)[1],
    "of a buffer that another part cut it from": lambda x, b: (b.narrow(0, 0, 1).mul_(2), x + b)[1],
    "of a value of its own that is returned": lambda x, b: (y := x * 1, y[:1].add_(b[0]))[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_change_of_a_view_that_thunder_fails_on_goes_elsewhere(name: str) -> None:
    evidence = Evidence(VIEWS[name], lambda: (normal(2, grad=False), torch.ones(2)))
    routes, _ = captured(evidence.function, *evidence.inputs())
    target = INDUCTOR if "of its own" in name else EAGER
    assert routes and {(route.quirk, route.target) for route in routes} == {(IN_PLACE, target)}
    assert not raw_is_right(evidence), "thunder has this right now"


def test_inputs_that_share_memory_are_still_wrong_in_thunder() -> None:
    x = torch.ones(4, 2)
    assert not torch.equal(raw(lambda a, b: a.add_(1) + b)(x[:2], x[2:]), torch.full((2, 2), 3.0))


def test_a_changed_input_is_still_wrong_in_thunder() -> None:
    assert not raw_is_right(Evidence(lambda x: F.relu(x, inplace=True), lambda: (normal(8),)))


def test_a_buffer_that_takes_a_graded_value_makes_the_graph_eager() -> None:
    routes, _ = captured(lambda x, b: b.copy_(x) * 2, normal(3), torch.zeros(3))
    assert [route.target for route in routes] == [EAGER]


def test_a_change_under_no_grad_of_what_has_a_gradient_makes_the_graph_eager() -> None:
    def halved(x: Tensor) -> Tensor:
        h = x * 2
        with torch.no_grad():
            h.mul_(0.5)
        return h * 3

    assert [route.target for route in captured(halved, normal(3))[0]] == [EAGER]


SEAMS = {
    "made by inductor, changed by thunder": lambda x: torch.sinc(x).relu_(),
    "changed under another name": lambda x: _scaled_view(x * 2),
    "returned under two names": lambda x: _both(x * 2),
}


def _scaled_view(h: Tensor) -> Tensor:
    h.view(-1).mul_(2)
    return h * 3


def _both(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, F.relu(h, inplace=True)


def test_a_value_changed_under_another_name_goes_to_inductor_as_a_whole() -> None:
    routes, _ = captured(SEAMS["changed under another name"], normal(3, 3))
    assert {(route.quirk, route.target) for route in routes} == {(IN_PLACE, INDUCTOR)}
    assert len(routes) >= 2


OUT_OF_PLACE = {
    "method": lambda x: (x * 1).abs_() * 2,
    "augmented": lambda x: _squared(x * 1),
    "flag": lambda x: F.elu(x * 1, inplace=True),
    "read later": lambda x: _both(x * 1),
    "across partitions": SEAMS["made by inductor, changed by thunder"],
}


def _squared(h: Tensor) -> Tensor:
    h *= h.detach() + 1
    return h.cos_()


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_a_change_of_a_value_of_the_graph_becomes_an_op_out_of_place(name: str) -> None:
    function, x = OUT_OF_PLACE[name], normal(3, 3)
    routes, gm = captured(function, x)
    assert IN_PLACE not in {route.quirk for route in routes}
    assert not any(mutated(node) for node in gm.graph.nodes)
    assert same(facts(lambda x: gm(x)[0], (x,)), facts(lambda x: _first(function(x)), (x,)))


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def test_the_gradient_of_a_change_that_needs_the_old_value_is_still_wrong_in_thunder() -> None:
    assert not raw_is_right(Evidence(OUT_OF_PLACE["method"], lambda: (normal(8),)))


def test_a_change_that_keeps_a_narrower_type_is_not_made_out_of_place() -> None:
    routes, _ = captured(lambda x, w: x.to(torch.bfloat16).mul_(w), normal(3), normal(3))
    assert {(route.quirk, route.target) for route in routes} == {(IN_PLACE, INDUCTOR)}


def test_thunder_is_not_asked_of_each_op_for_a_counter_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer takes a tenth of a second per op."""

    def asked(node: fx.Node) -> bool:
        raise AssertionError(f"asked of {node}")

    monkeypatch.setattr("thunderpatch.quirks.thunder_takes", asked)
    norm = torch.nn.BatchNorm1d(3)
    assert captured(lambda x: F.relu(norm(x.view(2, 3)), inplace=True).flatten() * 2, normal(6))[0] == []


@pytest.mark.parametrize("name", SEAMS)
def test_a_value_changed_across_a_seam_is_still_wrong_in_thunder(name: str) -> None:
    assert not raw_is_right(Evidence(SEAMS[name], lambda: (normal(3, 3),)))


RESPELLED = {
    "relu": F.relu,
    "relu, a method": lambda x: x.relu(),
    "relu, in place": lambda x: F.relu(x * 1, inplace=True),
    "sigmoid": torch.sigmoid,
    "sigmoid, a method in place": lambda x: (x * 1).sigmoid_(),
    "expit": torch.special.expit,
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, alpha=0.5),
    "selu": F.selu,
    "mish": F.mish,
    "mish, in place": lambda x: F.mish(x * 1, inplace=True),
}
EXTREMES = (0.0, -0.0, -1.0, 2.0, 30.0, -30.0, 100.0, -100.0, 800.0, -800.0, float("inf"), -float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RESPELLED)
def test_an_op_in_other_words_is_the_op(name: str, dtype: torch.dtype) -> None:
    function = RESPELLED[name]
    x = torch.cat([torch.tensor(EXTREMES, dtype=dtype), torch.randn(50, dtype=dtype)]).requires_grad_()
    routes, gm = captured(function, x)
    assert routes == [] and not any(op in gm.code for op in ("relu", "sigmoid", "expit", "elu(", "mish"))
    (got,), expected = gm(x), function(x)
    precise = {torch.bfloat16: (8e-3, 1e-6), torch.float32: (1e-6, 1e-7), torch.float64: (1e-13, 1e-13)}
    rtol, atol = precise[dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=4 * rtol, atol=4 * atol, equal_nan=True)


# The gradient of elu and its like at NaN is NaN or 1 in eager, by the place of the element.
@pytest.mark.parametrize("name", [name for name in RESPELLED if "elu" not in name or "relu" in name])
def test_an_op_in_other_words_keeps_nan(name: str) -> None:
    function, x = RESPELLED[name], given(*[NAN] * 8)
    _, gm = captured(function, x)
    (got,), expected = gm(x), function(x)
    torch.testing.assert_close(got, expected, equal_nan=True)
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_sigmoid_keeps_its_small_values() -> None:
    x = given(-20.0, -60.0)
    _, gm = captured(lambda x: torch.sigmoid(x).log(), x)
    torch.testing.assert_close(gm(x)[0], torch.tensor([-20.0, -60.0]))


def test_an_edited_graph_computes_what_it_did() -> None:
    def mixed(x: Tensor) -> Tensor:
        return torch.copysign(x, x).clamp(0.2, 0.7).prod() + x.max()

    x = normal(4)
    routes, gm = captured(mixed, x)
    assert [route.quirk for route in routes] == ["copysign", "clamp", "prod", "max"]
    assert gm.code.count("outside_thunder") >= 4
    torch.testing.assert_close(gm(x)[0], mixed(x))


def test_equal_graphs_stay_equal_after_editing() -> None:
    def targets() -> list[Any]:
        return [node.target for node in captured(lambda x: x.copysign(x), normal(3))[1].graph.nodes]

    first = targets()
    torch._dynamo.reset()
    assert [t for t in first if callable(t)] == [t for t in targets() if callable(t)] != []


def test_a_route_says_where_and_why() -> None:
    (route,) = captured(lambda x: x.max(), given(1.0, 2.0))[0]
    assert (route.quirk, route.target) == ("max", INDUCTOR) and route.node
    assert "NaN" in route.reason
    assert set(TARGETS.values()) == {INDUCTOR, THUNDER, EAGER}
