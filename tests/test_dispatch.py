"""A partition is called directly only where Dynamo's guards cover what thunder would check."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch.dispatch import Partition, _bare


class Unit(nn.Module):
    """`own` is a number that makes its graph one that no other module shares."""

    def __init__(self, own: int = 1) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) / self.own


def partitions(module: nn.Module) -> list[Partition]:
    return [part for graph in module.forward._self_record.graphs for part in graph.partitions]


@pytest.mark.parametrize("grad", [True, False])
def test_a_static_graph_that_writes_to_nothing_is_called_directly(grad: bool) -> None:
    model, x = Unit(), torch.randn(3, 4)
    expected = model(x)
    thunderpatch.apply(model)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    assert [part.direct for part in partitions(model)] == [True]


def test_direct_can_be_switched_off() -> None:
    model, x = Unit(), torch.randn(3, 4)
    expected = model(x)
    thunderpatch.apply(model, direct=False)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    assert [part.direct for part in partitions(model)] == [False]


def test_each_shape_and_dtype_has_a_computation_of_its_own() -> None:
    model, reference = Unit(), Unit()
    reference.load_state_dict(model.state_dict())
    thunderpatch.apply(model)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), reference(x))
    model.double(), reference.double()
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x))
    assert model(x).dtype == torch.float64


def test_autocast_is_followed_in_a_direct_call() -> None:
    model, x = Unit(), torch.randn(3, 4)
    thunderpatch.apply(model)
    seen = []
    for _ in range(2):
        seen.append(model(x).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(model(x).dtype)
    assert seen == [torch.float32, torch.bfloat16] * 2


def test_gradients_of_a_direct_call_equal_eagers() -> None:
    model, reference = Unit(), Unit()
    reference.load_state_dict(model.state_dict())
    thunderpatch.apply(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        grads = []
        for module in (model, reference):
            module.zero_grad()
            given = x.clone().requires_grad_()
            module(given).square().sum().backward()
            grads.append([given.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*grads)


class SwitchesGradients(nn.Module):
    """Switches gradients off in the thunder part before inductor's sort, and on in the one after it, if at all."""

    def __init__(self, on_again: bool) -> None:
        super().__init__()
        self.first, self.second, self.on_again = nn.Linear(4, 4), nn.Linear(4, 4), on_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch.set_grad_enabled(False)
        if not self.on_again:
            return y * 2
        z = self.second(torch.sort(y * 2).values)
        torch.set_grad_enabled(True)
        return self.second(y + z)


