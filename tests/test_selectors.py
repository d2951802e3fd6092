"""What each selector accepts, what it refuses, and the words in which it does."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from torch import nn

from thunderpatch.errors import SelectionError
from thunderpatch.selectors import asking, census, exclude_tests, names_test, near, repeated_test, types_test
from thunderpatch.tree import grow


class Norm(nn.LayerNorm):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 3)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TREE = grow(Net())


def chosen(test: Any) -> list[str]:
    return [fqn for fqn, module, _ in TREE.candidates if test(module, fqn)]


LINEARS = ["layers.0.mlp.0", "layers.1.mlp.0", "head"]


@pytest.mark.parametrize(
    ("types", "fqns"),
    [
        (nn.Linear, LINEARS),
        ("Linear", LINEARS),
        ("torch.nn.modules.linear.Linear", LINEARS),
        (nn.LayerNorm, ["layers.0.norm", "layers.1.norm"]),
        ("LayerNorm", ["layers.0.norm", "layers.1.norm"]),
        ("Norm", ["layers.0.norm", "layers.1.norm"]),
        (f"{__name__}.Net", [""]),
        ((Net, "Block"), ["", "layers.0", "layers.1"]),
        ({Block, nn.Bilinear}, ["layers.0", "layers.1"]),
        ((cls for cls in [Net]), [""]),
        (nn.Module, [fqn for fqn, _, _ in TREE.candidates]),
    ],
)
def test_a_type_selects_itself_and_what_derives_from_it(types: Any, fqns: list[str]) -> None:
    assert chosen(types_test(types, TREE)) == fqns


def test_a_delegated_class_does_not_deceive() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @property
        def __class__(self) -> type:  # what transparent wrappers do
            return type(self._modules["inner"])

    tree = grow(nn.ModuleList([Wrapper(nn.Linear(1, 1))]))
    assert isinstance(tree.candidates[0][1], nn.Linear)
    test = types_test(nn.Linear, tree)
    assert [fqn for fqn, module, _ in tree.places if test(module, fqn)] == ["0.inner"]


@pytest.mark.parametrize(
    ("names", "fqns"),
    [
        ("head", ["head"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("**.mlp.**", ["layers.0.mlp.0", "layers.0.mlp.1", "layers.1.mlp.0", "layers.1.mlp.1"]),
        (["head", "*.1"], ["layers.1", "head"]),
        (("absent.*", "head"), ["head"]),
        (re.compile(r"layers\.\d"), ["layers.0", "layers.1"]),
        (re.compile(r"head|"), ["", "head"]),
        ([re.compile(r".*norm"), "head"], ["layers.0.norm", "layers.1.norm", "head"]),
    ],
)
def test_a_name_is_a_glob_or_a_pattern_of_the_whole_fqn(names: Any, fqns: list[str]) -> None:
    assert chosen(names_test(names, TREE)) == fqns


@pytest.mark.parametrize(
    ("exclude", "left_over"),
    [
        (nn.Linear, ["", "layers.0", "layers.1"]),
        ("layers.*", ["", *LINEARS]),
        (re.compile(r"layers\.0.*"), ["", "layers.1", "layers.1.mlp.0", "head"]),
        (lambda module, fqn: fqn == "head", ["", "layers.0", "layers.0.mlp.0", "layers.1", "layers.1.mlp.0"]),
        ([Net, Block, "layers.0.**", "head"], ["layers.1.mlp.0"]),
        (nn.Bilinear, ["", "layers.0", "layers.0.mlp.0", "layers.1", "layers.1.mlp.0", "head"]),
        ([], ["", "layers.0", "layers.0.mlp.0", "layers.1", "layers.1.mlp.0", "head"]),
    ],
    ids=["class", "glob", "pattern", "predicate", "several", "absent_class", "empty"],
)
def test_exclude_takes_classes_globs_patterns_and_predicates(exclude: Any, left_over: list[str]) -> None:
    tests = exclude_tests(exclude, TREE)
    all_of_them = chosen(types_test([Net, Block, nn.Linear], TREE))
    modules = {fqn: module for fqn, module, _ in TREE.candidates}
    assert [fqn for fqn in all_of_them if not any(test(modules[fqn], fqn) for test in tests)] == left_over


def test_repeated_selects_the_items_of_lists_of_one_class() -> None:
    assert chosen(repeated_test(TREE)) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("Liner", "class named 'Liner'; near names: Linear; classes here: Linear x 3, Block x 2, Norm x 2"),
        ("torch.nn.Linear", "class named 'torch.nn.Linear'; near names: Linear"),
        (["Linear", "Blok"], "class named 'Blok'; near names: Block"),
        (nn.Bilinear, "`types` matches no module; classes here: Linear x 3"),
        (nn.ModuleList, "`types` matches no module, for layers (ModuleList) has no forward of its own"),
        ("ModuleList", "`types` matches no module, for layers (ModuleList) has no forward of its own"),
        (int, "`types` takes subclasses of nn.Module and class names, not the class int"),
        (3, "`types` takes subclasses of nn.Module and class names, not an instance of int"),
        (nn.Sequential(nn.ReLU()), "class names, not an instance of Sequential"),
        ([nn.Linear, None], "class names, not an instance of NoneType"),
        ([], "`types` is empty"),
    ],
)
def test_a_type_that_selects_nothing_is_an_error_that_says_what_is_there(types: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        types_test(types, TREE)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("layer.*.mlp", "`names` matches no module; near names: layers.1.mlp, layers.0.mlp, "),
        ("hed", "`names`: no module is called 'hed'; near names: head"),
        (["head", "layers.2"], "`names`: no module is called 'layers.2'; near names: layers.1, layers.0, "),
        ("layers", "layers (ModuleList) has no forward of its own, so it is never selected; 'layers.*' is"),
        ("l*s", "`names` matches no module, for layers (ModuleList) has no forward of its own"),
        ("zzz.*", "`names` matches no module; names here: layers.0, layers.0.norm, layers.0.mlp, "),
        (re.compile("zzz"), "`names` matches no module; names here: layers.0"),
        (re.compile(b"head"), "`names` takes patterns of str, not of bytes"),
        ("a..b", "bad FQN glob 'a..b'"),
        (nn.Linear, "`names` takes FQN globs and re.Patterns, not the class Linear"),
        (3, "`names` takes FQN globs and re.Patterns, not an instance of int"),
        (["head", ["head"]], "`names` takes FQN globs and re.Patterns, not an instance of list"),
        ([], "`names` is empty"),
    ],
)
def test_a_name_that_selects_nothing_is_an_error_that_says_what_is_near(names: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        names_test(names, TREE)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("hed", "`exclude`: no module is called 'hed'; near names: head"),
        ("Linear", "to exclude a class give the class itself, for a str is an FQN glob"),
        ("layers", "layers (ModuleList) has no forward of its own"),
        ("a[", "bad FQN glob 'a['"),
        (int, "`exclude` takes classes, predicates, FQN globs and re.Patterns, not the class int"),
        (nn.ReLU(), "re.Patterns, not an instance of ReLU"),
        ([nn.ReLU, 3], "re.Patterns, not an instance of int"),
    ],
)
def test_an_exclusion_that_cannot_be_meant_is_an_error(exclude: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        exclude_tests(exclude, TREE)


def test_repeated_without_repetition_is_an_error() -> None:
    with pytest.raises(SelectionError, match="`repeated` matches no module"):
        repeated_test(grow(nn.Sequential(nn.Linear(1, 1), nn.ReLU())))
    with pytest.raises(SelectionError, match="`repeated` matches no module"):
        repeated_test(grow(nn.ModuleList([nn.ModuleList([nn.ReLU()]), nn.ModuleList()])))


@pytest.mark.parametrize("answer", [1, "yes", True])
def test_a_predicate_answers_with_anything_that_is_true(answer: Any) -> None:
    assert asking("where", lambda module, fqn: answer)(nn.ReLU(), "a") is True


def test_what_a_predicate_raises_comes_through_with_a_note() -> None:
    def predicate(module: nn.Module, fqn: str) -> bool:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        asking("where", predicate)(nn.ReLU(), "a.b")
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by the predicate in `where` for a.b (ReLU)"]


def test_a_predicate_may_be_an_object_that_is_iterable_too() -> None:
    class Predicate(list[str]):
        def __call__(self, module: nn.Module, fqn: str) -> bool:
            return fqn in self

    (test,) = exclude_tests(Predicate(["head", "gone"]), TREE)
    assert chosen(test) == ["head"]


def test_the_census_counts_modules_once_and_is_short() -> None:
    shared = nn.ReLU()
    assert census(grow(nn.Sequential(shared, shared, nn.GELU())).candidates) == "Sequential x 1, ReLU x 1, GELU x 1"
    many = nn.ModuleList([type(f"Act{i}", (nn.ReLU,), {})() for i in range(25)])
    assert census(grow(many).candidates).endswith("Act9 x 1 and 15 more classes")
    assert census([]) == "none"


def test_near_names_are_few_and_the_nearest_is_first() -> None:
    assert near("layer", ["layers.0", "layers", "head"]) == "; near names: layers, layers.0"
    assert near("layer", [f"layer{i}" for i in range(9)]).count("layer") == 5
    assert near("x", ["layers"]) == ""
