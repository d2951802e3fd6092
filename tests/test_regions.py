"""Which modules share compiled code."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

from thunderpatch.attribution import watch
from thunderpatch.lanes import LANE_SIZE
from thunderpatch.options import read_options
from thunderpatch.regions import compiler_for, group_for, is_method_of, signature


def compiler(**options: Any):
    read = read_options(options, on_error="raise", check=False, direct=True)
    return compiler_for(read, watch, watch.owner)


@pytest.fixture(scope="module")
def usual():
    return compiler()


X = torch.ones(2, 3)


def group(module: nn.Module, compiler, *args: Any, **kwargs: Any):
    return group_for(module, module.forward, compiler, args or (X,), kwargs)


def test_equal_options_are_one_compiler_while_it_is_in_use(usual) -> None:
    assert compiler() is usual
    assert compiler(fullgraph=True) is not usual


def test_a_compiler_that_nobody_uses_is_gone() -> None:
    first = compiler(mode="default", dynamic=False)
    number = id(first.options)
    del first
    gc.collect()
    again = compiler(mode="default", dynamic=False)
    assert again.compiled == 0 and (id(again.options) != number or again.options is not None)


def test_modules_of_one_class_and_shape_share_a_group(usual) -> None:
    one, two = nn.Linear(3, 4), nn.Linear(3, 4)
    assert group(one, usual) is group(two, usual)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (nn.Linear(3, 5), (X,)),
        lambda: (nn.Linear(3, 4, bias=False), (X,)),
        lambda: (type("Sub", (nn.Linear,), {})(3, 4), (X,)),
        lambda: (nn.Linear(3, 4), (X[:1],)),
        lambda: (nn.Linear(3, 4), (X, X)),
    ],
    ids=["shape", "parameters", "class", "input shape", "number of inputs"],
)
def test_another_class_or_shape_is_another_group(usual, other: Any) -> None:
    mine = nn.Linear(3, 4)
    module, args = other()
    assert group(mine, usual) is not group(module, usual, *args)


def test_other_options_are_another_group(usual) -> None:
    module, fullgraph = nn.Linear(3, 4), compiler(fullgraph=True)
    assert group(module, usual) is not group(module, fullgraph)


def test_keyword_names_count_and_values_that_are_no_tensors_do_not() -> None:
    module = nn.Linear(3, 4)
    assert signature(module, (X, 1), {}) == signature(module, (X, 2), {})
    assert signature(module, (), {"a": X}) != signature(module, (), {"b": X})


def test_shapes_of_children_count() -> None:
    one, two = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, 3)) for n in (4, 5))
    assert signature(one, (X,), {}) != signature(two, (X,), {})


def test_a_class_that_cannot_be_hashed_has_a_signature() -> None:
    class Alike(nn.Linear):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    assert signature(Alike(3, 4), (X,), {}) == signature(nn.Linear(3, 4), (X,), {})


def test_a_method_bound_to_the_module_can_be_run_for_others_and_nothing_else() -> None:
    one, two = nn.Linear(3, 4), nn.Linear(3, 4)
    assert is_method_of(one, one.forward)
    assert not is_method_of(one, two.forward)
    assert not is_method_of(one, functools.partial(one.forward))
    assert not is_method_of(one, torch.relu)


def test_somebodys_callable_has_a_group_of_its_own(usual) -> None:
    one, two = nn.Linear(3, 4), nn.Linear(3, 4)

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x

    assert group_for(one, shared, usual, (X,), {}) is not group_for(two, shared, usual, (X,), {})
    assert group_for(one, shared, usual, (X,), {}).function(one, 7) == 7


def test_a_group_tells_whether_a_forward_is_the_one_it_was_made_for(usual) -> None:
    one, two = nn.Linear(3, 4), nn.Linear(3, 4)
    assert group(one, usual).runs(two, two.forward)
    assert not group(one, usual).runs(two, one.forward)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    mine = group_for(one, own, usual, (X,), {})
    assert mine.runs(one, own) and not mine.runs(one, lambda x: x) and not mine.runs(one, one.forward)


def test_a_lane_that_is_full_gets_no_more_modules(usual) -> None:
    mine = group(nn.Linear(3, 7), usual)
    first = mine.lane()
    assert mine.lane() is first
    for _ in range(LANE_SIZE):
        first.newcomer()
    assert mine.lane() is not first
    second = mine.lane()
    second.spoiled = True
    assert mine.lane() is not second
    assert mine.own_lane() not in mine.lanes