@pytest.mark.parametrize("on_again", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_region_leaves_gradients_switched_as_eager_does(grad: bool, on_again: bool) -> None:
    model, x = SwitchesGradients(on_again), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    thunderpatch.apply(model)
    for _ in range(3):
        found = []
        for each in (eager, model):
            with torch.set_grad_enabled(grad):
                out = each(x)
                found.append((out.detach(), out.requires_grad, torch.is_grad_enabled()))
            if on_again:
                assert out.requires_grad
                found[-1] += tuple(torch.autograd.grad(out.sin().sum(), [*each.parameters()], allow_unused=True))
        torch.testing.assert_close(found[1], found[0])
    (row,) = thunderpatch.report(model).rows
    assert row.compiled_calls == row.calls == 3


# Conditions one by one. Each takes a call that may be direct, and changes one thing of it.


class Subclass(torch.Tensor):
    pass


Run = dict[str, Any]  # what a first run hands to `_direct`, by the names of its arguments


numbers = itertools.count(2)


class Pair(Unit):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x.sin()


def first_run(grad: bool = True, kind: type[Unit] = Unit) -> tuple[Partition, Run]:
    """Return a partition and what its first run came to."""
    model, x = kind(next(numbers)), torch.randn(3, 4)
    thunderpatch.apply(model)
    with torch.set_grad_enabled(grad):
        model(x)
        (part,) = partitions(model)
        tensors = {t.shape: t for t in (x, *model.parameters())}
        args = [tensors[each.shape] for each in part_inputs(part)]
        result, entry, inputs, to_epilogue, raw = part._run(args, None)
    names = ("args", "entry", "inputs", "to_epilogue", "raw", "result")
    return part, dict(zip(names, (args, entry, inputs, to_epilogue, raw, result), strict=True))


def part_inputs(part: Partition) -> list[torch.Tensor]:
    gm: Any = part.region.original
    return [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]


def another_version(part: Partition, run: Run) -> None:
    part.jitted._lc_cs.interpreter_cache.append(run["entry"])


def the_backward_of_another_version(part: Partition, run: Run) -> None:
    run["entry"] = run["entry"]._replace(backward_fn=lambda *args: args)


def something_for_the_epilogue(part: Partition, run: Run) -> None:
    run["to_epilogue"] = [run["inputs"][0]]


def an_argument_of_a_subclass(part: Partition, run: Run) -> None:
    tensor = run["args"][0].detach().as_subclass(Subclass)
    run["inputs"] = [tensor if value is run["args"][0] else value for value in run["inputs"]]
    run["args"] = [tensor, *run["args"][1:]]


def an_input_that_the_prologue_made(part: Partition, run: Run) -> None:
    run["inputs"] = [run["inputs"][0].clone(), *run["inputs"][1:]]


def a_result_that_the_epilogue_made(part: Partition, run: Run) -> None:
    result = run["result"]
    run["result"] = result.clone() if isinstance(result, torch.Tensor) else tuple(t.clone() for t in result)


def a_computation_with_more_results(part: Partition, run: Run) -> None:
    run["raw"] = (*run["raw"], run["raw"][0])


def results_in_something_else_than_a_tuple(part: Partition, run: Run) -> None:
    run["result"] = list(run["raw"])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        another_version,
        the_backward_of_another_version,
        something_for_the_epilogue,
        an_argument_of_a_subclass,
        an_input_that_the_prologue_made,
        a_result_that_the_epilogue_made,
        a_computation_with_more_results,
        results_in_something_else_than_a_tuple,
    ],
)
@pytest.mark.parametrize("kind", [Unit, Pair])
def test_what_is_not_recognised_takes_the_ordinary_way(
    kind: type[Unit], change: Callable[[Partition, Run], None], grad: bool
) -> None:
    part, run = first_run(grad, kind)
    with torch.set_grad_enabled(grad):
        assert part._direct(**run) is not None
        change(part, run)
        assert part._direct(**run) is None


def test_a_computation_with_a_backward_is_direct_with_gradients_on_alone() -> None:
    part, run = first_run()
    with torch.no_grad():
        assert part._direct(**run) is None


class Counts(nn.Module):
    """Takes its input's statistics, as batch normalisation does: the computation returns what the epilogue writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sin()


def test_what_is_written_to_an_input_is_written_at_each_call() -> None:
    model, eager = Counts(), Counts()
    thunderpatch.apply(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert thunderpatch.report(model).rows[0].compiled_calls == 3


def test_a_computation_with_side_effects_on_its_arguments_is_not_called_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """thunder's epilogue is handed nothing where the computation writes by itself; versions tell."""
    part, run = first_run(grad=False)
    find = part.jitted._lc_cd.get_computation_and_inputs

    def writing(*args: Any) -> Any:
        entry, inputs, to_epilogue = find(*args)

        def computation(*inputs: Any) -> Any:
            inputs[0].detach().add_(0)
            return entry.computation_fn(*inputs)

        return entry._replace(computation_fn=computation), inputs, to_epilogue

    with torch.no_grad():
        for found, direct in ((writing, False), (find, True)):
            monkeypatch.setattr(part.jitted._lc_cd, "get_computation_and_inputs", found)
            part._call, part._straight = part._first_call, None
            part(*run["args"])
            assert part.direct == direct


@pytest.mark.parametrize("direct", [True, False])
def test_one_gradient_serves_all_calls_of_a_computation(direct: bool) -> None:
    model, x = Unit(next(numbers)), torch.randn(3, 4)
    thunderpatch.apply(model, direct=direct)
    model(x).sum().backward()
    (part,) = partitions(model)
    (first,) = part._gradients.values()
    for _ in range(2):
        model(x).sum().backward()
        assert list(part._gradients.values()) == [first]


