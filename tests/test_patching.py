"""apply, restore, patched, disabled and the handle: what is promised to the one who calls them."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import (
    AlreadyPatchedError,
    ArgumentError,
    Patch,
    SelectionError,
    ThunderPatchError,
    ThunderPatchWarning,
    registry,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


def everything(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


def owned(patch: Patch) -> list[str]:
    return sorted(patch.modules)


def test_apply_compiles_nothing_until_a_module_is_called(model: nn.Sequential, x: torch.Tensor) -> None:
    patch = thunderpatch.apply(model, types=Block)
    assert [row.status for row in patch.report()] == ["never called"] * 2
    model(x)
    assert [row.compiled_calls for row in patch.report()] == [1, 1]


def test_with_no_selector_the_model_itself_is_patched(model: nn.Sequential, x: torch.Tensor) -> None:
    want = model(x)
    assert owned(thunderpatch.apply(model)) == [""]
    torch.testing.assert_close(model(x), want)
    assert not thunderpatch.is_patched(model[0])


def test_only_forward_is_set_and_only_on_what_was_selected(model: nn.Sequential) -> None:
    before = everything(model)
    thunderpatch.apply(model, names="0.up")
    after = everything(model)
    changed = [{*new} - {*old} for new, old in zip(after, before, strict=True)]
    assert changed == [{"forward"} if module is model[0].up else set() for module in model.modules()]
    del vars(model[0].up)["forward"]
    assert everything(model) == before


def test_the_handle_owns_what_it_installed_and_nothing_else(model: nn.Sequential) -> None:
    first = thunderpatch.apply(model, names="0.*")
    second = thunderpatch.apply(model, types=nn.Linear)
    assert (owned(first), owned(second)) == (["0.down", "0.up"], ["1.down", "1.up"])
    assert second.restore() == 2
    assert [thunderpatch.is_patched(m) for m in (model[0].up, model[1].up)] == [True, False]
    assert (len(first), len(second)) == (2, 0)
    assert second.restore() == 0
    assert first.restore() == 2


def test_a_handle_does_not_undo_what_a_later_one_installed(model: nn.Sequential) -> None:
    first = thunderpatch.apply(model, types=Block)
    thunderpatch.restore(model)
    second = thunderpatch.apply(model, types=Block)
    assert first.restore() == 0 and len(first) == 0
    assert len(second) == 2


def test_a_handle_is_a_context_manager(model: nn.Sequential) -> None:
    before = everything(model)
    with thunderpatch.apply(model, types=Block) as patch:
        assert len(patch) == 2
    assert everything(model) == before


def test_the_repr_tells_how_many_are_active_and_with_what(model: nn.Sequential) -> None:
    patch = thunderpatch.apply(model, types=Block, fullgraph=True)
    assert repr(patch) == "<Patch of 2 modules, 2 active; fullgraph=True>"
    with patch.disabled():
        assert repr(patch) == "<Patch of 2 modules, 0 active, 2 disabled; fullgraph=True>"
    patch.restore()
    assert repr(patch) == "<Patch of 2 modules, 0 active; fullgraph=True>"


def test_a_handle_keeps_no_model_alive(model: nn.Sequential) -> None:
    mine = copy.deepcopy(model)
    patch, ref = thunderpatch.apply(mine, types=Block), weakref.ref(mine)
    del mine
    gc.collect()
    assert ref() is None and len(patch) == 0 and dict(patch.modules) == {}
    assert patch.restore() == 0
    with pytest.raises(ArgumentError, match="gone"):
        patch.report()


def test_other_options_on_a_patched_module_are_an_error_that_changes_nothing(model: nn.Sequential) -> None:
    thunderpatch.apply(model, names="1")
    before = everything(model)
    with pytest.raises(AlreadyPatchedError, match=r"1 \(Block\) is patched with defaults.*fullgraph=True"):
        thunderpatch.apply(model, types=Block, fullgraph=True)
    assert everything(model) == before
    thunderpatch.restore(model)
    assert len(thunderpatch.apply(model, types=Block, fullgraph=True)) == 2


def test_a_failure_half_way_takes_off_what_was_installed(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real, seen = everything(model), registry.install, []

    def install(module: nn.Module, proxy: Any) -> None:
        seen.append(module)
        if len(seen) == 3:
            raise MemoryError
        real(module, proxy)

    monkeypatch.setattr(registry, "install", install)
    with pytest.raises(MemoryError):
        thunderpatch.apply(model, types=nn.Linear)
    assert len(seen) == 3 and everything(model) == before


@pytest.mark.parametrize("collects", [True, False])
def test_apply_leaves_the_garbage_collector_as_it_was_also_when_it_fails(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    seen = []

    def build(*_: Any) -> Any:
        seen.append(gc.isenabled())
        raise RuntimeError("no")

    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        thunderpatch.apply(model, types=nn.Linear)
        assert gc.isenabled() is collects
        thunderpatch.restore(model)
        monkeypatch.setattr(registry, "build", build)
        with pytest.raises(RuntimeError, match="no"):
            thunderpatch.apply(model, types=nn.Linear)
        assert seen == [False] and gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_warning_that_is_an_error_leaves_the_model_alone() -> None:
    model = nn.MultiheadAttention(4, 2)
    before = everything(model)
    with pytest.raises(ThunderPatchWarning, match="out_proj"):
        thunderpatch.apply(model, types=nn.Linear)
    assert everything(model) == before


def test_restore_puts_back_what_the_selectors_choose(model: nn.Sequential) -> None:
    thunderpatch.apply(model, types=nn.Linear)
    assert thunderpatch.restore(model, names="0.*") == 2
    assert thunderpatch.restore(model, types=nn.Linear) == 2
    assert thunderpatch.restore(model) == 0


def test_restore_takes_off_every_layer_of_nested_patches(model: nn.Sequential, x: torch.Tensor) -> None:
    before, want = everything(model), model(x)
    thunderpatch.apply(model, types=[Block, nn.Linear], nested="all")
    thunderpatch.apply(model)
    torch.testing.assert_close(model(x), want)
    assert thunderpatch.restore(model) == 7
    assert everything(model) == before


def test_restoring_a_part_leaves_the_rest(model: nn.Sequential) -> None:
    thunderpatch.apply(model, types=Block)
    assert thunderpatch.restore(model[0]) == 1
    assert [thunderpatch.is_patched(block) for block in model] == [False, True]


def test_patched_again_compiles_nothing_again(model: nn.Sequential, x: torch.Tensor) -> None:
    seen = []
    for _ in range(20):
        with thunderpatch.patched(model, types=Block):
            model(x)
            records = [registry.active(block) for block in model]
            seen.append((records[0].compiler.compiled, [record.compilations for record in records]))
    assert seen == seen[:1] * 20


def test_disabled_runs_the_originals_and_keeps_the_code(model: nn.Sequential, x: torch.Tensor) -> None:
    patch = thunderpatch.apply(model, types=Block)
    want = model(x)
    with thunderpatch.disabled(model), patch.disabled():
        torch.testing.assert_close(model(x), want)
        assert [row.calls for row in patch.report()] == [1, 1]
    compiled = [registry.active(block).compilations for block in model]
    model(x)
    assert [row.compiled_calls for row in patch.report()] == [2, 2]
    assert [registry.active(block).compilations for block in model] == compiled


def test_disabled_ends_when_the_body_raises(model: nn.Sequential, x: torch.Tensor) -> None:
    patch = thunderpatch.apply(model, types=Block)
    with pytest.raises(KeyError), thunderpatch.disabled(model):
        raise KeyError
    model(x)
    assert [row.compiled_calls for row in patch.report()] == [1, 1]


def test_restored_within_disabled_stays_restored(model: nn.Sequential, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block)
    with thunderpatch.disabled(model):
        thunderpatch.restore(model)
    assert not any(map(thunderpatch.is_patched, model))
    with thunderpatch.patched(model, types=Block) as patch:
        model(x)
        assert [row.compiled_calls for row in patch.report()] == [1, 1]


def test_is_patched_is_of_the_module_itself(model: nn.Sequential) -> None:
    thunderpatch.apply(model, names="0")
    assert [thunderpatch.is_patched(m) for m in (model, model[0], model[0].up, model[1])] == [
        False,
        True,
        False,
        False,
    ]


def test_a_deleted_forward_is_patched_again_by_the_next_apply(model: nn.Sequential, x: torch.Tensor) -> None:
    thunderpatch.apply(model[0])
    del model[0].forward
    assert not thunderpatch.is_patched(model[0])
    assert len(thunderpatch.apply(model[0])) == 1
    model[0](x)
    assert thunderpatch.report(model[0])[""].compiled_calls == 1


@pytest.mark.parametrize("new", ["halve", torch.exp, lambda x: x - 1, functools.partial(torch.mul, 3)])
def test_a_forward_that_was_set_after_restore_is_the_one_that_is_compiled_next(new: Any) -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def halve(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    module, x = Scale(), torch.randn(3)
    with thunderpatch.patched(module):
        module(x)
    module.forward = getattr(module, new) if isinstance(new, str) else new
    want = module(x)
    with thunderpatch.patched(module):
        torch.testing.assert_close(module(x), want)
    del module.forward
    with thunderpatch.patched(module):
        torch.testing.assert_close(module(x), x * 2)


def test_a_shallow_copy_shares_the_patched_forward_as_it_shares_parameters(x: torch.Tensor) -> None:
    """A limit: the copy is the same dict in a new object, and nothing in it can tell the two apart."""
    block = Block()
    thunderpatch.apply(block)
    shallow = copy.copy(block)
    assert not thunderpatch.is_patched(shallow)
    torch.testing.assert_close(shallow(x), block(x))
    assert thunderpatch.restore(shallow) == 1
    assert "forward" not in vars(shallow) and thunderpatch.is_patched(block)


def test_a_data_parallel_module_is_left_out_with_a_word(model: nn.Sequential) -> None:
    with pytest.warns(ThunderPatchWarning, match="DistributedDataParallel"):
        patch = thunderpatch.apply(nn.DataParallel(model), where=lambda module, fqn: fqn in ("", "module.0"))
    assert owned(patch) == ["module.0"]


def test_a_property_as_forward_is_left_out_with_a_word(model: nn.Sequential) -> None:
    class Computed(nn.Module):
        @property
        def forward(self) -> Any:  # type: ignore[override]
            return torch.exp

    model.append(Computed())
    with pytest.warns(ThunderPatchWarning, match=r"2 \(Computed\) has a property"):
        assert owned(thunderpatch.apply(model, types=[Block, Computed])) == ["0", "1"]


def test_thunderfx_gives_the_module_back_and_a_function_compiled(x: torch.Tensor) -> None:
    block = Block()
    want = block(x)
    assert thunderpatch.thunderfx(block) is block and thunderpatch.is_patched(block)
    torch.testing.assert_close(block(x), want)
    double = thunderpatch.thunderfx(lambda x: x.sin() * 2, dynamic=False)
    torch.testing.assert_close(double(x), x.sin() * 2)
    assert len(double.last_traces) == 1


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: thunderpatch.apply(m, types=nn.Conv2d), SelectionError, "types"),
        (lambda m: thunderpatch.apply(m, types="Convolution"), SelectionError, "Convolution"),
        (lambda m: thunderpatch.apply(m, names="[0"), SelectionError, r"\[0"),
        (lambda m: thunderpatch.apply(m, names="0.upp"), SelectionError, r"0\.up"),
        (lambda m: thunderpatch.apply(m, types=Block, names="*.up"), SelectionError, "together"),
        (lambda m: thunderpatch.apply(m, types=Block, exclude=Block), SelectionError, "exclude"),
        (lambda m: thunderpatch.apply(m, exclude=Block), SelectionError, "exclude"),
        (lambda m: thunderpatch.apply(m, types=Block, where=3), ArgumentError, "where"),
        (lambda m: thunderpatch.apply(m, nested="inner"), ArgumentError, "nested"),
        (lambda m: thunderpatch.apply(m, typs=Block), ArgumentError, "typs"),
        (lambda m: thunderpatch.apply(m, fulgraph=True), ArgumentError, "fullgraph"),
        (lambda m: thunderpatch.apply(m, backend="inductor"), ArgumentError, "backend"),
        (lambda m: thunderpatch.apply(m, mode="fastest"), ArgumentError, "fastest"),
        (lambda m: thunderpatch.apply(m, executors=["no such"]), ArgumentError, "no such"),
        (lambda m: thunderpatch.apply(m, on_error="ignore"), ArgumentError, "on_error"),
        (lambda m: thunderpatch.apply(m.state_dict()), ArgumentError, "OrderedDict"),
        (lambda m: thunderpatch.apply(Block), ArgumentError, "class Block"),
        (lambda m: thunderpatch.apply(nn.ModuleList([m])), SelectionError, "no forward"),
        (lambda m: thunderpatch.restore(m.state_dict()), ArgumentError, "OrderedDict"),
        (lambda m: thunderpatch.restore(m, names="nowhere"), SelectionError, "nowhere"),
        (lambda m: thunderpatch.patched(m, types="Nothing").__enter__(), SelectionError, "Nothing"),
    ],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(
    model: nn.Sequential, call: Any, error: type[Exception], match: str
) -> None:
    thunderpatch.apply(model, names="1.down")
    before = everything(model)
    with pytest.raises(error, match=match) as caught:
        call(model)
    assert isinstance(caught.value, ThunderPatchError)
    assert everything(model) == before
    assert "Sequential(\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_is_refused_and_left_out(model: nn.Sequential) -> None:
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.randn(1, 4))
    with pytest.raises(SelectionError, match="TorchScript"):
        thunderpatch.apply(scripted)
    model.append(scripted)
    with pytest.warns(ThunderPatchWarning, match=r"2 .*TorchScript"):
        assert owned(thunderpatch.apply(model, where=lambda module, fqn: fqn in tuple("012"))) == ["0", "1"]
