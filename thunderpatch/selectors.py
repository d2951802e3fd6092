"""What the selectors of `select` accept, turned into tests of a module and its FQN."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import nn

from .errors import SelectionError
from .globs import compile_glob, is_literal
from .tree import Place, Tree, describe, repeated_items

Predicate: TypeAlias = Callable[[nn.Module, str], bool]
Types: TypeAlias = type[nn.Module] | str | Iterable[type[nn.Module] | str]
Names: TypeAlias = str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
Excluded: TypeAlias = type[nn.Module] | str | re.Pattern[str] | Predicate
Exclude: TypeAlias = Excluded | Iterable[Excluded]


def types_test(types: Types, tree: Tree) -> Predicate:
    """Return a test of a module's real class, which a delegated `__class__` does not deceive."""
    classes = {type(module) for _, module, _ in tree.places}
    wanted: set[type] = set()
    for item in _alternatives("types", types):
        if isinstance(item, str):
            wanted |= _classes_named(item, classes, tree)
        elif isinstance(item, type) and issubclass(item, nn.Module):
            wanted |= {cls for cls in classes if item in cls.__mro__}
        else:
            raise SelectionError(
                f"`types` takes subclasses of nn.Module and class names, not {_kind(item)}; "
                f"classes here: {census(tree.candidates)}"
            )

    def test(module: nn.Module, fqn: str) -> bool:
        return type(module) in wanted

    if not _matches_any(test, tree.candidates):
        raise SelectionError(
            f"`types` matches no module{_containers(test, tree)}; classes here: {census(tree.candidates)}"
        )
    return test


def names_test(names: Names, tree: Tree) -> Predicate:
    """Return a test of the whole FQN."""
    items = _alternatives("names", names)
    test = _fqn_test("names", items, tree)
    if not _matches_any(test, tree.candidates):
        hints = {near(item, _fqns(tree)) for item in items if isinstance(item, str)}
        raise SelectionError(
            f"`names` matches no module{_containers(test, tree)}{''.join(sorted(hints)) or _samples(tree)}; "
            f"classes here: {census(tree.candidates)}"
        )
    return test


def repeated_test(tree: Tree) -> Predicate:
    """Return a test for the items of lists that repeat one class."""
    ids = repeated_items(tree)

    def test(module: nn.Module, fqn: str) -> bool:
        return id(module) in ids

    if not _matches_any(test, tree.candidates):
        raise SelectionError(
            "`repeated` matches no module: no ModuleList or Sequential here has two or more items, "
            f"all of one class with a forward; classes here: {census(tree.candidates)}"
        )
    return test


def exclude_tests(exclude: Exclude, tree: Tree) -> list[Predicate]:
    """Return the tests of which one suffices to take a module out."""
    tests: list[Predicate] = []
    fqns: list[object] = []
    for item in _alternatives("exclude", exclude, may_be_empty=True):
        if isinstance(item, type) and issubclass(item, nn.Module):
            tests.append(_class_test(item))
        elif callable(item) and not isinstance(item, (type, nn.Module)):
            tests.append(asking("exclude", item))
        else:
            fqns.append(item)
    return [*tests, _fqn_test("exclude", fqns, tree)] if fqns else tests


def asking(argument: str, predicate: Predicate) -> Predicate:
    """Return the caller's predicate as a test; what it raises comes through, with a note on where."""

    def test(module: nn.Module, fqn: str) -> bool:
        try:
            return bool(predicate(module, fqn))
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"raised by the predicate in `{argument}` for {describe(fqn, module)}")
            raise

    return test


def census(places: Iterable[Place]) -> str:
    """List the classes of the modules with their counts: the ten most frequent."""
    modules = {id(module): module for _, module, _ in places}
    counts = Counter(type(module).__name__ for module in modules.values())
    text = ", ".join(f"{name} x {count}" for name, count in counts.most_common(10))
    return text + (f" and {len(counts) - 10} more classes" if len(counts) > 10 else "") or "none"


