"""Modules that torch never calls, or not always, are named when they are patched."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from thunderpatch import ThunderPatchWarning
from thunderpatch.fused import warn_where_never_called, why_never_called


@pytest.fixture(scope="module")
def transformer() -> nn.Module:
    return nn.Transformer(4, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=4, batch_first=True)


@pytest.mark.parametrize(
    ("fqn", "word"),
    [
        ("encoder.layers.0.self_attn.out_proj", "never calls"),
        ("encoder.layers.0.norm1", "fast path"),
        ("encoder.layers.0.linear2", "fast path"),
        ("encoder.layers.0.self_attn", "fast path"),
        ("decoder.layers.0.self_attn.out_proj", "never calls"),
    ],
)
def test_what_may_not_be_called_has_a_reason(transformer: nn.Module, fqn: str, word: str) -> None:
    assert word in why_never_called(transformer, fqn)


@pytest.mark.parametrize(
    "fqn", ["", "encoder", "encoder.layers.0", "encoder.norm", "decoder.layers.0.norm1", "decoder.layers.0.self_attn"]
)
def test_what_is_always_called_has_none(transformer: nn.Module, fqn: str) -> None:
    assert why_never_called(transformer, fqn) is None


def test_the_torch_of_today_still_skips_them(transformer: nn.Module) -> None:
    """The reason for each reason: were torch to call them, the warning would be wrong."""
    layer, called = transformer.encoder.layers[0], []
    handles = [layer.self_attn.out_proj.register_forward_hook(lambda *a: called.append("out_proj"))]
    layer.train()
    layer(torch.randn(1, 3, 4))
    handles.pop().remove()
    assert called == []
    for part in (layer.norm1, layer.linear1, layer.self_attn):
        part.forward = lambda *a, part=part, **k: called.append(part) or type(part).forward(part, *a, **k)
    layer.eval()
    with torch.inference_mode():
        layer(torch.randn(1, 3, 4))
    for part in (layer.norm1, layer.linear1, layer.self_attn):
        del part.forward
    assert called == []


def test_one_warning_names_them_all(transformer: nn.Module) -> None:
    targets = {fqn: transformer.get_submodule(fqn) for fqn in ("encoder.layers.0.norm1", "encoder.layers.0.norm2")}
    with pytest.warns(ThunderPatchWarning) as caught:
        warn_where_never_called(transformer, targets)
    (warning,) = caught
    assert all(f"{fqn} (LayerNorm)" in str(warning.message) for fqn in targets)


def test_nothing_to_say_is_no_warning(transformer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_where_never_called(transformer, {"encoder.norm": transformer.encoder.norm})
