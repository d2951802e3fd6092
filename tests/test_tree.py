"""The walk over a model's modules and their names, and the choice among nested matches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thunderpatch import tree as tree_module
from thunderpatch.errors import SelectionError
from thunderpatch.tree import describe, grow, keep_nested, repeated_items


class Block(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"c{i}", child)

    def forward(self) -> None: ...


def fqns(model: nn.Module) -> list[str]:
    return [fqn for fqn, _, _ in grow(model).places]


def test_a_description_is_fqn_and_class_and_never_a_repr() -> None:
    assert describe("a.b", nn.Linear(1, 1)) == "a.b (Linear)"
    assert describe("", nn.Sequential(nn.Linear(1, 1))) == "(the model itself) (Sequential)"


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Draw an acyclic graph of modules, where modules are shared and children can be None."""
    pool: list[nn.Module] = [nn.ReLU()]
    for _ in range(draw(st.integers(1, 6))):
        children = draw(st.lists(st.sampled_from(pool), max_size=3))
        pool.append(draw(st.sampled_from([Block, nn.Sequential, lambda *items: nn.ModuleList(items)]))(*children))
        if draw(st.booleans()):
            pool[-1].register_module("nothing", None)
    return pool[-1]


@settings(deadline=None)
@given(models())
def test_the_walk_is_that_of_named_modules_with_duplicates(model: nn.Module) -> None:
    places = grow(model).places
    assert [(fqn, module) for fqn, module, _ in places] == list(model.named_modules(remove_duplicate=False))
    for fqn, _, parent in places[1:]:
        assert fqn.rpartition(".")[0] == places[parent][0]


@settings(deadline=None)
@given(models(), st.data())
def test_nested_matches_are_resolved_as_a_search_for_each_pair_would(model: nn.Module, data: st.DataObject) -> None:
    tree = grow(model)
    modules = list(dict.fromkeys(module for _, module, _ in tree.places))
    matches = data.draw(st.lists(st.sampled_from(modules), unique_by=id))
    ids = {id(module) for module in matches}

    def lines() -> list[list[nn.Module]]:  # each place as the modules from the root down to it
        found: list[list[nn.Module]] = []
        for _, module, parent in tree.places:
            found.append([*(found[parent] if parent >= 0 else []), module])
        return found

    outermost = {id(m) for *above, m in lines() if id(m) in ids and ids.isdisjoint(map(id, above))}
    holders = {id(a) for *above, m in lines() if id(m) in ids for a in above}
    assert keep_nested(tree, ids, "outermost") == outermost
    assert keep_nested(tree, ids, "innermost") == ids - holders
    assert keep_nested(tree, ids, "all") == ids


def test_a_cycle_ends_where_it_meets_itself() -> None:
    inner = Block()
    outer = Block(inner)
    inner.add_module("back", outer)
    inner.add_module("leaf", nn.ReLU())
    assert fqns(outer) == ["", "c0", "c0.leaf"]


def test_a_deep_model_needs_no_recursion() -> None:
    model: nn.Module = nn.ReLU()
    for _ in range(3000):
        model = Block(model)
    assert len(fqns(model)) == 3001


def test_names_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_MOST_NAMES", 1000)
    model: nn.Module = nn.ReLU()
    for _ in range(10):
        model = Block(model, model)
    with pytest.raises(SelectionError, match=r"more than 1,000 names for its \d+ modules"):
        grow(model)


def test_candidates_have_a_forward_of_their_own() -> None:
    with_instance_forward = nn.ModuleList()
    with_instance_forward.forward = lambda: None
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([nn.ReLU()]),
            "weights": nn.ParameterList(),
            "sequential": nn.Sequential(),
            "patched_list": with_instance_forward,
        }
    )
    assert [fqn for fqn, _, _ in grow(model).candidates] == ["list.0", "sequential", "patched_list"]


def repeated_fqns(model: nn.Module) -> list[str]:
    tree = grow(model)
    ids = repeated_items(tree)
    return [fqn for fqn, module, _ in tree.places if id(module) in ids]


def test_repeated_items_are_those_of_lists_with_several_items_of_one_class() -> None:
    class Layers(nn.ModuleList):
        pass

    def linear() -> nn.Module:
        return nn.Linear(1, 1)

    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList([linear(), linear()]),
            "subclass": Layers([linear(), linear()]),
            "stage": nn.Sequential(linear(), linear()),
            "mixed": nn.Sequential(linear(), nn.ReLU(), linear()),
            "single": nn.ModuleList([linear()]),
            "dict": nn.ModuleDict({"a": linear(), "b": linear()}),
            "base_and_subclass": nn.ModuleList([nn.ModuleList(), Layers()]),
        }
    )
    assert repeated_fqns(model) == ["blocks.0", "blocks.1", "subclass.0", "subclass.1", "stage.0", "stage.1"]
