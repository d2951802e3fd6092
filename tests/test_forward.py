"""The stand-in for a forward: unusual modules, unusual calls, errors, threads, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import ThunderPatchWarning
from thunderpatch.capture import trail
from thunderpatch.graph import compiling
from thunderpatch.record import Record
from thunderpatch.reports import Status

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Delegating(Base):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.in_features


class Refusing(Base):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError("forward is not to be set")
        super().__setattr__(name, value)


class Slotted(Base):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


class Called(Base):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 5


class Empty(Base):
    def __len__(self) -> int:
        return 0


class NoBool(Base):
    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


class NoGrad(Base):
    forward = torch.no_grad()(Base.forward)


class Autocast(Base):
    forward = torch.autocast("cpu", torch.bfloat16)(Base.forward)


def twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    return wrapper


class Decorated(Base):
    forward = twice(Base.forward)


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


class ClassMethod(nn.Module):
    factor = 4

    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * cls.factor


class Partial(nn.Module):
    def _scaled(self, factor: float, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor

    forward = functools.partialmethod(_scaled, 5.0)


class Mixin:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Mixed(Mixin, Base):
    pass


class Times:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class CallableOnClass(nn.Module):
    forward = Times(6.0)


class Recursive(Base):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y = self.linear(x)
        return self(y, depth - 1) if depth else y


def callable_on_instance() -> nn.Module:
    module = nn.Identity()
    module.forward = Times(7.0)
    return module


UNUSUAL = [Delegating, Refusing, Slotted, Called, Empty, NoBool, NoGrad, Autocast, Decorated, Static, ClassMethod]
UNUSUAL += [Partial, Mixed, CallableOnClass, Recursive, callable_on_instance]


def counts(module: nn.Module) -> tuple[int, int]:
    row = thunderpatch.report(module)[""]
    return row.calls, row.compiled_calls


@pytest.mark.parametrize("make", UNUSUAL)
def test_an_unusual_module_runs_compiled_as_in_eager_and_is_restored(make: Callable[[], nn.Module]) -> None:
    module = make()
    before, want = dict(vars(module)), module(X)
    with thunderpatch.patched(module):
        for _ in range(2):
            got = module(X)
            torch.testing.assert_close(got, want)
            assert got.requires_grad is want.requires_grad
        assert counts(module) == (2, 2)
    assert vars(module).keys() == before.keys()
    torch.testing.assert_close(module(X), want)


class Fussy(Base):
    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        y = self.linear(x)
        if bad:
            raise LookupError("mine", 3)
        return y


@pytest.mark.parametrize("first", [True, False])
def test_an_error_of_the_forward_is_the_same_object_kind_and_leaves_later_calls_compiled(first: bool) -> None:
    module = Fussy()
    want = module(X)
    thunderpatch.apply(module)
    if not first:
        module(X)
    for _ in range(3):
        with pytest.raises(LookupError) as caught:
            module(X, bad=True)
        assert caught.value.args == ("mine", 3) and type(caught.value) is LookupError
    assert trail.graphs == []
    for _ in range(2):
        torch.testing.assert_close(module(X), want)
    assert counts(module) == ((2, 2) if first else (3, 3))


@pytest.mark.parametrize("bad", ["text", None, torch.ones(2, 5)], ids=["text", "None", "wrong shape"])
@pytest.mark.parametrize("first", [True, False])
def test_bad_arguments_fail_as_in_eager_and_leave_later_calls_compiled(bad: Any, first: bool) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises((TypeError, RuntimeError)) as eager:
        module(bad)
    want = module(X)
    thunderpatch.apply(module)
    if not first:
        module(X)
    for _ in range(2):
        with pytest.raises(type(eager.value)) as caught:
            module(bad)
        assert str(caught.value) == str(eager.value)
    for _ in range(2):
        torch.testing.assert_close(module(X), want)
    assert counts(module) == ((2, 2) if first else (3, 3))


def test_an_error_in_one_module_leaves_those_that_share_its_code_compiled() -> None:
    one, two = Fussy(), Fussy()
    model = nn.ModuleList([one, two])
    thunderpatch.apply(model, types=Fussy)
    two(X)
    with pytest.raises(TypeError):
        one("text")
    one(X)
    two(X)
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(1, 1), (2, 2)]


def test_side_effects_happen_once_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[int] = []

    class Noisy(Base):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
            self.calls += 1
            log.append(self.calls)
            seen.append(1)
            y = self.linear(x)
            print("between")
            return y.tanh() * len(seen)

    module = Noisy()
    thunderpatch.apply(module)
    for n in range(1, 5):
        torch.testing.assert_close(module(X), module.linear(X).tanh() * n)
    assert module.calls == 4 and log == [1, 2, 3, 4]
    assert capsys.readouterr().out == "between\n" * 4


def test_outputs_keep_identity_and_alias_their_inputs() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, x[1:], x.t()

    module = Views()
    thunderpatch.apply(module)
    for _ in range(2):
        x = torch.ones(3, 4)
        same, tail, flipped = module(x)
        assert same is x
        tail.zero_()
        flipped[0] += 1
        assert x.tolist() == [[2.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("size", [torch.Size([2, 3]), (3, 2)])
def test_arguments_that_are_no_tensors_arrive_as_they_are(size: Any) -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor, size: Any, *rest: Any, how: str, more: Any = None) -> torch.Tensor:
            assert type(size) in (torch.Size, tuple)
            return x.new_zeros(size) + x.sum() + len(rest) + len(how) + (more or {}).get("k", 0)

    module = Filled()
    thunderpatch.apply(module)
    got = module(X, size, None, "a", how="up", more={"k": 5})
    assert got.shape == tuple(size)
    torch.testing.assert_close(got, torch.full(tuple(size), float(X.sum()) + 9))


def swaps() -> dict[str, Callable[[nn.Sequential], Any]]:
    """What people do to a model between two calls."""

    def replace_parameter(m: nn.Sequential) -> None:
        m[0].weight = nn.Parameter(torch.randn(4, 4))

    def swap_data(m: nn.Sequential) -> None:
        m[0].weight.data = torch.randn(4, 4)

    def other_shape(m: nn.Sequential) -> None:
        m[0].weight, m[0].bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
        m[1] = nn.Identity()

    def drop_bias(m: nn.Sequential) -> None:
        m[0].bias = None

    def load(m: nn.Sequential) -> None:
        state = {k: torch.rand_like(v) if v.is_floating_point() else v for k, v in m.state_dict().items()}
        m.load_state_dict(state, assign=True)

    def tie(m: nn.Sequential) -> None:
        m[1].bias = m[0].bias

    return {
        "a parameter replaced": replace_parameter,
        "p.data swapped": swap_data,
        "another shape": other_shape,
        "a bias dropped": drop_bias,
        "loaded by assignment": load,
        "parameters tied": tie,
        "double": lambda m: m.double(),
        "half precision": lambda m: m.to(torch.bfloat16),
        "frozen": lambda m: m.requires_grad_(False),
        "partly frozen": lambda m: m[0].weight.requires_grad_(False),
        "a buffer registered anew": lambda m: m[1].register_buffer("running_mean", torch.randn(4)),
        "training": lambda m: m.train(),
    }


@pytest.mark.parametrize("change", swaps())
def test_what_is_done_to_a_model_between_calls_is_followed(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    thunderpatch.apply(model, types=[nn.Linear, nn.BatchNorm1d])
    model(X)
    swaps()[change](model)
    plain = copy.deepcopy(model)
    thunderpatch.restore(plain)
    got, want = (each(X.to(each[0].weight.dtype)) for each in (model, plain))
    torch.testing.assert_close(got, want)
    assert got.requires_grad is want.requires_grad


def test_another_forward_of_the_class_is_followed_and_compiled() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Tripled(Doubled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    def squared(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * x

    model, x = nn.Sequential(Doubled(), Doubled()), torch.full((3,), 5.0)
    thunderpatch.apply(model, types=Doubled)
    torch.testing.assert_close(model(x), x * 4)
    model[0].__class__ = Tripled
    torch.testing.assert_close(model(x), x * 6)
    Doubled.forward = squared  # type: ignore[method-assign]
    torch.testing.assert_close(model(x), (x * 3) ** 2)
    torch.testing.assert_close(copy.deepcopy(model)(x), (x * 3) ** 2)
    rows = thunderpatch.report(model).rows
    assert all(row.compiled_calls == row.calls > 0 for row in rows)
    assert {row.fqn: row.cls for row in rows} == {"0": "Tripled", "1": "Doubled"}
    assert thunderpatch.restore(model) == 2
    torch.testing.assert_close(model(x), (x * 3) ** 2)
    assert all("forward" not in vars(module) for module in model)


def test_forward_mode_autograd_sees_the_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, direction = torch.randn(2, 4), torch.randn(2, 4)

    def tangent() -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent

    want = tangent()
    thunderpatch.apply(model, types=[nn.Linear, nn.Tanh])
    model(x)
    torch.testing.assert_close(tangent(), want)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, factor: Any) -> torch.Tensor:
            return x * float(factor)

    model = nn.Sequential(Scaled())
    thunderpatch.apply(model, types=Scaled)
    for factor in (numpy.float32(2), numpy.float64(0.5), numpy.int64(3)):
        torch.testing.assert_close(model[0](torch.ones(2), factor), torch.full((2,), float(factor)))


def test_parameters_that_are_frozen_and_thawed_lose_no_gradient() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    thunderpatch.apply(model, types=nn.Linear)
    x, chance = torch.randn(3, 4), random.Random(0)
    for _ in range(16):
        trained = {name for name, _ in plain.named_parameters() if chance.random() < 0.5}
        for net in (plain, model):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(name in trained)
                parameter.grad = None
            net(x.clone().requires_grad_()).square().sum().backward()
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert (want.grad is None) == (got.grad is None)
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad)


def test_tied_weights_get_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x).tanh())

    model = nn.ModuleList([Tied(), Tied(), Tied()])
    model[2].load_state_dict(model[0].state_dict())
    model[1].load_state_dict(model[0].state_dict())
    thunderpatch.apply(model[0])
    thunderpatch.apply(model[1], types=nn.Linear)
    for module in model:
        module(X).pow(2).sum().backward()
    for module in model[:2]:
        torch.testing.assert_close(module.down.weight.grad, model[2].down.weight.grad)


def test_a_lazy_module_is_patched_once_it_has_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with pytest.warns(ThunderPatchWarning, match="lazy"), pytest.raises(LookupError):
        thunderpatch.apply(model, types=nn.LazyLinear)
        raise LookupError
    model(X)
    patch = thunderpatch.apply(model, types=nn.Linear)
    model(X)
    assert patch.report()["0"].compiled_calls == 1


def test_inference_mode_no_grad_and_grad_are_told_apart() -> None:
    module = nn.Linear(4, 4)
    thunderpatch.apply(module)
    for _ in range(2):
        with torch.inference_mode():
            assert module(X).is_inference()
        with torch.no_grad():
            y = module(X)
            assert not y.is_inference() and not y.requires_grad
        assert module(X).requires_grad
    assert counts(module) == (6, 6)


def test_a_patched_module_that_another_calls_by_a_closure_is_part_of_it() -> None:
    inner = Base()

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x).tanh()

    outer = Outer()
    want = outer(X)
    thunderpatch.apply(inner)
    thunderpatch.apply(outer)
    torch.testing.assert_close(outer(X), want)
    torch.testing.assert_close(inner(X).tanh(), want)
    assert counts(outer) == (1, 1) and counts(inner) == (1, 1)


def test_a_forward_that_restores_its_own_model_finishes() -> None:
    class Leaving(Base):
        @torch.compiler.disable
        def leave(self) -> None:
            thunderpatch.restore(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.leave()
            return y * 2

    module = Leaving()
    thunderpatch.apply(module)
    for _ in range(2):
        torch.testing.assert_close(module(X), module.linear(X) * 2)
    assert "forward" not in vars(module)


def test_backward_twice_and_a_freed_graph_behave_as_in_eager() -> None:
    module = Base()
    twin = copy.deepcopy(module)
    thunderpatch.apply(module)
    for each in (module, twin):
        loss = each(X).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(module.linear.weight.grad, twin.linear.weight.grad)


def test_writing_to_a_saved_output_is_an_error_as_in_eager() -> None:
    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    module = Exp()
    thunderpatch.apply(module)
    for _ in range(2):
        x = X.clone().requires_grad_()
        y = module(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_of_tensors_and_of_the_module_fire_in_order() -> None:
    module, seen = Base(), []
    thunderpatch.apply(module)
    module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    module.register_forward_hook(lambda m, args, out: seen.append("post"))
    module.register_full_backward_pre_hook(lambda m, grad: seen.append("backward pre"))
    module.register_full_backward_hook(lambda m, into, out: seen.append("backward"))
    module.linear.weight.register_hook(lambda grad: seen.append("weight"))
    module(X.clone().requires_grad_()).sum().backward()
    assert seen[:3] == ["pre", "post", "backward pre"]
    assert sorted(seen[3:]) == ["backward", "weight"]


def test_a_hook_for_all_modules_fires_inside_a_region_too() -> None:
    module, seen = Base(), []
    thunderpatch.apply(module)
    module(X)
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m)))
    module(X)
    handle.remove()
    module(X)
    assert seen == [nn.Linear, Base]


def test_first_calls_from_several_threads_are_right_and_counted() -> None:
    class Deep(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x).tanh())

    model = nn.Sequential(Deep(), Deep())
    want = model(X)
    thunderpatch.apply(model, types=Deep)
    gate, found = threading.Barrier(4), []

    def work() -> None:
        gate.wait()
        found.append(model(X))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for got in found:
        torch.testing.assert_close(got, want)
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(4, 4)] * 2


def a_tracer_at_work() -> contextlib.AbstractContextManager[Any]:
    """Note with torch that a tracer is at work: for all threads before torch 2.15, from then on for this one."""
    tracer: Any = torch.fx._symbolic_trace
    if hasattr(tracer, "_is_fx_tracing_context"):
        return tracer._is_fx_tracing_context(True)
    patch = pytest.MonkeyPatch()
    stack = contextlib.ExitStack()
    stack.callback(patch.undo)
    patch.setattr(tracer, "_is_fx_tracing_flag", True)
    return stack


@pytest.mark.parametrize("called", [False, True])
def test_a_tracer_at_work_in_another_thread_is_waited_for(called: bool) -> None:
    """torch notes in one place for all threads that a tracer is at work, which inductor's is while it compiles."""
    model = nn.Sequential(Base(), Base())
    want = model(X)
    thunderpatch.apply(model, types=Base)
    with torch.no_grad():
        assert not called or model(X).shape == X.shape
    began, go_on, got = threading.Event(), threading.Event(), []

    def compile_something() -> None:
        with compiling, a_tracer_at_work():
            began.set()
            assert go_on.wait(60)

    threads = [threading.Thread(target=compile_something), threading.Thread(target=lambda: got.append(model(X)))]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    go_on.set()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(got, [want])
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(1 + called,) * 2] * 2


