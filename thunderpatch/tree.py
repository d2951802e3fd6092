"""The modules of a model under all of their names, in order, and which match contains which."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from torch import nn

from .errors import SelectionError

# A module under one of its names: FQN, module, index of its parent's place (-1 for the model itself).
Place: TypeAlias = tuple[str, nn.Module, int]
Nested: TypeAlias = Literal["outermost", "innermost", "all"]

# Shared modules inside shared modules multiply names; without a bound a small model could take forever.
_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True)
class Tree:
    """Every place of a model, and those that are candidates: modules with a `forward` of their own."""

    places: list[Place]
    candidates: list[Place]


def describe(fqn: str, module: nn.Module) -> str:
    """Name a module in a message: its FQN and class, never its repr."""
    return f"{fqn or '(the model itself)'} ({type(module).__name__})"


def grow(model: nn.Module) -> Tree:
    """List the modules of `model` like `named_modules(remove_duplicate=False)`, which a cycle would not stop.

    Raises:
        SelectionError: shared modules give the model more than a million names.
    """
    places: list[Place] = []
    seen: set[int] = set()
    stack: list[Place] = [("", model, -1)]
    while stack:
        place = stack.pop()
        fqn, module, parent = place
        if id(module) in seen and _is_inside_itself(places, module, parent):
            continue
        seen.add(id(module))
        index = len(places)
        if index == _MOST_NAMES:
            raise SelectionError(
                f"{describe('', model)} has more than {_MOST_NAMES:,} names for its {len(seen):,} modules, "
                "because they are shared inside shared modules: select inside a part of it"
            )
        places.append(place)
        if module._modules:
            prefix = f"{fqn}." if fqn else ""
            children = [(prefix + name, child, index) for name, child in module._modules.items() if child is not None]
            stack.extend(reversed(children))
    return Tree(places, _with_forward(places))


def _is_inside_itself(places: list[Place], module: nn.Module, parent: int) -> bool:
    while parent >= 0:
        _, ancestor, parent = places[parent]
        if ancestor is module:
            return True
    return False


def _with_forward(places: list[Place]) -> list[Place]:
    # ModuleList, ModuleDict and their like inherit the forward of nn.Module, which only raises. The lookup is
    # static because some classes (TorchScript's) have a descriptor there that fails when asked.
    inherited = nn.Module.__dict__["forward"]
    classes = {type(module) for _, module, _ in places}
    bare = {cls for cls in classes if inspect.getattr_static(cls, "forward", None) is inherited}
    return [place for place in places if type(place[1]) not in bare or "forward" in vars(place[1])]


def repeated_items(tree: Tree) -> set[int]:
    """Return the ids of the items of each ModuleList or Sequential with several items, all of one class."""
    ids: set[int] = set()
    for _, module, _ in tree.places:
        if issubclass(type(module), (nn.ModuleList, nn.Sequential)):
            items = [item for item in module._modules.values() if item is not None]
            if len(items) >= 2 and len({type(item) for item in items}) == 1:
                ids.update(map(id, items))
    return ids


def keep_nested(tree: Tree, matches: Collection[int], nested: Nested) -> Collection[int]:
    """Return the ids of the matches to keep: those in no other, those that contain no other, or all."""
    if nested == "outermost":
        return _outermost(tree.places, matches)
    if nested == "innermost":
        return _innermost(tree.places, matches)
    return matches


def _outermost(places: list[Place], matches: Collection[int]) -> set[int]:
    kept: set[int] = set()
    covered: list[bool] = []
    for _, module, parent in places:
        inside = parent >= 0 and covered[parent]
        match = id(module) in matches
        if match and not inside:
            kept.add(id(module))
        covered.append(inside or match)
    return kept


def _innermost(places: list[Place], matches: Collection[int]) -> set[int]:
    kept = set(matches)
    holds_match = [False] * len(places)
    # Parents come before their children, so that from the end each place is complete when it is reached.
    for index in range(len(places) - 1, -1, -1):
        _, module, parent = places[index]
        match = id(module) in matches
        if match and holds_match[index]:
            kept.discard(id(module))
        if parent >= 0 and (match or holds_match[index]):
            holds_match[parent] = True
    return kept
