"""A model that no one here wrote: transformers' Llama, 12 layers, made from a config."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import thunderpatch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

LAYERS = 12
SELECTIONS = {
    "layers by class name": ({"types": "LlamaDecoderLayer"}, LAYERS),
    "norms": ({"types": "LlamaRMSNorm"}, 2 * LAYERS + 1),
    "feed-forwards by name": ({"names": "model.layers.*.mlp"}, LAYERS),
    "what repeats": ({"repeated": True}, LAYERS),
}
# Eager in float32 is this much off from float64 at most, times a factor for another order of the same sums.
FACTOR = 4


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1))


def outcome(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    return found | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def eager(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return outcome(model, ids)


@pytest.fixture(scope="module")
def budget(model: Any, ids: torch.Tensor, eager: dict[str, torch.Tensor]) -> dict[str, float]:
    exact = outcome(copy.deepcopy(model).double(), ids)
    eps = torch.finfo(torch.float32).eps
    return {
        name: FACTOR * max(float((value - exact[name]).abs().max()), eps * float(exact[name].abs().max()))
        for name, value in eager.items()
    }


@pytest.fixture(params=SELECTIONS)
def patched(request: pytest.FixtureRequest, model: Any) -> Iterator[thunderpatch.Patch]:
    selectors, count = SELECTIONS[request.param]
    with thunderpatch.patched(model, **selectors) as patch:
        assert len(patch) == count
        yield patch


def rows(patch: thunderpatch.Patch) -> list[Any]:
    """The report without the modules that other tests had patched before."""
    return [row for row in patch.report() if row.fqn in patch.modules]


def test_loss_logits_and_every_gradient_equal_eager(
    patched: thunderpatch.Patch,
    model: Any,
    ids: torch.Tensor,
    eager: dict[str, torch.Tensor],
    budget: dict[str, float],
) -> None:
    got = outcome(model, ids)
    assert got.keys() == eager.keys()
    worst = {name: float((got[name] - value).abs().max()) for name, value in eager.items()}
    assert {name: (error, budget[name]) for name, error in worst.items() if error > budget[name]} == {}
    assert all(row.compiled_calls == row.calls >= 1 for row in rows(patched))


def test_padding_on_the_left_trains_as_in_eager(model: Any, ids: torch.Tensor) -> None:
    """The padded rows of attention's mask look at nothing at all."""
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        return [out.loss.detach(), out.logits.detach(), *(p.grad.clone() for p in model.parameters())]

    want = trained()
    with thunderpatch.patched(model, repeated=True):
        got = trained()
    assert not any(value.isnan().any() for value in want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_greedy_generation_gives_the_same_tokens(patched: thunderpatch.Patch, model: Any, ids: torch.Tensor) -> None:
    settings = {"min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, **settings)
    with thunderpatch.disabled(model):
        want = model.generate(ids, **settings)
    assert got.tolist() == want.tolist()
    assert all(row.compiled_calls == row.calls >= 3 for row in rows(patched))


def test_twelve_layers_share_one_compilation(model: Any, ids: torch.Tensor) -> None:
    with thunderpatch.patched(model, types="LlamaDecoderLayer", dynamic=False) as patch, torch.no_grad():
        model(input_ids=ids, use_cache=True)
        layer = thunderpatch.registry.active(model.model.layers[0])
        assert layer.compiler.compiled == 1
        assert {row.graphs for row in rows(patch)} == {1}


def test_keys_signatures_and_hooks_stay(model: Any, ids: torch.Tensor) -> None:
    keys, layer = list(model.state_dict()), model.model.layers[3]
    signature, seen = inspect.signature(layer.forward), []
    handles = [
        layer.register_forward_hook(lambda module, args, out: seen.append("layer")),
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append("inside")),
    ]
    with thunderpatch.patched(model, types="LlamaDecoderLayer"), torch.no_grad():
        assert list(model.state_dict()) == keys
        assert inspect.signature(layer.forward) == signature
        model(input_ids=ids)
        for handle in handles:
            handle.remove()
        model(input_ids=ids)
    assert seen == ["inside", "layer"]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_nothing_is_left_after_restore(model: Any, ids: torch.Tensor, selection: str) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        want = model(input_ids=ids).logits
        with thunderpatch.patched(model, **SELECTIONS[selection][0]):
            model(input_ids=ids)
        assert torch.equal(model(input_ids=ids).logits, want)
    assert [dict(vars(module)) for module in model.modules()] == before
