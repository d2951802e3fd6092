"""The rules by which modules are selected, and that bad input is one clear error."""

from __future__ import annotations

import doctest
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from thunderpatch import selection
from thunderpatch.errors import ArgumentError, SelectionError, ThunderPatchWarning
from thunderpatch.selection import select


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Block(), Block()])
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.step(x)


def everything(module: nn.Module, fqn: str) -> bool:
    return True


def test_without_a_selector_it_is_the_model_itself() -> None:
    model = Net()
    assert select(model) == {"": model}


def test_the_result_maps_names_to_the_very_modules() -> None:
    model = Net()
    for fqn, module in select(model, types=nn.Linear).items():
        assert module is model.get_submodule(fqn)


def test_the_order_is_that_of_named_modules() -> None:
    model = Net()
    expected = [fqn for fqn, module in model.named_modules() if isinstance(module, (nn.Linear, nn.ReLU))]
    assert list(select(model, types=[nn.ReLU, nn.Linear])) == expected


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ({"types": nn.Linear, "names": "head"}, ["head"]),
        ({"types": "Linear", "names": "layers.**", "exclude": "**.2"}, ["layers.0.mlp.0", "layers.1.mlp.0"]),
        ({"types": nn.Linear, "where": lambda m, fqn: m.out_features == 3}, ["head"]),
        ({"repeated": True}, ["layers.0", "layers.1"]),
        ({"repeated": True, "names": "*.1"}, ["layers.1"]),
        ({"repeated": True, "where": lambda m, fqn: fqn.endswith("0"), "types": Block}, ["layers.0"]),
    ],
)
def test_selectors_that_are_given_are_anded(selectors: Any, expected: list[str]) -> None:
    assert list(select(Net(), **selectors)) == expected


def test_a_predicate_sees_only_what_the_other_selectors_leave() -> None:
    seen: list[str] = []

    def where(module: nn.Module, fqn: str) -> bool:
        seen.append(fqn)
        return True

    select(Net(), types=nn.Linear, names="layers.0.**", where=where)
    assert seen == ["layers.0.mlp.0", "layers.0.mlp.2"]


def test_an_exclusion_predicate_sees_only_what_matches() -> None:
    seen: list[str] = []
    select(Net(), types=nn.ReLU, exclude=lambda module, fqn: seen.append(fqn))
    assert seen == ["layers.0.mlp.1", "layers.1.mlp.1"]


def test_what_is_below_an_excluded_module_may_still_match() -> None:
    chosen = select(Net(), types=[Block, nn.LayerNorm], exclude="layers.0")
    assert list(chosen) == ["layers.0.norm", "layers.1"]


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        ("outermost", ["layers.0", "layers.1"]),
        ("innermost", ["layers.0.inner", "layers.1.inner.inner"]),
        ("all", ["layers.0", "layers.0.inner", "layers.1", "layers.1.inner", "layers.1.inner.inner"]),
    ],
)
def test_matches_inside_matches_are_resolved_as_asked(nested: Any, expected: list[str]) -> None:
    model = Net(Block(Block()), Block(Block(Block())))
    assert list(select(model, types=Block, nested=nested)) == expected


def test_a_module_with_two_names_is_selected_once_under_the_first() -> None:
    shared = Block()
    model = Net(shared, Block(), shared)
    assert list(select(model, types=Block)) == ["layers.0", "layers.1"]


def test_a_module_is_found_by_any_of_its_names_and_goes_by_that() -> None:
    shared = Block()
    model = Net(shared, Block(), shared)
    assert select(model, names="layers.2") == {"layers.2": shared}
    assert select(model, where=lambda module, fqn: fqn == "layers.2") == {"layers.2": shared}
    assert list(select(model, names="layers.2.norm")) == ["layers.2.norm"]


def test_a_module_is_excluded_by_any_of_its_names() -> None:
    shared = Block()
    model = Net(shared, Block(), shared)
    assert list(select(model, types=Block, exclude="layers.2")) == ["layers.1"]


def test_a_match_shared_with_the_inside_of_a_match_is_selected_where_it_is_outside() -> None:
    block = Block()
    model = Net(block)
    model.again = block.norm
    assert set(select(model, types=[Block, nn.LayerNorm]).values()) == {block, block.norm}


def test_containers_without_a_forward_are_never_selected() -> None:
    chosen = select(Net(), where=everything, nested="all")
    assert "layers" not in chosen
    assert "layers.0.mlp" in chosen


def test_a_cycle_of_modules_is_searched_once() -> None:
    model = Net()
    model.layers[0].add_module("back", model)
    assert list(select(model, types=nn.LayerNorm)) == ["layers.0.norm", "layers.1.norm"]


def test_nothing_of_the_model_is_changed() -> None:
    model = Net()
    before = {module: dict(vars(module)) for module in model.modules()}
    select(model, types=nn.Linear, names="**", where=everything, exclude="head", nested="all")
    assert {module: vars(module) for module in model.modules()} == before


# What cannot be patched


def test_a_match_that_cannot_be_patched_is_left_out_with_one_warning() -> None:
    model = Net(Stream(), Block(), Stream())
    with pytest.warns(ThunderPatchWarning) as caught:
        assert list(select(model, types=[Stream, Block])) == ["layers.1"]
    (warning,) = caught
    assert "layers.0 (Stream) has a forward that is a generator" in str(warning.message)
    assert "layers.2 (Stream) has a forward that is a generator" in str(warning.message)
    assert warning.filename == __file__


