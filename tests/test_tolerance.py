from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from thunderpatch.tolerance import FACTOR, Difference, Yardstick, rounding


def judged(yardstick: Yardstick, expected: Any, got: Any) -> Difference:
    (difference,) = yardstick.differences({"value": expected}, {"value": got})
    return difference


def measured(expected: Tensor, exact: Tensor, moved: Tensor | None = None) -> Yardstick:
    return Yardstick({"value": exact}, {"value": exact if moved is None else moved})


EXACT = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
STEP = torch.finfo(torch.float32).eps * 3


def test_the_budget_is_a_multiple_of_the_originals_own_error() -> None:
    expected = (EXACT + 1e-3).float()
    yardstick = measured(expected, EXACT)
    difference = judged(yardstick, expected, (EXACT - FACTOR * 0.9e-3).float())
    assert difference.ok and difference.budget == pytest.approx(FACTOR * 1e-3, rel=1e-2)
    assert not judged(yardstick, expected, (EXACT - FACTOR * 1.1e-3).float()).ok


def test_an_original_that_happens_to_be_exact_leaves_a_rounding_step() -> None:
    expected = EXACT.float()
    assert judged(measured(expected, EXACT), expected, (EXACT + 0.9 * STEP).float()).ok
    assert not judged(measured(expected, EXACT), expected, (EXACT + 3 * STEP).float()).ok


def test_how_far_float64_moves_with_its_inputs_is_part_of_the_budget() -> None:
    expected = EXACT.float()
    yardstick = measured(expected, EXACT, EXACT + 1e-2)
    assert judged(yardstick, expected, (EXACT + 5e-2).float()).ok
    assert not judged(yardstick, expected, (EXACT + 1e-1).float()).ok


def test_what_is_equal_to_the_original_is_never_off_however_far_float64_is() -> None:
    expected = torch.tensor([math.pi])
    assert judged(measured(expected, EXACT[:1] * 0), expected, expected.clone()).error == 0.0


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.ones(2), None, "value is None, not a tensor of float32[2]"),
        (None, torch.zeros(2), "value is a tensor of float32[2], not None"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "a tensor of float64[2], not a tensor of float32[2]"),
        (torch.ones(2), torch.ones(1, 2), "float32[1, 2]"),
        (True, False, "value is bool False, not bool True"),
        (1, 1.0, "value is float 1.0, not int 1"),
    ],
)
def test_what_is_of_another_kind_differs_whatever_the_budget(expected: Any, got: Any, words: str) -> None:
    difference = judged(Yardstick(), expected, got)
    assert not difference.ok and difference.ratio == math.inf and words in str(difference)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_must_stand_in_the_same_places(special: float) -> None:
    expected = torch.tensor([1.0, special])
    assert judged(measured(expected, expected.double()), expected, expected.clone()).ok
    for got in ([1.0, 1.0], [special, 1.0], [1.0, -special if special == special else 1.0]):
        assert not judged(measured(expected, expected.double()), expected, torch.tensor(got)).ok


def test_whole_numbers_must_be_equal() -> None:
    expected = torch.tensor([1, 2])
    for yardstick in (Yardstick(), measured(expected, expected)):
        assert judged(yardstick, expected, expected.clone()).ok
        assert not judged(yardstick, expected, torch.tensor([1, 3])).ok


def test_where_float64_is_missing_fixed_tolerances_apply() -> None:
    expected = torch.tensor([100.0])
    assert judged(Yardstick(), expected, expected + 1e-4).ok
    assert not judged(Yardstick(), expected, expected + 1e-2).ok
    assert judged(Yardstick(), expected.bfloat16(), (expected + 2).bfloat16()).ok


def test_given_tolerances_decide_element_by_element() -> None:
    expected = torch.tensor([0.0, 100.0])
    relative = Yardstick(rtol=0.1)
    assert judged(relative, expected, torch.tensor([0.0, 109.0])).ok
    difference = judged(relative, expected, torch.tensor([1.0, 100.0]))
    assert not difference.ok and (difference.error, difference.budget) == (1.0, 0.0)
    assert judged(Yardstick(rtol=0.1, atol=2.0), expected, torch.tensor([1.0, 111.0])).ok
    assert not relative.measures and Yardstick().measures


def test_the_worst_comes_first() -> None:
    expected = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}
    got = {"a": torch.ones(1), "b": torch.ones(1) * 3, "c": torch.ones(1) * 2}
    assert [d.what for d in Yardstick(atol=0.1).differences(expected, got)] == ["b", "c", "a"]


def test_a_value_that_one_side_lacks_differs() -> None:
    one = {"a": torch.ones(1)}
    assert not Yardstick().differences(one, {})[0].ok and not Yardstick().differences({}, one)[0].ok


def test_complex_and_sparse_values_are_compared_by_their_numbers() -> None:
    z = torch.tensor([1 + 2j])
    assert judged(measured(z, z.to(torch.complex128)), z, z.clone()).ok
    assert not judged(measured(z, z.to(torch.complex128)), z, z + 1j).ok
    sparse = torch.eye(2).to_sparse()
    assert not judged(Yardstick(), sparse, (2 * torch.eye(2)).to_sparse()).ok


def test_the_rounding_step_is_that_of_the_dtype() -> None:
    assert rounding(torch.bfloat16) == 2**-7 and rounding(torch.int64) == 0.0
    assert rounding(torch.complex64) == rounding(torch.float32)
