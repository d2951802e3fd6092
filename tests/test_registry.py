"""What puts a proxy in place and takes it out, and how it is told whether a module is patched."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from thunderpatch import ThunderPatchWarning, registry
from thunderpatch.attribution import watch
from thunderpatch.forward import PatchedForward
from thunderpatch.options import read_options
from thunderpatch.regions import compiler_for


@pytest.fixture(scope="module")
def compiler():
    options = read_options({}, on_error="raise", check=False, direct=True)
    return compiler_for(options, watch, watch.owner)


@pytest.fixture
def other():
    options = read_options({"dynamic": False}, on_error="raise", check=False, direct=True)
    return compiler_for(options, watch, watch.owner)


def put(module: nn.Module, compiler) -> PatchedForward:
    proxy = registry.build(module, "it", compiler)
    registry.install(module, proxy)
    return proxy


def test_building_a_proxy_leaves_the_module_alone(compiler) -> None:
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    proxy = registry.build(module, "it", compiler)
    assert dict(vars(module)) == before
    assert proxy.__wrapped__ == module.forward
    assert registry.active(module) is None


def test_installed_is_active_and_uninstalled_is_not(compiler) -> None:
    module = nn.Linear(2, 2)
    proxy = put(module, compiler)
    assert vars(module)["forward"] is proxy is registry.proxy_of(module)
    assert registry.active(module) is proxy._self_record
    assert registry.uninstall(module) is True
    assert registry.active(module) is None and registry.proxy_of(module) is None
    assert registry.uninstall(module) is False


def test_an_instance_forward_comes_back_as_the_very_object(compiler) -> None:
    module = nn.Linear(2, 2)
    own = module.forward = lambda x: x
    put(module, compiler)
    registry.uninstall(module)
    assert vars(module)["forward"] is own


def test_a_deleted_forward_is_not_active(compiler) -> None:
    module = nn.Linear(2, 2)
    proxy = put(module, compiler)
    del module.forward
    assert registry.active(module) is None and not registry.displaced(module)
    assert registry.uninstall(module) is False
    assert not proxy._self_record.on


def test_a_replaced_forward_is_not_active_and_a_wrapped_one_is(compiler) -> None:
    module = nn.Linear(2, 2)
    put(module, compiler)
    module.forward = lambda x: x
    assert registry.active(module) is None
    del module.forward
    inner = put(module, compiler)
    module.forward = lambda x: inner(x)
    assert registry.active(module) is inner._self_record and registry.displaced(module)


def test_a_wrapper_that_answers_for_all_attributes_is_not_taken_for_ours(compiler) -> None:
    class Delegating:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __call__(self, x: object) -> object:
            return self.inner(x)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        @property
        def __class__(self) -> type:
            return type(self.inner)

    module = nn.Linear(2, 2)
    put(module, compiler)
    wrapper = module.forward = Delegating(module.forward)
    assert isinstance(wrapper, PatchedForward)  # so it says
    assert registry.proxy_of(module) is None and registry.displaced(module)
    with pytest.warns(ThunderPatchWarning, match=r"it \(Linear\) is restored below another wrapper"):
        registry.uninstall(module)
    assert vars(module)["forward"] is wrapper


def test_a_record_is_one_for_each_set_of_options_and_stays(compiler, other) -> None:
    module = nn.Linear(2, 2)
    first = put(module, compiler)._self_record
    registry.uninstall(module)
    second = put(module, other)._self_record
    registry.uninstall(module)
    assert first is not second
    assert put(module, compiler)._self_record is first
    assert registry.records_of(module) == [first, second]
    assert registry.active(module) is first


def test_an_inert_proxy_is_never_wrapped(compiler) -> None:
    module = nn.Linear(2, 2)
    stale = put(module, compiler)
    registry.uninstall(module)
    module.forward = stale
    fresh = registry.build(module, "it", compiler)
    assert type(fresh.__wrapped__) is not PatchedForward
    registry.install(module, fresh)
    registry.uninstall(module)
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "make",
    [
        lambda: staticmethod(lambda x: x + 1),
        lambda: classmethod(lambda cls, x: x + 1),
        lambda: lambda self, x: x + 1,
        lambda: type("Callable", (), {"__call__": lambda self, x: x + 1})(),
    ],
    ids=["staticmethod", "classmethod", "function", "callable object"],
)
def test_the_class_forward_is_bound_as_python_binds_it(make) -> None:
    cls = type("Own", (nn.Module,), {"forward": make()})
    assert registry.class_forward(cls())(1) == 2


def test_a_deep_copy_has_its_own_record_and_the_same_group(compiler) -> None:
    module = nn.Linear(2, 2)
    source = put(module, compiler)._self_record
    module(torch.randn(1, 2))
    clone = copy.deepcopy(module)
    record = registry.active(clone)
    assert record is not None and record is not source
    assert record.group is source.group
    registry.uninstall(clone)
    assert registry.active(module) is source


def test_a_shallow_copy_is_cleaned_without_touching_its_source(compiler) -> None:
    module = nn.Linear(2, 2)
    put(module, compiler)
    clone = copy.copy(module)
    assert registry.active(clone) is None and registry.proxy_of(clone) is not None
    assert registry.uninstall(clone) is True
    assert "forward" not in vars(clone)
    assert registry.active(module) is not None


def test_patched_below_finds_each_module_once_and_by_identity(compiler) -> None:
    class Alike(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return type(other) is Alike

        def __hash__(self) -> int:
            return 1

    one, two = Alike(2, 2), Alike(2, 2)
    model = nn.Sequential(one, two, one)
    for module in (one, two):
        put(module, compiler)
    assert [(fqn, id(module)) for fqn, module in registry.patched_below(model)] == [
        ("0", id(one)),
        ("1", id(two)),
    ]


def test_the_registry_keeps_no_module_alive(compiler) -> None:
    module = nn.Linear(2, 2)
    put(module, compiler)
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_a_reference_tells_modules_apart_by_identity_alive_or_gone() -> None:
    class Alike(nn.Linear):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, two = Alike(2, 2), Alike(2, 2)
    first, again, other = registry.ModuleRef(one), registry.ModuleRef(one), registry.ModuleRef(two)
    assert first is not again and first == again and hash(first) == hash(again)
    assert first != other and {first: 1}.get(other) is None
    del one
    gc.collect()
    assert first() is None and first == first and first != again and first != other
