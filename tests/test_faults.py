"""Failures at each stage of compiling, injected: what the caller sees is an error with a name, or the original."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunderpatch
from thunderpatch import CompileError, ThunderPatchWarning, autograd, graphs
from thunderpatch.compat import load_thunder

INJECTED = "injected fault"
STEPS = 3


@pytest.fixture(autouse=True)
def _no_graph_of_another_test_is_found_again() -> None:
    """A model that is in a cycle lives until it is collected, and its graphs with it."""
    load_thunder()  # the faults are put into its modules
    gc.collect()


class Fragile(nn.Module):
    """The one that fails, known by its `atan`. It counts its runs in a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs: Tensor
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.runs.add_(1)
        return nn.functional.dropout(self.linear(x).atan(), 0.25, self.training)


class Split(Fragile):
    """The same with an operation that thunder leaves to inductor, after thunder's part has run."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0e(super().forward(x)).sin()


class Solid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()  # type: ignore[no-any-return]


def chain(fragile: type[Fragile], place: int) -> nn.Sequential:
    return nn.Sequential(*(fragile() if k == place else Solid() for k in range(3)))


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError(INJECTED)


@contextlib.contextmanager
def dynamo_fails() -> Iterator[dict[str, Any]]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    run = InstructionTranslator.run

    def wrong(self: Any) -> Any:
        if "atan" in self.f_code.co_names or "i0e" in self.f_code.co_names:
            fails()
        return run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InstructionTranslator, "run", wrong)
        yield {}


@contextlib.contextmanager
def splitter_fails() -> Iterator[dict[str, Any]]:
    import thunder.dynamo.splitter as splitter

    split = splitter._splitter

    def wrong(gm: Any, *args: Any) -> Any:
        return fails() if "atan" in gm.code else split(gm, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitter, "_splitter", wrong)
        yield {}


@contextlib.contextmanager
def thunder_fails() -> Iterator[dict[str, Any]]:
    import thunder

    active = [True]

    class Failing(thunder.core.transform_common.Transform):  # type: ignore[misc]
        def transform_traces_pre_prologue(self, prologue: Any, computation: Any, epilogue: Any, **_: Any) -> Any:
            if active and "atan" in str(computation):
                fails()
            return prologue, computation, epilogue

    yield {"transforms": [Failing()]}
    active.clear()


@contextlib.contextmanager
def inductor_fails() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", fails)
        yield {}


@contextlib.contextmanager
def inductor_code_fails() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", lambda *_, **__: fails)
        yield {}


@contextlib.contextmanager
def compiler_is_missing() -> Iterator[dict[str, Any]]:
    from torch._inductor import config
    from torch._inductor.utils import fresh_inductor_cache

    with fresh_inductor_cache(), config.patch({"cpp.cxx": (None, f"no-{INJECTED.replace(' ', '-')}")}):
        yield {}


@contextlib.contextmanager
def backward_fails() -> Iterator[dict[str, Any]]:
    compiled = autograd.Gradient.compiled

    def wrong(self: Any, *args: Any) -> Any:
        return fails() if "atan" in self.region.original.code else compiled(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd.Gradient, "compiled", wrong)
        yield {}


@contextlib.contextmanager
def inductor_backward_fails() -> Iterator[dict[str, Any]]:
    if not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        pytest.skip("this torch compiles inductor's backward at the first backward, where nothing can be answered")
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_inductor_cache

    run = GraphLowering.run

    def wrong(self: Any, *args: Any) -> Any:
        return fails() if self.is_backward else run(self, *args)

    with pytest.MonkeyPatch.context() as patch, fresh_inductor_cache():
        patch.setattr(GraphLowering, "run", wrong)
        yield {}


Fault = Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]
FORWARD: dict[str, tuple[Fault, type[Fragile]]] = {
    "dynamo": (dynamo_fails, Fragile),
    "splitter": (splitter_fails, Fragile),
    "thunder": (thunder_fails, Fragile),
    "thunder, before inductor": (thunder_fails, Split),
    "inductor": (inductor_fails, Split),
    "inductor, first run": (inductor_code_fails, Split),
    "no C++ compiler": (compiler_is_missing, Split),
    "inductor, backward": (inductor_backward_fails, Split),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before_is_found_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "structure", lambda gm: None)
    gc.collect()
    yield
    gc.collect()


def train(model: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """Return losses, gradients, parameters, buffers and the random state after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.parameters(), *model.buffers(), torch.get_rng_state()]


SLOW = ("thunder, before inductor", "no C++ compiler")
STAGES = [pytest.param(stage, marks=[pytest.mark.slow] if stage in SLOW else []) for stage in FORWARD]
FIRST_OR_LAST = [pytest.param(0, marks=pytest.mark.slow), 2]


@pytest.mark.parametrize("place", FIRST_OR_LAST)
@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_forward_raises_with_its_name_and_leaves_state_and_random_numbers(stage: str, place: int) -> None:
    fault, fragile = FORWARD[stage]
    model = chain(fragile, place)
    x = torch.randn(5, 4)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with fault() as options:
        thunderpatch.apply(model, names="*", **options)
        for _ in range(2):  # the second time is no different
            with pytest.raises(CompileError, match=rf"^{place} \({fragile.__name__}\)") as raised:
                model(x)
            assert INJECTED in str(raised.value) or INJECTED.replace(" ", "-") in str(raised.value)
            assert raised.value.__cause__ is not None
            torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
            assert torch.equal(torch.get_rng_state(), random)
    assert all(map(thunderpatch.is_patched, model))
    assert thunderpatch.restore(model) == 3