def test_a_compiler_at_work_in_another_thread_keeps_no_call_from_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Base()
    thunderpatch.apply(module)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    torch.testing.assert_close(module(X), module.linear(X))
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(module)] == [(1, 1)]


@pytest.mark.parametrize("called", [False, True])
def test_an_fx_tracer_meets_the_original_and_costs_the_compiled_code_nothing(called: bool) -> None:
    model = nn.Sequential(Base(), Base())
    want = model(X)
    thunderpatch.apply(model, types=Base)
    assert not called or model(X).shape == X.shape
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    torch.testing.assert_close([traced(X), model(X)], [want, want])
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(1 + called,) * 2] * 2


def test_a_call_beside_a_tracer_that_does_not_end_runs_its_original() -> None:
    module = Base()
    thunderpatch.apply(module)
    with a_tracer_at_work():
        torch.testing.assert_close(module(X), module.linear(X))
    [row] = thunderpatch.report(module)
    assert (row.calls, row.status) == (0, Status.BYPASSED)
    module(X)
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(module)] == [(1, 1)]


def test_coroutines_that_call_it_from_worker_threads_get_right_answers() -> None:
    module = Base()
    thunderpatch.apply(module)

    async def one(factor: int) -> torch.Tensor:
        return await asyncio.to_thread(module, X * factor)

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(*map(one, range(5)))

    for factor, got in enumerate(asyncio.run(main())):
        torch.testing.assert_close(got, module.linear(X * factor))


def test_the_proxy_tells_its_traces_per_module_where_code_is_shared() -> None:
    model = nn.Sequential(Base(), Base(), Base())
    thunderpatch.apply(model, types=Base)
    assert model[0].forward.last_traces == []
    with torch.no_grad():
        model(X)
    assert [len(block.forward.last_traces) for block in model] == [1, 1, 1]
    assert [len(block.forward.last_backward_traces) for block in model] == [0, 0, 0]
    model[1](X).sum().backward()
    assert [len(block.forward.last_backward_traces) for block in model] == [0, 1, 0]
    assert "linear" in str(model[2].forward.last_traces[0])


def test_a_record_is_on_when_installed_and_neither_disabled_nor_latched() -> None:
    module = nn.Linear(2, 2)
    record = Record(module, "it", compiler=None)  # type: ignore[arg-type]
    states = []
    for name, value in (
        ("installed", True),
        ("disabled", 1),
        ("disabled", 0),
        ("latched", ValueError()),
        ("latched", None),
    ):
        setattr(record, name, value)
        states.append(record.on)
    assert states == [True, False, True, False, True]