def test_a_whole_graph_is_its_partition_only_where_it_returns_all_that_the_partition_does() -> None:
    part, _ = first_run()
    count = len(part_inputs(part))
    assert part.fused(range(count), count, outputs=1) is not None
    assert part.fused(range(count), count, outputs=2) is None
    part._straight = None
    assert part.fused(range(count), count, outputs=1) is None


def test_under_autocast_the_wrappers_of_a_computation_stay() -> None:
    """They switch autocast off: what is inside has its casts written out, and is not to be cast again."""
    model, x = Unit(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    thunderpatch.apply(model)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            got, want = model(x), eager(x)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert [part.direct for part in partitions(model)] == [True]


def generated(function: Callable[..., Any]) -> bool:
    return function.__code__.co_filename.startswith("thunder.")


def test_without_gradients_a_direct_call_is_the_function_that_thunder_generated() -> None:
    """And nothing around it, but under autocast, which one of the wrappers switches off."""
    part, run = first_run(grad=False)
    count = len(run["args"])
    with torch.no_grad():
        made = part._direct(**run)
        assert made is not None and generated(made(range(count), count))
        with torch.autocast("cpu", torch.bfloat16):
            made = part._direct(**run)
        assert made is not None and not generated(made(range(count), count))


def test_of_a_function_that_thunder_did_not_generate_the_wrappers_stay() -> None:
    @functools.wraps(first_run)
    def other() -> None: ...

    with torch.no_grad():
        assert _bare(other) is other


def test_a_direct_call_leaves_no_graph_of_its_own_and_gradients_as_they_were() -> None:
    """The computation is run without gradients; what it saves for the backward would else hold a second graph."""
    part, run = first_run()
    connected: list[Any] = []
    (gradient,) = part._gradients.values()
    connect = gradient.connect
    gradient.connect = lambda args, data, saved, others: connected.extend(saved) or connect(args, data, saved, others)  # type: ignore[method-assign]
    run_directly = part._direct(**run)
    assert run_directly is not None
    (result,) = run_directly(range(len(run["args"])), len(run["args"]))(*run["args"])
    assert torch.is_grad_enabled() and result.requires_grad
    assert connected and all(t.grad_fn is None for t in connected)


# The global state that a compiled graph depends on. An equal module that is first called in another state gets a
# graph of its own.


@contextlib.contextmanager
def put_back(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


State = Callable[[], contextlib.AbstractContextManager[Any]]


def autocast_cache(on: bool) -> contextlib.AbstractContextManager[Any]:
    return put_back(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, on)


@pytest.mark.parametrize(
    ("state", "other"),
    {
        "grad mode": (torch.no_grad, torch.enable_grad),
        "default dtype": (
            torch.no_grad,
            lambda: put_back(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        ),
        "determinism": (
            torch.no_grad,
            lambda: put_back(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        ),
        "precision": (
            torch.no_grad,
            lambda: put_back(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        ),
        "autocast": (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)),
        "autocast's dtype": (
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: torch.autocast("cpu", torch.float16),
        ),
        "autocast's cache": (lambda: autocast_cache(False), lambda: autocast_cache(True)),
    }.values(),
)
def test_an_equal_module_shares_a_graph_in_the_same_global_state_alone(state: State, other: State) -> None:
    models, x = [Unit(), Unit(), Unit()], torch.randn(3, 4)
    for model, around in zip(models, (state, state, other), strict=True):
        thunderpatch.apply(model)
        with torch.no_grad(), around():
            model(x)
    first, same, apart = ([*model.forward._self_record.graphs] for model in models)
    assert first == same
    assert set(first).isdisjoint(apart)


class Makes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[0])


def test_a_default_device_that_changes_is_followed() -> None:
    model, x = Makes(), torch.randn(3, 4)
    thunderpatch.apply(model)
    for name in ("cpu", "meta", "cpu"):
        with torch.device(name):
            assert model(x).device.type == name
            assert torch.empty(1).device.type == name
    assert thunderpatch.report(model).rows[0].compiled_calls == 3


def test_a_graph_is_shared_between_inference_and_no_grad_and_makes_what_eager_makes() -> None:
    model, x = Unit(), torch.randn(3, 4)
    thunderpatch.apply(model)
    kinds = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            kinds.append(model(x).is_inference())
    assert kinds == [False, True, False, True]
    assert [part.direct for part in partitions(model)] == [True]