@pytest.mark.parametrize("place", FIRST_OR_LAST)
@pytest.mark.parametrize("stage", STAGES)
def test_with_on_error_eager_the_failing_module_trains_as_its_original_and_says_so_once(stage: str, place: int) -> None:
    fault, fragile = FORWARD[stage]
    model = chain(fragile, place)
    expected = train(copy.deepcopy(model))
    with fault() as options:
        thunderpatch.apply(model, names="*", on_error="eager", **options)
        with pytest.warns(ThunderPatchWarning) as warned:
            got = train(model)
    torch.testing.assert_close(got, expected)
    assert model[place].runs == STEPS
    assert len([w for w in warned if "runs uncompiled from now on" in str(w.message)]) == 1
    report = thunderpatch.report(model)
    assert str(report[str(place)].status) == "latched" and report[str(place)].compiled_calls == 0
    others = [report[str(k)] for k in range(3) if k != place]
    assert all(row.compiled_calls == row.calls == STEPS for row in others)


def test_a_failing_module_compiles_once_the_fault_is_gone() -> None:
    model = chain(Fragile, 1)
    twin = copy.deepcopy(model)
    thunderpatch.apply(model, names="*")
    x = torch.randn(5, 4)
    with splitter_fails(), pytest.raises(CompileError):
        model(x)
    model.eval(), twin.eval()
    torch.testing.assert_close(model(x), twin(x))
    assert thunderpatch.report(model)["1"].compiled_calls == 1


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("place", [0, 2])
def test_a_failing_backward_raises_with_its_name(place: int) -> None:
    model = chain(Fragile, place).eval()
    thunderpatch.apply(model, names="*")
    x = torch.randn(5, 4)
    with backward_fails():
        for _ in range(2):
            loss = model(x).square().sum()
            with pytest.raises(CompileError, match=rf"^{place} \(Fragile\): the backward(.|\n)*{INJECTED}"):
                loss.backward()
    assert all(parameter.grad is None for parameter in model[place].parameters())


@pytest.mark.parametrize("place", [0, 2])
def test_a_failing_backward_is_computed_from_the_original(place: int) -> None:
    model = chain(Fragile, place).eval()
    x = torch.randn(5, 4)
    expected = gradients(copy.deepcopy(model), x)
    thunderpatch.apply(model, names="*", on_error="eager")
    with backward_fails():
        for _ in range(2):
            torch.testing.assert_close(gradients(model, x), expected)


def test_a_failing_backward_whose_input_is_gone_is_refused_once_and_right_from_then_on() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).atan()  # of which an ordinary backward needs x + 1, not x

    def gradient() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        (found,) = torch.autograd.grad(model(x * 2).sum(), x)
        return found

    model = Shifted()
    expected = gradient()
    thunderpatch.apply(model, on_error="eager")
    with backward_fails():
        with pytest.raises(CompileError, match=r"\(Shifted\): the backward(.|\n)*from now on they are"):
            gradient()
        for _ in range(2):
            torch.testing.assert_close(gradient(), expected)


def test_random_numbers_that_a_failed_backward_would_need_again_are_refused() -> None:
    model = chain(Fragile, 1)
    thunderpatch.apply(model, names="*", on_error="eager")
    with backward_fails(), pytest.raises(CompileError, match=r"1 \(Fragile\).*cannot be drawn again"):
        gradients(model, torch.randn(11, 4))  # a shape that no other test makes fail


class Pure(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().atan()


@pytest.mark.parametrize("on_error", ["raise", "eager"])
@pytest.mark.parametrize("fault", [dynamo_fails, splitter_fails, thunder_fails])
@pytest.mark.filterwarnings("ignore::thunderpatch.errors.ThunderPatchWarning")
def test_two_threads_that_meet_a_failure_get_the_same_answer(fault: Fault, on_error: str) -> None:
    model, inputs = Pure(), [torch.randn(5, 4) for _ in range(4)]
    answers: dict[int, Any] = {}
    start = threading.Barrier(len(inputs))

    def work(k: int) -> None:
        start.wait()
        try:
            answers[k] = model(inputs[k])
        except Exception as error:
            answers[k] = error

    with fault() as options:
        thunderpatch.apply(model, on_error=on_error, **options)
        threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for k, x in enumerate(inputs):
        if on_error == "raise":
            assert isinstance(answers[k], CompileError) and "Pure" in str(answers[k])
        else:
            torch.testing.assert_close(answers[k], x.sin().atan())


def test_a_failure_while_patching_leaves_no_half_patched_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from thunderpatch import registry

    model = chain(Fragile, 1)
    install, done = registry.install, list[nn.Module]()

    def wrong(module: nn.Module, proxy: Any) -> None:
        if len(done) == 2:
            fails()
        done.append(module)
        install(module, proxy)

    monkeypatch.setattr(registry, "install", wrong)
    before = [dict(vars(module)) for module in model]
    with pytest.raises(RuntimeError, match=INJECTED):
        thunderpatch.apply(model, names="*")
    assert len(done) == 2 and [dict(vars(module)) for module in model] == before
