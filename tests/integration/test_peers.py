"""The facts of the README's table on libraries that do a neighbouring job, each as it is run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import thunderpatch
from thunderpatch.compat import load_thunder

pytestmark = pytest.mark.integration
BLOCKS = 12


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.up = number, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x) * self.number


class Net(nn.Module):
    def __init__(self, *, equal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(1 if equal else k) for k in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Backend:
    """A backend of torch.compile that counts what it compiled and how often that ran."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*inputs: Any) -> Any:
            self.ran += 1
            return gm.forward(*inputs)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # as a function would be

    def runs(self, model: nn.Module) -> int:
        """Return how many compiled graphs one call of the model runs."""
        before = self.ran
        model(INPUT)
        return self.ran - before


INPUT = torch.randn(2, 8, requires_grad=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model: nn.Module, backend: Backend) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compile_regions(model: nn.Module, backend: Backend) -> nn.Module:
    pytest.importorskip("accelerate")
    from accelerate.utils import compile_regions

    return compile_regions(model, backend=backend)


def compile_repeated_blocks(model: nn.Module, backend: Backend) -> nn.Module:
    diffusers = pytest.importorskip("diffusers")

    class Diffused(diffusers.ModelMixin):
        _repeated_blocks = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = model.layers

        forward = Net.forward

    diffused = Diffused()
    assert diffused.compile_repeated_blocks(backend=backend) is None
    return diffused


PEERS = [compile_blocks, compile_regions, compile_repeated_blocks]


@pytest.mark.parametrize("peer", PEERS)
def test_peers_compile_equal_blocks_once_and_the_first_eight_of_unequal_ones(peer: Callable[..., nn.Module]) -> None:
    backend = Backend()
    equal = peer(Net(equal=True), backend)
    assert backend.runs(equal) == BLOCKS and backend.compiled == 1
    unequal = peer(Net(equal=False), backend)
    unequal(INPUT)
    assert 0 < backend.runs(unequal) <= 8


@pytest.mark.parametrize("peer", PEERS)
def test_of_peers_only_regions_change_classes_and_keys_and_stay_in_copies(peer: Callable[..., nn.Module]) -> None:
    backend = Backend()
    model = Net(equal=True)
    keys, original = list(model.state_dict()), model.layers[0]
    made = peer(model, backend)
    made(INPUT)
    regions = peer is compile_regions
    assert (list(made.state_dict()) != keys) == regions == (type(made.layers[0]) is not Block)
    assert model.layers[0] is original and type(original) is Block
    assert (backend.runs(copy.deepcopy(made)) > 0) == regions


def test_a_block_that_was_compiled_is_plain_from_pickle() -> None:
    block = Block(1)
    block.compile(backend=Backend())
    assert pickle.loads(pickle.dumps(block))._compiled_call_impl is None


def test_thunderfx_gives_an_object_that_can_be_no_child() -> None:
    load_thunder()
    from thunder.dynamo import thunderfx

    model = Net(equal=True)
    made = thunderfx(model)
    assert not isinstance(made, nn.Module) and not hasattr(made, "state_dict")
    with pytest.raises(TypeError, match="cannot assign"):
        model.layers[0] = thunderfx(model.layers[0])


def test_kernels_keeps_classes_and_keys() -> None:
    kernels = pytest.importorskip("kernels")
    model = Net(equal=True)
    keys = list(model.state_dict())
    assert kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu") is model
    assert list(model.state_dict()) == keys and type(model.layers[0]) is Block
    assert not any(hasattr(kernels, name) for name in ("unkernelize", "dekernelize", "restore"))


def test_ours_compiles_equal_blocks_once_and_every_unequal_one() -> None:
    equal, unequal = Net(equal=True), Net(equal=False)
    keys = list(equal.state_dict())
    for model in (equal, unequal):
        thunderpatch.apply(model, types=Block)
        model(INPUT)
        model(INPUT)
    assert thunderpatch.report(equal).totals["graphs"] == 1
    for model in (equal, unequal, copy.deepcopy(unequal)):
        model(INPUT)
        assert thunderpatch.report(model).verdict == "12 of 12 modules compiled"
    assert list(equal.state_dict()) == keys and type(equal.layers[0]) is Block
    assert not thunderpatch.is_patched(pickle.loads(pickle.dumps(equal)).layers[0])
    assert thunderpatch.restore(equal) == BLOCKS
