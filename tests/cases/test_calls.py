"""Public reports of calls that a replaced forward takes, or answers, in another way than the original."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import ThunderPatchWarning


@dataclasses.dataclass
class Pred:
    scores: torch.Tensor
    step: int = 3
    cache: object = None


class Bag(collections.OrderedDict):  # like a ModelOutput: keys and attributes
    __getattr__ = collections.OrderedDict.__getitem__


class Pair(collections.namedtuple("Pair", "left right")):
    __slots__ = ()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        y = self.linear(x)
        return {
            "dataclass": lambda: Pred(y),
            "dict subclass": lambda: Bag(logits=y, loss=None),
            "namedtuple": lambda: Pair(y, (y, "x")),
            "nested": lambda: {"a": [y, {"b": (None, y)}]},
            "nothing": lambda: None,
            "text": lambda: "done",
        }[kind]()


class Block(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


@pytest.fixture(scope="module")
def head() -> Head:
    module = Head()
    thunderpatch.apply(module)
    return module


@pytest.mark.parametrize("kind", ["dataclass", "dict subclass", "namedtuple", "nested"])
def test_a_structured_output_keeps_its_type_and_its_history(head: Head, kind: str) -> None:
    """Lightning-AI/lightning-thunder#623"""
    x = torch.randn(2, 3)
    got = head(x, kind)
    with thunderpatch.disabled(head):
        want = head(x, kind)
    assert type(got) is type(want)
    flat, wanted = _leaves(got), _leaves(want)
    assert [type(leaf) for leaf in flat] == [type(leaf) for leaf in wanted]
    for leaf, other in zip(flat, wanted, strict=True):
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, other)
            assert leaf.grad_fn is not None
        else:
            assert leaf == other


def _leaves(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [leaf for name, item in vars(value).items() for leaf in [name, *_leaves(item)]]
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in [name, *_leaves(item)]]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


@pytest.mark.parametrize(("kind", "value"), [("nothing", None), ("text", "done")])
def test_an_output_without_tensors_comes_back_as_it_is(head: Head, kind: str, value: object) -> None:
    assert head(torch.randn(2, 3), kind) == value


def test_keyword_only_and_variable_arguments_arrive() -> None:
    """axolotl-ai-cloud/axolotl#3618"""

    class Tower(nn.Module):
        def forward(self, *, pixels: torch.Tensor, gain: float = 3.0, **extra: Any) -> dict[str, Any]:
            return {"out": pixels * gain, "extra": sorted(extra)}

    class Total(nn.Module):
        def forward(self, *xs: torch.Tensor, **kw: float) -> torch.Tensor:
            return sum(xs) - kw.get("less", 0)

    model, x = nn.ModuleDict({"tower": Tower(), "total": Total()}), torch.randn(4)
    thunderpatch.apply(model, types=[Tower, Total])
    out = model["tower"](pixels=x, depth=1, area=2)
    assert out["extra"] == ["area", "depth"]
    torch.testing.assert_close(out["out"], x * 3)
    torch.testing.assert_close(model["total"](x, x, x, less=2.0), 3 * x - 2)
    torch.testing.assert_close(model["total"](x), x)


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((), {}), ((), {"pixel": 1}), ((1,), {"pixels": 1})])
def test_a_wrong_call_fails_as_in_eager_and_leaves_the_module_compiled(args: Any, kwargs: Any) -> None:
    class Tower(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels * 2

    module, x = Tower(), torch.randn(4)
    with pytest.raises(TypeError) as eager:
        module(*args, **kwargs)
    thunderpatch.apply(module)
    with pytest.raises(TypeError) as patched:
        module(*args, **kwargs)
    assert str(patched.value) == str(eager.value)
    torch.testing.assert_close(module(x), x * 2)
    assert thunderpatch.report(module)[""].compiled_calls == 1


def test_signature_name_and_docstring_are_those_of_the_original() -> None:
    """huggingface/transformers#22248"""

    class Net(nn.Module):
        def forward(self, ids: torch.Tensor, mask: Any = None, *, labels: Any = None) -> torch.Tensor:
            """What a trainer reads to choose columns."""
            return ids * 2

    module = Net()
    want = inspect.signature(module.forward)
    thunderpatch.apply(module)
    module(torch.ones(2))
    assert inspect.signature(module.forward) == want
    assert list(inspect.signature(module.forward).parameters) == ["ids", "mask", "labels"]
    assert module.forward.__name__ == "forward"
    assert module.forward.__doc__ == "What a trainer reads to choose columns."
    assert module.forward.__self__ is module


def test_tools_that_look_for_arguments_see_the_original_code() -> None:
    """Trainers look for arguments in three ways; a proxy has to answer each."""

    class Net(nn.Module):
        def forward(self, ids: torch.Tensor, position: Any = None) -> torch.Tensor:
            return ids * 2

    module = Net()
    thunderpatch.apply(module)
    assert inspect.getfullargspec(module.forward).args == ["self", "ids", "position"]
    assert inspect.ismethod(module.forward) or callable(module.forward)
    assert module.forward.__code__.co_varnames[:3] == ("self", "ids", "position")
    assert inspect.unwrap(module.forward.__func__) is Net.forward


def test_a_generator_is_left_out_with_a_word_and_stays_a_lazy_generator() -> None:
    """pytorch/pytorch#126360"""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(2):
                x = self.linear(x)
                yield x
            return "end"

    model, x = nn.Sequential(Stream(), nn.Linear(3, 3)), torch.randn(2, 3)
    want = list(model[0](x))
    with pytest.warns(ThunderPatchWarning, match=r"0 \(Stream\) has a forward that is a generator"):
        patch = thunderpatch.apply(model, types=[Stream, nn.Linear])
    assert sorted(patch.modules) == ["0.linear", "1"]
    stream = model[0](x)
    assert isinstance(stream, types.GeneratorType)
    got = [next(stream), next(stream)]
    with pytest.raises(StopIteration) as stop:
        next(stream)
    assert stop.value.value == "end"
    torch.testing.assert_close(got, want)


def test_train_and_eval_are_followed_after_patching() -> None:
    """huggingface/kernels#68"""
    module, x = Block(48).eval(), torch.randn(5, 48)
    thunderpatch.apply(module)
    quiet = module(x)
    torch.testing.assert_close(quiet, module.linear(x))
    module.train()
    assert 0.3 < (module(x) == 0).float().mean() < 0.7
    module.eval()
    torch.testing.assert_close(module(x), quiet)
    module.linear.train()
    torch.testing.assert_close(module(x), quiet)
    module.eval()
    module.drop.train()
    assert (module(x) == 0).any()


def test_weights_that_are_loaded_in_eval_mode_are_used() -> None:
    """pytorch/pytorch#104984"""
    module, x = Block().eval(), torch.randn(5, 3)
    thunderpatch.apply(module)
    with torch.no_grad():
        module(x)
        for assign in (False, True):
            state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=assign)
            want = nn.functional.linear(x, state["linear.weight"], state["linear.bias"])
            torch.testing.assert_close(module(x), want)