def test_the_warning_names_five_and_counts_the_rest() -> None:
    with pytest.warns(ThunderPatchWarning) as caught:
        assert select(Net(*(Stream() for _ in range(8))), types=Stream) == {}
    text = str(caught[0].message)
    assert text.count("(Stream)") == 5
    assert text.endswith("; and 3 more")


def test_what_is_inside_a_match_that_cannot_be_patched_is_searched() -> None:
    model = Net(Stream(), Block())
    with pytest.warns(ThunderPatchWarning, match=r"layers\.0 \(Stream\)"):
        chosen = select(model, types=[Stream, nn.Linear], exclude=["layers.1.**", "head"])
    assert list(chosen) == ["layers.0.step"]


def test_a_match_around_one_that_cannot_be_patched_is_innermost_then() -> None:
    model = Net(Block(Stream()))
    with pytest.warns(ThunderPatchWarning, match=r"layers\.0\.inner"):
        assert list(select(model, types=[Block, Stream], nested="innermost")) == ["layers.0"]


def test_no_warning_for_what_another_match_covers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(select(Net(Block(Stream())), types=[Block, Stream])) == ["layers.0"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_part_is_left_out_and_a_torchscript_model_is_an_error() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(ThunderPatchWarning, match=r"layers\.0 \(RecursiveScriptModule\) is compiled by TorchScript"):
        assert list(select(Net(scripted, Block()), names="layers.*")) == ["layers.1"]
    for selectors in ({}, {"names": "**"}):
        with pytest.raises(SelectionError, match="compiled by TorchScript"):
            select(scripted, **selectors)


def test_inside_a_compiled_model_names_have_its_prefix() -> None:
    compiled = torch.compile(Net(), backend="eager")
    assert list(select(compiled, types=Block)) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]


# Bad input


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net, "not the class Net: pass an instance"),
        (None, "not a NoneType"),
        (torch.relu, "not a builtin_function_or_method"),
        ([nn.ReLU()], "not a list"),
    ],
    ids=["class", "none", "function", "list"],
)
def test_what_is_no_module_is_an_argument_error(model: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        select(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"where": "head"}, "where is a callable(module, fqn) -> bool, not a str"),
        ({"repeated": 1}, "repeated is True or False, not 1"),
        ({"nested": "inner"}, "nested is one of 'outermost', 'innermost', 'all', not 'inner'"),
        ({"nested": None}, "nested is one of"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_an_argument_error(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        select(Net(), **arguments)


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        ({"names": "layer.*"}, "`names` matches no module; near names: layers.1, layers.0, "),
        ({"types": "Nonsense"}, "no module here is of a class named 'Nonsense'"),
        ({"where": lambda m, fqn: None}, "`where` accepts none of the 14 modules in the model; classes"),
        (
            {"types": nn.Linear, "where": lambda m, fqn: False},
            "`where` accepts none of the 5 modules that match types; classes here: Linear x 5",
        ),
        (
            {"types": nn.LayerNorm, "names": "layers.*"},
            "no module matches types and names together; modules that match each alone: types 2, names 2",
        ),
        (
            {"types": nn.LayerNorm, "names": "layers.*", "where": lambda m, fqn: True},
            "no module matches types and names together",
        ),
        (
            {"types": nn.Linear, "repeated": True},
            "types and repeated together; modules that match each alone: types 5, repeated 2",
        ),
        (
            {"types": nn.Linear, "exclude": [nn.Linear]},
            "`exclude` takes out all that the other selectors match (modules: 5)",
        ),
        (
            {"exclude": nn.Linear},
            "`exclude` takes out of what is selected: give types, names, where or repeated",
        ),
    ],
)
def test_selectors_that_leave_nothing_are_an_error_that_says_which(selectors: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        select(Net(), **selectors)


def test_an_empty_exclusion_is_none() -> None:
    model = Net()
    assert select(model, exclude=[]) == {"": model}


def test_a_container_as_the_model_needs_a_selector() -> None:
    model = nn.ModuleList([nn.ReLU()])
    with pytest.raises(SelectionError, match=re.escape("(the model itself) (ModuleList) has no forward of its own")):
        select(model)
    assert list(select(model, types=nn.ReLU)) == ["0"]


def test_two_modules_of_one_name_are_an_error_and_not_one_module_fewer() -> None:
    model = Net()
    setattr(model, "layers.0", Block())
    with pytest.raises(SelectionError, match=r"several modules are called 'layers\.0'"):
        select(model, types=Block)
    assert list(select(model, names="head")) == ["head"]


def test_a_message_stays_short_however_large_the_model_is() -> None:
    model = Net(*(type(f"Block{i}", (Block,), {})() for i in range(300)))
    for selectors in ({"names": "layers.*.absent"}, {"types": "Bloc"}, {"where": lambda m, fqn: False}):
        with pytest.raises(SelectionError) as caught:
            select(model, **selectors)
        assert len(str(caught.value)) < 500


def test_the_examples_of_the_docstring_hold() -> None:
    result = doctest.testmod(selection, extraglobs={"nn": nn})
    assert result.attempted >= 8
    assert result.failed == 0
