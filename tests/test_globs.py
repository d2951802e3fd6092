"""The rules of FQN globs, and their agreement with a matcher written by recursion."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thunderpatch.errors import SelectionError
from thunderpatch.globs import compile_glob, is_literal


def matches(glob: str, fqn: str) -> bool:
    return compile_glob(glob).fullmatch(fqn) is not None


@pytest.mark.parametrize(
    ("glob", "fqn"),
    [
        ("layers.*.mlp", "layers.0.mlp"),
        ("layers.*", "layers.10"),
        ("*", "head"),
        ("*norm*", "layernorm2"),
        ("h?ad", "head"),
        ("layers.[0-3]", "layers.2"),
        ("layers.1[!0-3]", "layers.14"),
        ("layers.[]x]", "layers.]"),
        ("a[[]", "a["),
        ("[a^]", "^"),
        ("[a-]", "-"),
        ("[&~|-]x", "&x"),
        ("[\\d]", "d"),
        ("a+b", "a+b"),
    ],
)
def test_a_wildcard_matches_inside_one_segment(glob: str, fqn: str) -> None:
    assert matches(glob, fqn)


@pytest.mark.parametrize(
    ("glob", "fqn"),
    [
        ("*", "a.b"),
        ("*", ""),
        ("layers.*", "layers"),
        ("layers.*", "layers.0.mlp"),
        ("*.mlp", "layers.0.mlp"),
        ("a?b", "a.b"),
        ("a[!x]b", "a.b"),
        ("a[--0]b", "a.b"),
        ("a+b", "aab"),
        ("head", "Head"),
        ("head", "head\n"),
    ],
)
def test_a_wildcard_never_stands_for_a_dot_or_for_nothing_at_all(glob: str, fqn: str) -> None:
    assert not matches(glob, fqn)


@pytest.mark.parametrize(
    ("glob", "fqn"),
    [
        ("**.norm", "norm"),
        ("**.norm", "a.norm"),
        ("**.norm", "a.b.norm"),
        ("a.**.d", "a.d"),
        ("a.**.d", "a.b.c.d"),
        ("**.**.d", "d"),
        ("**", "a"),
        ("**", "a.b.c"),
        ("layers.**", "layers.0"),
        ("layers.**", "layers.0.mlp"),
        ("**.attn.**", "h.0.attn.q"),
    ],
)
def test_a_double_star_crosses_segments(glob: str, fqn: str) -> None:
    assert matches(glob, fqn)


@pytest.mark.parametrize(
    ("glob", "fqn"),
    [("layers.**", "layers"), ("**", ""), ("**.norm", "a.layernorm"), ("a.**.d", "ad"), ("a.**.d", "a.bd")],
)
def test_a_double_star_keeps_to_whole_segments_and_excludes_what_it_is_below_of(glob: str, fqn: str) -> None:
    assert not matches(glob, fqn)


@pytest.mark.parametrize(
    ("glob", "why"),
    [
        ("", "empty"),
        (".a", "empty segment"),
        ("a.", "empty segment"),
        ("a..b", "empty segment"),
        (".", "empty segment"),
        ("***", "stands alone"),
        ("a**", "stands alone"),
        ("a.b**c.d", "stands alone"),
        ("a[bc", "no partner"),
        ("a]b", "no partner"),
        ("a[.]b", "no partner"),
        ("[]", "class is empty"),
        ("[!]", "class is empty"),
        ("[z-a]", "backwards"),
        (None, "not None"),
        (3, "not 3"),
        (b"a", "not b'a'"),
    ],
)
def test_a_bad_glob_is_an_error_that_says_why(glob: Any, why: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(why)):
        compile_glob(glob)


def test_a_glob_without_wildcards_is_a_literal() -> None:
    assert is_literal("layers.0.mlp")
    assert not any(map(is_literal, ["layers.*", "layer?", "layers.[0]", "**"]))


# The reference: the same rules, by recursion over segments and characters.


def reference_matches(glob: str, fqn: str) -> bool:
    return fqn != "" and match_segments(glob.split("."), fqn.split("."))


def match_segments(globs: list[str], names: list[str]) -> bool:
    if not globs:
        return not names
    if globs[0] == "**":
        if len(globs) == 1:
            return len(names) >= 1
        return any(match_segments(globs[1:], names[i:]) for i in range(len(names) + 1))
    return bool(names) and match_characters(globs[0], names[0]) and match_segments(globs[1:], names[1:])


def match_characters(glob: str, name: str) -> bool:
    if not glob:
        return not name
    if glob[0] == "*":
        return match_characters(glob[1:], name) or (bool(name) and match_characters(glob, name[1:]))
    if not name:
        return False
    if glob[0] == "[":
        members, rest = glob[1:].split("]", 1)
        hit = name[0] not in members[1:] if members[0] == "!" else name[0] in members
        return hit and match_characters(rest, name[1:])
    return glob[0] in ("?", name[0]) and match_characters(glob[1:], name[1:])


pieces = st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]", "\\", "+"])
segments = st.lists(pieces, min_size=1, max_size=4).map("".join).filter(lambda segment: "**" not in segment)
globs = st.lists(segments | st.just("**"), min_size=1, max_size=5).map(".".join)
fqns = st.lists(st.text("ab+\\\n", min_size=1, max_size=4), min_size=1, max_size=5).map(".".join) | st.just("")


@settings(max_examples=500, deadline=None)
@given(globs, fqns)
@example("**.**.a", "a")
@example("a.**.**", "a.b")
@example("a.**.**", "a")
def test_a_glob_agrees_with_the_reference(glob: str, fqn: str) -> None:
    assert matches(glob, fqn) == reference_matches(glob, fqn)


@settings(max_examples=200, deadline=None)
@given(fqns.filter(bool))
def test_a_name_is_a_glob_that_matches_itself(fqn: str) -> None:
    assert matches(fqn, fqn)
    assert matches("**", fqn)
