"""Which modules: types, FQN globs and predicates, ANDed."""

from __future__ import annotations

import warnings
from typing import Final, TypeAlias

import torch
from torch import nn

from .errors import ArgumentError, SelectionError, ThunderPatchWarning
from .patchable import reasons, why_unpatchable
from .selectors import (
    Exclude,
    Names,
    Predicate,
    Types,
    asking,
    census,
    exclude_tests,
    names_test,
    repeated_test,
    types_test,
)
from .tree import Nested, Tree, describe, grow, keep_nested

__all__ = ["Exclude", "Names", "Nested", "Predicate", "Types", "select", "why_unpatchable"]

_NESTED: Final = ("outermost", "innermost", "all")
_MOST_SHOWN: Final = 5  # skipped modules in one warning

# By the module's id: the name that it is reported under, and the module.
_Matches: TypeAlias = dict[int, tuple[str, nn.Module]]


def select(
    model: nn.Module,
    *,
    types: Types | None = None,
    names: Names | None = None,
    where: Predicate | None = None,
    exclude: Exclude | None = None,
    repeated: bool = False,
    nested: Nested = "outermost",
) -> dict[str, nn.Module]:
    """Return the modules that the selectors choose, by FQN, in the order of `model.named_modules()`.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> model = nn.Sequential(block(), block(), nn.Linear(4, 2))
    >>> list(select(model, types=nn.Linear))
    ['0.0', '1.0', '2']
    >>> list(select(model, types=["Linear", "ReLU"], names="1.*"))
    ['1.0', '1.1']
    >>> list(select(model, where=lambda module, fqn: getattr(module, "out_features", 0) == 2))
    ['2']
    >>> list(select(model, types=nn.Linear, exclude="2"))
    ['0.0', '1.0']
    >>> list(select(nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])}), repeated=True))
    ['blocks.0', 'blocks.1']
    >>> list(select(model))  # no selector: the model itself
    ['']

    Selectors that are given are ANDed, alternatives inside one are ORed. A module with several names is
    selected once, under the first that matches; `exclude` takes it out if any of its names is excluded.
    Containers without a `forward` of their own are never selected. Matches that cannot be patched (see
    `why_unpatchable`) are left out with one warning, and what is inside them is searched.

    Args:
        model: where to look.
        types: a class, a class name (`"Linear"`, `"torch.nn.modules.linear.Linear"`), or several: the
            module's real type is or derives from it. A name that no class here has is an error.
        names: an FQN glob, an `re.Pattern` that must match the whole FQN, or several. In a glob `*`, `?` and
            `[...]` stay inside one segment and `**` crosses segments: `"layers.*.mlp"`, `"**.norm"`. A glob
            without wildcards that is no module's name is an error.
        where: `where(module, fqn) -> bool`, asked only about what the other selectors leave.
        exclude: classes, FQN globs, patterns, predicates like `where`, or several: taken out of the above.
            What is below an excluded module may still match.
        repeated: True for the items of every `ModuleList` and `Sequential` that has two or more items, all of
            one class: the blocks of a transformer.
        nested: of matches inside matches keep the "outermost" (default), the "innermost", or "all".

    Raises:
        SelectionError: nothing matches, or a selector cannot be read.
        ArgumentError: an argument is of the wrong kind.
    """
    _check_arguments(model, where, repeated, nested)
    tree = grow(model)
    tests: dict[str, Predicate] = {}
    if types is not None:
        tests["types"] = types_test(types, tree)
    if names is not None:
        tests["names"] = names_test(names, tree)
    if repeated:
        tests["repeated"] = repeated_test(tree)
    if where is not None:
        tests["where"] = asking("where", where)
    exclusions = [] if exclude is None else exclude_tests(exclude, tree)
    if exclusions and not tests:
        raise SelectionError("`exclude` takes out of what is selected: give types, names, where or repeated too")

    matches = _matches(tree, tests) if tests else _model_itself(model, tree)
    _take_out(matches, tree, exclusions)
    chosen, skipped = _patchable(matches, tree, nested)
    if skipped:
        _warn_of(skipped)
    return chosen


