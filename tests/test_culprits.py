from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thunderpatch
from thunderpatch import ArgumentError, find_culprits, registry


class Unit(nn.Module):
    """Runs, patched, for nobody: the tests ask the registry which ones are switched on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def units(count: int) -> nn.ModuleList:
    return nn.ModuleList(Unit() for _ in range(count))


class Count:
    """A check that fails when all modules of one of the `guilty` sets are on; it counts how often it is asked."""

    def __init__(self, model: nn.ModuleList, *guilty: set[int]) -> None:
        self.model, self.guilty, self.asked = model, guilty, 0

    def __call__(self) -> bool:
        self.asked += 1
        records = [registry.active(module) for module in self.model]
        on = {k for k, record in enumerate(records) if record is not None and record.on}
        return not any(guilty <= on for guilty in self.guilty)


@pytest.mark.parametrize("guilty", [0, 1, 99, 127, 128, 198, 199])
def test_one_of_200_is_found_in_at_most_12_checks(guilty: int) -> None:
    model = units(200)
    check = Count(model, {guilty})
    assert find_culprits(model, check, types=Unit) == [str(guilty)]
    assert check.asked <= 12


@pytest.mark.parametrize("pair", [{0, 199}, {0, 1}, {198, 199}, {63, 64}, {50, 150}])
def test_a_pair_of_200_is_found_in_at_most_60_checks(pair: set[int]) -> None:
    model = units(200)
    check = Count(model, pair)
    assert {int(fqn) for fqn in find_culprits(model, check, types=Unit)} == pair
    assert check.asked <= 60


def test_three_that_fail_only_together_are_found_in_the_order_of_the_model() -> None:
    model = units(30)
    assert find_culprits(model, Count(model, {21, 3, 9}), types=Unit) == ["3", "9", "21"]


def test_of_several_causes_one_smallest_set_is_returned() -> None:
    model = units(20)
    assert find_culprits(model, Count(model, {4, 5}, {11}), types=Unit) in (["4", "5"], ["11"])


def test_what_is_returned_is_minimal_also_when_more_patches_can_hide_a_fault() -> None:
    model = units(10)

    class Hiding(Count):
        def __call__(self) -> bool:
            good = super().__call__()
            record = registry.active(self.model[0])
            return good or record is None or (record.off and not registry.active(self.model[9]).off)  # type: ignore[union-attr]

    found = find_culprits(model, Hiding(model, {3}), types=Unit)
    assert "3" in found and len(found) <= 2


def test_an_exception_in_the_check_is_bad() -> None:
    model = units(8)
    passes = Count(model, {6})

    def check() -> bool:
        if not passes():
            raise AssertionError("losses differ")
        return True

    assert find_culprits(model, check, types=Unit) == ["6"]


def test_a_check_that_passes_fully_patched_names_nobody_after_two_questions() -> None:
    model = units(8)
    check = Count(model)
    assert find_culprits(model, check, types=Unit) == []
    assert check.asked == 2


def test_a_check_that_fails_unpatched_is_an_error_with_its_reason() -> None:
    def check() -> bool:
        raise ValueError("no such file")

    model = units(3)
    with pytest.raises(ArgumentError, match=r"all 3 selected modules switched off \(ValueError: no such file"):
        find_culprits(model, check, types=Unit)
    assert not any(map(thunderpatch.is_patched, model))


def test_the_model_is_patched_as_before_afterwards() -> None:
    model = units(4)
    thunderpatch.apply(model, names="2")
    find_culprits(model, Count(model, {1, 2}), types=Unit)
    assert [thunderpatch.is_patched(module) for module in model] == [False, False, True, False]
    assert registry.active(model[2]).on  # type: ignore[union-attr]


def test_an_interrupt_ends_the_search_and_restores_the_model() -> None:
    model = units(4)

    def check() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_culprits(model, check, types=Unit)
    assert not any(map(thunderpatch.is_patched, model))


def test_the_check_may_ask_which_modules_are_patched() -> None:
    model = units(50)

    def check() -> bool:
        return not all(thunderpatch.is_patched(model[i]) for i in (7, 31))

    assert find_culprits(model, check, types=Unit) == ["7", "31"]


def test_modules_inside_others_are_told_apart() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Tanh())

    def check() -> bool:
        record = registry.active(model[0][1])
        return record is None or not record.on

    assert find_culprits(model, check, names=["0", "0.*", "1"], nested="all") == ["0.1"]


def test_a_module_that_computes_wrongly_is_found_without_compiling_again() -> None:
    class Differs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1e-2 if torch.compiler.is_compiling() else x * 2

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Differs(), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    expected = model(x).detach()

    def check() -> bool:
        torch.testing.assert_close(model(x), expected)
        return True

    with thunderpatch.patched(model, names="*"):
        compiler = registry.active(model[0]).compiler  # type: ignore[union-attr]
        before = compiler.compiled
        assert find_culprits(model, check, names="*") == ["2"]
        assert compiler.compiled == before + 4  # one graph for each module, whatever the number of checks
