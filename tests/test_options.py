"""The options of one apply: checked once, copied, and compared by what they mean."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from thunderpatch import ArgumentError
from thunderpatch.compat import load_thunder
from thunderpatch.options import Options, read_options

thunder = load_thunder()
OLD = "recompile_limit" not in inspect.signature(torch.compile).parameters
Transform = thunder.core.transform_common.Transform


def read(
    on_error: str = "raise", check: bool = False, direct: bool = True, isolate: bool = False, **given: Any
) -> Options:
    return read_options(given, on_error=on_error, check=check, direct=direct, isolate=isolate)


class Nothing(Transform):
    pass


def test_equal_options_are_equal_in_any_order() -> None:
    one = read(executors=["sdpa"], fullgraph=True, options={"epilogue_fusion": True, "max_autotune": False})
    two = read(options={"max_autotune": False, "epilogue_fusion": True}, fullgraph=True, executors=["sdpa"])
    assert one.key == two.key and one == two and hash(one.key) == hash(two.key)


@pytest.mark.parametrize(
    "other",
    [
        {"fullgraph": True},
        {"dynamic": False},
        {"dynamic": True},
        {"on_error": "eager"},
        {"check": True},
        {"direct": False},
        pytest.param({"isolate": True}, marks=pytest.mark.skipif(OLD, reason="refused before torch 2.12")),
        {"executors": ["sdpa"]},
        {"options": {"epilogue_fusion": False}},
        {"fusion_type": "consecutive"},
    ],
)
def test_each_option_tells_two_sets_apart(other: dict[str, Any]) -> None:
    assert read(**other).key != read().key


def test_no_option_means_the_same_as_the_default() -> None:
    assert read(dynamic=None, fullgraph=False).key == read().key
    assert read(mode=None, options=None).key == read(options={}).key == read().key


def test_an_object_that_cannot_be_hashed_equals_itself_alone() -> None:
    class Unhashable(Transform):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, two = Unhashable(), Unhashable()
    assert read(transforms=[one]).key == read(transforms=[one]).key
    assert read(transforms=[one]).key != read(transforms=[two]).key


def test_numbers_that_are_equal_and_of_different_kinds_differ() -> None:
    assert read(options={"max_autotune": True}).key != read(options={"max_autotune": 1}).key


def test_what_the_caller_gave_is_neither_kept_nor_changed() -> None:
    transforms, settings = [Nothing()], {"epilogue_fusion": True}
    options = read(transforms=transforms, options=settings)
    assert options.thunder["transforms"] == transforms and options.thunder["transforms"] is not transforms
    settings["epilogue_fusion"] = False
    transforms.clear()
    assert options.inductor == {"epilogue_fusion": True} and len(options.thunder["transforms"]) == 1


def test_a_mode_is_read_into_the_settings_that_it_stands_for() -> None:
    assert read(mode="max-autotune-no-cudagraphs").inductor["max_autotune"] is True
    assert read(mode="default").inductor == {}


@pytest.mark.parametrize("name", ["transforms", "fusion_type", "nv_enable_matmul", "sharp_edges", "sdpa_debug"])
def test_an_option_that_thunder_reads_is_known(name: str) -> None:
    with pytest.raises(ArgumentError, match="'nonsense' is neither"):
        read(**{name: None, "nonsense": 1})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"executor": ["sdpa"]}, "near it: executors"),
        ({"fullgrph": True}, "near it: fullgraph"),
        ({"zzz": 1}, "neither a selector nor an option"),
        ({"backend": "eager"}, "thunder is the backend here"),
        ({"disable": True}, r"thunderpatch\.disabled"),
        ({"recompile_limit": 3}, "budget of its own"),
        ({"dynamic": "yes"}, "dynamic must be"),
        ({"fullgraph": "yes"}, "fullgraph must be"),
        ({"mode": "fast"}, "mode must be one of .*max-autotune"),
        ({"mode": "default", "options": {"max_autotune": True}}, "not both"),
        ({"options": ["max_autotune"]}, "must be a dict"),
        ({"options": {"max_autotun": True}}, "near it: max_autotune"),
        ({"executors": ["no such executor"]}, "thunder refuses"),
        ({"transforms": [print]}, "no thunder Transform"),
        ({"on_error": "ignore"}, "'raise' or 'eager'"),
        ({"check": "maybe"}, "check must be True or False"),
    ],
)
def test_what_would_fail_later_fails_now_and_says_how_to_go_on(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        read(**given)


def test_they_print_as_what_was_given() -> None:
    assert str(read()) == "defaults"
    assert str(read(executors=["sdpa"], fullgraph=True)) == "executors=['sdpa'], fullgraph=True"
    assert str(read(dynamic=False, on_error="eager")) == "dynamic=False, on_error='eager'"


def test_reading_options_leaves_thunders_executors_alone() -> None:
    before = list(thunder.get_default_executors()), list(thunder.get_always_executors())
    read(executors=["torchcompile"])
    assert (list(thunder.get_default_executors()), list(thunder.get_always_executors())) == before