def test_a_hook_on_a_child_fires_when_added_after_the_first_call_and_goes_away() -> None:
    """pytorch/pytorch#117758"""
    model, x, hits = nn.Sequential(Block().eval()), torch.randn(2, 3), []
    thunderpatch.apply(model, types=Block)
    want = model(x)
    handle = model[0].linear.register_forward_hook(lambda module, args, out: hits.append(1) or out * 0 + 4)
    for _ in range(2):
        assert torch.equal(model(x), torch.full((2, 3), 4.0))
    assert hits == [1, 1]
    handle.remove()
    torch.testing.assert_close(model(x), want)
    assert hits == [1, 1]


@pytest.mark.parametrize("kind", ["full_backward_pre_hook", "full_backward_hook"])
def test_a_backward_hook_on_a_child_counts_when_added_late(kind: str) -> None:
    """pytorch/pytorch#117265, pytorch/pytorch#115750"""
    module = Block().eval()
    thunderpatch.apply(module)

    def grad() -> torch.Tensor:
        x = torch.ones(2, 3, requires_grad=True)
        module(x).sum().backward()
        return x.grad

    want = grad()
    double = {
        "full_backward_pre_hook": lambda module, grad: (grad[0] * 2,),
        "full_backward_hook": lambda module, grad_in, grad_out: (grad_in[0] * 2,),
    }[kind]
    handle = getattr(module.linear, f"register_{kind}")(double)
    torch.testing.assert_close(grad(), want * 2)
    handle.remove()
    torch.testing.assert_close(grad(), want)


def test_a_hook_that_dynamo_may_not_trace_still_fires() -> None:
    """pytorch/pytorch#142358"""
    module, x, hits = Block().eval(), torch.randn(2, 3), []
    module.register_forward_pre_hook(torch.compiler.disable(lambda module, args: hits.append(1)))
    thunderpatch.apply(module)
    module(x)
    module(x)
    row = thunderpatch.report(module)[""]
    assert hits == [1, 1]
    assert (row.calls, row.compiled_calls) == (2, 2)


def test_hooks_that_come_and_go_each_step_are_no_reason_to_compile_again() -> None:
    """pytorch/pytorch#170110"""
    module, x, hits = Block().eval(), torch.randn(2, 3), []
    thunderpatch.apply(module)
    for step in range(12):
        handle = module.linear.register_forward_hook(lambda module, args, out: hits.append(1))
        module(x)
        handle.remove()
        assert len(hits) == step + 1
    assert thunderpatch.report(module)[""].calls == 12