def near(wanted: str, known: Iterable[str]) -> str:
    """Say which of the known names are near the wanted one, nearest first, or nothing."""
    matches = difflib.get_close_matches(wanted, list(known), n=5)
    return f"; near names: {', '.join(matches)}" if matches else ""


def _alternatives(argument: str, given: object, may_be_empty: bool = False) -> list[object]:
    # A string and a class can be iterable, but each is one alternative; so is a predicate that is an object.
    if isinstance(given, (str, type, re.Pattern)) or callable(given) or not isinstance(given, Iterable):
        return [given]
    items = list(given)
    if not items and not may_be_empty:
        raise SelectionError(f"`{argument}` is empty, so that nothing can match: leave it out")
    return items


def _classes_named(name: str, classes: set[type], tree: Tree) -> set[type]:
    found = {cls for cls in classes if any(name in _names_of(base) for base in cls.__mro__)}
    if not found:
        known = {base.__name__ for cls in classes for base in cls.__mro__}
        raise SelectionError(
            f"no module here is of a class named {name!r}{near(name.rpartition('.')[2], sorted(known))}; "
            f"classes here: {census(tree.candidates)}"
        )
    return found


def _names_of(cls: type) -> tuple[str, str]:
    return cls.__name__, f"{cls.__module__}.{cls.__qualname__}"


def _class_test(cls: type[nn.Module]) -> Predicate:
    return lambda module, fqn: cls in type(module).__mro__


def _fqn_test(argument: str, items: list[object], tree: Tree) -> Predicate:
    # Names are looked up, not matched one by one: there may be as many of them as there are modules.
    names = {item for item in items if isinstance(item, str) and is_literal(item)}
    if unknown := names.difference(_fqns(tree)):
        raise _no_such_module(argument, min(unknown), tree)
    patterns = [_pattern(argument, item) for item in items if not isinstance(item, str) or item not in names]
    return lambda module, fqn: fqn in names or any(pattern.fullmatch(fqn) for pattern in patterns)


def _matches_any(test: Predicate, places: Iterable[Place]) -> bool:
    return any(test(module, fqn) for fqn, module, _ in places)


def _containers(test: Predicate, tree: Tree) -> str:
    """Say of a test that matches no candidate which container it matches."""
    for fqn, module, _ in tree.places:
        if test(module, fqn):
            return f", for {describe(fqn, module)} has no forward of its own"
    return ""


def _pattern(argument: str, item: object) -> re.Pattern[str]:
    if isinstance(item, re.Pattern):
        if isinstance(item.pattern, str):
            return item
        raise SelectionError(f"`{argument}` takes patterns of str, not of bytes: {item.pattern!r}")
    if not isinstance(item, str):
        others = "" if argument == "names" else "classes, predicates, "
        raise SelectionError(f"`{argument}` takes {others}FQN globs and re.Patterns, not {_kind(item)}")
    return compile_glob(item)


def _no_such_module(argument: str, name: str, tree: Tree) -> SelectionError:
    # A name without wildcards means one module; one that is misspelt must not pass as a mere alternative.
    compile_glob(name)  # a glob that cannot be read is the better thing to say
    for fqn, module, _ in tree.places:
        if fqn == name:
            return SelectionError(
                f"`{argument}`: {describe(fqn, module)} has no forward of its own, so it is never selected; "
                f"'{name}.*' is its items, '{name}.**' is all that is below it"
            )
    hint = ""
    if argument == "exclude" and any(name in _names_of(type(module)) for _, module, _ in tree.places):
        hint = "; to exclude a class give the class itself, for a str is an FQN glob"
    return SelectionError(
        f"`{argument}`: no module is called {name!r}{near(name, _fqns(tree)) or _samples(tree)}{hint}"
    )


def _fqns(tree: Tree) -> list[str]:
    return [fqn for fqn, _, _ in tree.candidates if fqn]


def _samples(tree: Tree) -> str:
    fqns = _fqns(tree)
    return f"; names here: {', '.join(fqns[:5])}{', ...' if len(fqns) > 5 else ''}" if fqns else ""


def _kind(item: object) -> str:
    if isinstance(item, type):
        return f"the class {item.__name__}"
    return f"an instance of {type(item).__name__}"