def _check_arguments(model: object, where: object, repeated: object, nested: object) -> None:
    if isinstance(model, type):
        raise ArgumentError(f"the model is an nn.Module, not the class {model.__name__}: pass an instance of it")
    if not issubclass(type(model), nn.Module):
        raise ArgumentError(f"the model is an nn.Module, not a {type(model).__name__}")
    if issubclass(type(model), torch.jit.ScriptModule):
        raise SelectionError(
            f"the model ({type(model).__name__}) is compiled by TorchScript, and so is all that is in it: "
            "select in the model that it was made from"
        )
    if where is not None and not callable(where):
        raise ArgumentError(f"where is a callable(module, fqn) -> bool, not a {type(where).__name__}")
    if not isinstance(repeated, bool):
        raise ArgumentError(f"repeated is True or False, not {repeated!r}")
    if nested not in _NESTED:
        raise ArgumentError(f"nested is one of {', '.join(map(repr, _NESTED))}, not {nested!r}")


def _model_itself(model: nn.Module, tree: Tree) -> _Matches:
    if tree.places[0] not in tree.candidates[:1]:
        raise SelectionError(
            f"no selector is given, and {describe('', model)} has no forward of its own: "
            f"select what is inside; classes here: {census(tree.candidates)}"
        )
    return {id(model): ("", model)}


def _matches(tree: Tree, tests: dict[str, Predicate]) -> _Matches:
    # One test after the other, so that `where` comes last and sees only what passed the others.
    left = tree.candidates
    for test in tests.values():
        left = [place for place in left if test(place[1], place[0])]
    if not left:
        raise _no_match(tree, tests)
    matches: _Matches = {}
    for fqn, module, _ in left:
        matches.setdefault(id(module), (fqn, module))
    return matches


def _no_match(tree: Tree, tests: dict[str, Predicate]) -> SelectionError:
    others = {name: test for name, test in tests.items() if name != "where"}

    def count(*wanted: Predicate) -> int:
        return len({id(module) for fqn, module, _ in tree.candidates if all(test(module, fqn) for test in wanted)})

    together = " and ".join(others)
    if remaining := count(*others.values()):
        which = f"that match {together}" if others else "in the model"
        found = f"`where` accepts none of the {remaining} modules {which}"
    else:
        alone = ", ".join(f"{name} {count(test)}" for name, test in others.items())
        found = f"no module matches {together} together; modules that match each alone: {alone}"
    return SelectionError(f"{found}; classes here: {census(tree.candidates)}")


def _take_out(matches: _Matches, tree: Tree, exclusions: list[Predicate]) -> None:
    if not exclusions:
        return
    found = len(matches)
    # Under each of its names: what is excluded as `head.norm` would run patched there if it stayed as `norm`.
    for fqn, module, _ in tree.places:
        if id(module) in matches and any(test(module, fqn) for test in exclusions):
            del matches[id(module)]
    if not matches:
        raise SelectionError(f"`exclude` takes out all that the other selectors match (modules: {found})")


def _patchable(matches: _Matches, tree: Tree, nested: Nested) -> tuple[dict[str, nn.Module], list[str]]:
    """Resolve nested matches, and say what was skipped: it covers neither what it is in nor what is in it."""
    skipped: list[str] = []
    while True:
        kept = keep_nested(tree, matches, nested)
        chosen = {key: match for key, match in matches.items() if key in kept}
        whys = dict(zip(chosen, reasons(module for _, module in chosen.values()), strict=True))
        if not any(whys.values()):
            return _by_fqn(chosen), skipped
        skipped += [f"{describe(*matches.pop(key))} {why}" for key, why in whys.items() if why]


def _by_fqn(chosen: _Matches) -> dict[str, nn.Module]:
    named = dict(chosen.values())
    if len(named) < len(chosen):
        # setattr(model, "a.b", ...) makes a child with a dot in its name, which may be another's FQN.
        twice = [fqn for fqn, module in chosen.values() if named[fqn] is not module]
        raise SelectionError(f"several modules are called {twice[0]!r}: rename the child that has a dot in its name")
    return named


def _warn_of(skipped: list[str]) -> None:
    shown = "; ".join(skipped[:_MOST_SHOWN])
    more = len(skipped) - _MOST_SHOWN
    text = f"modules that cannot be patched are left out: {shown}" + (f"; and {more} more" if more > 0 else "")
    warnings.warn(text, ThunderPatchWarning, stacklevel=3)  # at the caller of `select`
