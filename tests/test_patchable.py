"""Each reason why a module cannot be patched, and that ordinary modules have none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import wrapt
from torch import nn

from thunderpatch.patchable import why_unpatchable


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def with_forward(forward: Any) -> nn.Module:
    module = nn.Identity()
    module.forward = forward
    return module


def generator(*args: Any) -> Iterator[Any]:
    yield args


async def coroutine(*args: Any) -> Any:
    return args


async def async_generator(*args: Any) -> AsyncIterator[Any]:
    yield args


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@wrapt.decorator
def pass_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def optimized_in_place() -> nn.Module:
    module = Plain()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "module",
    [
        Plain(),
        nn.Linear(2, 2),
        nn.Sequential(nn.ReLU()),
        nn.ModuleList(),
        with_forward(lambda x: x),
        with_forward(functools.partial(torch.add, 1)),
        with_forward(decorated(lambda x: x)),
        with_forward(pass_through(Plain().forward)),
        optimized_in_place(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_ordinary_module_has_no_reason(module: nn.Module) -> None:
    assert why_unpatchable(module) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_a_reason() -> None:
    scripted = torch.jit.script(Plain())
    traced = torch.jit.trace(Plain(), torch.ones(1, 2))
    for module in (scripted, scripted.linear, traced):
        assert "TorchScript" in (why_unpatchable(module) or "")
    function = torch.jit.trace(torch.relu, torch.ones(2))
    assert "TorchScript function" in (why_unpatchable(with_forward(function)) or "")
    # A module that merely contains a scripted one is not compiled by TorchScript itself.
    assert why_unpatchable(nn.Sequential(scripted)) is None


@pytest.mark.parametrize(
    ("function", "kind"),
    [(generator, "a generator"), (coroutine, "a coroutine"), (async_generator, "an async generator")],
    ids=["generator", "coroutine", "async_generator"],
)
@pytest.mark.parametrize(
    "disguise",
    [
        lambda function: function,
        lambda function: functools.partial(function, 1),
        decorated,
        pass_through,
        lambda function: decorated(functools.partial(decorated(function), 1)),
        lambda function: function.__get__(nn.Identity()),
    ],
    ids=["plain", "partial", "decorated", "wrapt", "nested", "bound"],
)
def test_a_forward_that_is_no_ordinary_function_is_a_reason(
    function: Callable[..., Any], kind: str, disguise: Callable[..., Any]
) -> None:
    on_instance = with_forward(disguise(function))
    on_class = type("Odd", (nn.Module,), {"forward": disguise(function)})()
    inherited = type("Derived", (type(on_class),), {})()
    for module in (on_instance, on_class, inherited):
        assert f"has a forward that is {kind}:" in (why_unpatchable(module) or "")


def test_an_instance_forward_counts_before_that_of_the_class() -> None:
    module = type("Odd", (nn.Module,), {"forward": generator})()
    module.forward = lambda x: x
    assert why_unpatchable(module) is None


def test_a_context_manager_made_of_a_generator_is_a_reason() -> None:
    assert "a generator" in (why_unpatchable(with_forward(contextlib.contextmanager(generator))) or "")


def test_an_object_that_invents_attributes_does_not_hang() -> None:
    class Endless:
        def __getattr__(self, name: str) -> Endless:
            return Endless()

        def __call__(self) -> None: ...

    assert why_unpatchable(with_forward(Endless())) is None


def test_what_torch_fx_made_is_a_reason() -> None:
    assert "tracer's product" in (why_unpatchable(torch.fx.symbolic_trace(Plain())) or "")


def test_what_torch_export_made_is_a_reason() -> None:
    program = torch.export.export(Plain(), (torch.ones(1, 2),))
    unflattened = torch.export.unflatten(program)
    for module in (program.module(), unflattened, unflattened.linear):
        assert "tracer's product" in (why_unpatchable(module) or "")


def test_what_torch_compile_made_is_a_reason_and_what_is_inside_is_not() -> None:
    compiled = torch.compile(Plain(), backend="eager")
    assert "compiled by torch.compile" in (why_unpatchable(compiled) or "")
    assert why_unpatchable(compiled._orig_mod) is None


def test_data_parallel_is_a_reason_and_what_is_inside_is_not() -> None:
    parallel = nn.DataParallel(Plain())
    assert "DistributedDataParallel" in (why_unpatchable(parallel) or "")
    assert why_unpatchable(parallel.module) is None


def test_a_lazy_module_is_a_reason_until_its_first_run() -> None:
    lazy = nn.LazyBatchNorm1d()
    assert "run the model once first" in (why_unpatchable(lazy) or "")
    lazy(torch.ones(2, 3))
    assert why_unpatchable(lazy) is None
