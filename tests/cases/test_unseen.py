"""Public reports of what changes unseen: modules that are never called, options, names in a checkpoint."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch import ThunderPatchWarning


def test_a_projection_that_attention_never_calls_is_named() -> None:
    """pytorch/pytorch#78109"""
    attention, x = nn.MultiheadAttention(6, 3, batch_first=True), torch.randn(2, 4, 6)
    want = attention(x, x, x)[0]
    with pytest.warns(ThunderPatchWarning, match=r"out_proj .*never calls it"):
        thunderpatch.apply(attention, types=nn.Linear)
    torch.testing.assert_close(attention(x, x, x)[0], want)
    assert thunderpatch.report(attention)["out_proj"].status in ("never called", "bypassed")


def test_the_fused_encoder_path_is_named() -> None:
    """pytorch/pytorch#128413"""
    layer, x = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(), torch.randn(2, 4, 8)
    want = layer(x).detach()
    with pytest.warns(ThunderPatchWarning, match="fast path"):
        thunderpatch.apply(layer, types=nn.LayerNorm)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    layer.train()
    layer(x)
    assert thunderpatch.report(layer)["norm1"].calls >= 1


def test_a_whole_encoder_layer_is_patched_without_a_word() -> None:
    """The layer itself is called, and what it computes inside is its own affair."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(), torch.randn(2, 4, 8)
    with torch.no_grad():
        want = layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thunderpatch.apply(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)


def test_options_of_the_caller_stay_as_they_were_given() -> None:
    """Lightning-AI/lightning-thunder#2753"""
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), torch.randn(3, 5)
    want = model(x)
    given = {"transforms": [], "executors": ["sdpa"], "options": {"epilogue_fusion": True}}
    kept = {name: value.copy() for name, value in given.items()}
    with thunderpatch.patched(model, types=nn.Linear, **given):
        torch.testing.assert_close(model(x), want)
        model(x[:2])
    assert given == kept


@pytest.mark.parametrize(
    "option",
    [
        {"mode": "default"},
        {"mode": "reduce-overhead"},
        {"dynamic": False},
        {"fullgraph": True},
        {"options": {}},
    ],
)
def test_each_keyword_of_torch_compile_works(option: dict) -> None:
    module, x = nn.Linear(5, 5), torch.randn(3, 5)
    want = module(x)
    with thunderpatch.patched(module, **option):
        torch.testing.assert_close(module(x), want)
        assert thunderpatch.report(module)[""].compiled_calls == 1


def test_names_in_a_checkpoint_are_those_of_the_plain_model() -> None:
    """pytorch/pytorch#101107"""
    kinds = [nn.Linear, nn.BatchNorm1d, nn.Sigmoid]
    model, plain = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sigmoid()) for _ in range(2))
    keys, ids = list(model.state_dict()), [id(module) for module in model.modules()]
    names = [name for name, _ in model.named_parameters()]
    thunderpatch.apply(model, types=kinds)
    model(torch.randn(4, 3))
    assert list(model.state_dict()) == keys and names == [name for name, _ in model.named_parameters()]
    assert [id(module) for module in model.modules()] == ids
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


def test_a_wrapped_child_adds_no_prefix_when_the_parent_is_patched_too() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), nn.Linear(3, 2))
    keys = list(model.state_dict())
    thunderpatch.apply(model)
    thunderpatch.apply(model, types=nn.Linear)
    model(torch.randn(4, 3))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == ["", "0", "0.0", "0.1", "1"]
