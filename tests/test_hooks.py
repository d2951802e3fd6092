"""Which hooks a call of a region would meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from thunderpatch import hooks


@pytest.fixture
def root() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


@pytest.fixture
def everywhere() -> Iterator[None]:
    handle = torch_module.register_module_forward_hook(lambda module, args, out: None)
    yield
    handle.remove()


REGISTER = {
    "forward pre": lambda module: module.register_forward_pre_hook(lambda *a: None),
    "forward": lambda module: module.register_forward_hook(lambda *a: None),
    "forward with kwargs": lambda module: module.register_forward_hook(lambda *a: None, with_kwargs=True),
    "full backward pre": lambda module: module.register_full_backward_pre_hook(lambda *a: None),
    "full backward": lambda module: module.register_full_backward_hook(lambda *a: None),
}


def test_no_hooks_is_the_empty_state(root: nn.Sequential) -> None:
    assert hooks.state(root) == ()


@pytest.mark.parametrize("kind", REGISTER)
def test_each_kind_of_hook_shows_at_any_depth_and_goes_away(root: nn.Sequential, kind: str) -> None:
    for module in (root[0], root[1], root[1][1]):
        handle = REGISTER[kind](module)
        assert hooks.state(root) != ()
        handle.remove()
        assert hooks.state(root) == ()


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_of_the_region_itself_do_not_show(root: nn.Sequential, kind: str) -> None:
    REGISTER[kind](root)
    assert hooks.state(root) == ()


def test_another_hook_is_another_state_even_of_the_same_function(root: nn.Sequential) -> None:
    def nothing(*args: object) -> None: ...

    handle = root[0].register_forward_hook(nothing)
    first = hooks.state(root)
    assert hooks.state(root) == first
    handle.remove()
    root[0].register_forward_hook(nothing)
    assert hooks.state(root) != first


def test_the_same_hook_on_another_module_is_another_state(root: nn.Sequential) -> None:
    root[0].register_forward_hook(lambda *a: None)
    first = hooks.state(root)
    del root[0]._forward_hooks[next(iter(root[0]._forward_hooks))]
    root[1].register_forward_hook(lambda *a: None)
    assert hooks.state(root) not in ((), first)


def test_global_hooks_show_for_every_region(root: nn.Sequential, everywhere: None) -> None:
    assert hooks.state(root) != () and hooks.state(nn.Linear(2, 2)) != ()


def test_a_module_that_contains_itself_ends(root: nn.Sequential) -> None:
    root[1].parent = [root]
    root[1]._modules["again"] = root
    assert hooks.state(root) == ()
    root.register_forward_hook(lambda *a: None)
    assert hooks.state(root) == ()


def test_empty_slots_for_children_are_passed_over(root: nn.Sequential) -> None:
    root.register_module("none", None)
    assert hooks.state(root) == ()


def test_registering_a_hook_anywhere_raises_the_number_that_regions_watch(root: nn.Sequential) -> None:
    before = torch.utils.hooks.RemovableHandle.next_id
    nn.Linear(1, 1).register_forward_hook(lambda *a: None)
    assert torch.utils.hooks.RemovableHandle.next_id > before
