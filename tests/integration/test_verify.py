"""verify on models that were written elsewhere, from a config and with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thunderpatch
from thunderpatch.verification import Verdict

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

LAYERS, WIDTH, WORDS = 12, 32, 96


def llama() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config), words(labels=True), "LlamaDecoderLayer"


def gpt2() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config), words(labels=True), "GPT2Block"


def bert() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config), words(labels=True), "BertLayer"


def t5() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=LAYERS // 2,
        num_decoder_layers=LAYERS // 2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), words(labels=True), "T5Block"


def vit() -> tuple[nn.Module, dict[str, Any], str]:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}, "ViTLayer"


def words(*, labels: bool) -> dict[str, Any]:
    ids = torch.randint(WORDS, (2, 10))
    return {"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [llama, gpt2, bert, t5, vit])
def test_every_layer_of_a_transformer_equals_its_original(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs, layer = make()
    model = model.to(dtype).eval()  # no dropout: every number can be compared
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    result = thunderpatch.verify(model, types=layer, **inputs)
    print(f"\n{make.__name__} {dtype}: largest error {max(row.ratio for row in result):.2f} of its budget")
    result.raise_for_failures()
    assert len(result) == LAYERS + 1
    assert all(row.verdict is Verdict.EQUAL for row in result)
