"""Architectures of transformers and diffusers as tiny models with random weights, from configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

WORDS = 97

# What makes a config small, where it has such a field.
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_ff": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "embedding_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "state_size": 8,
    "time_step_rank": 4,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Entry:
    """One architecture: what makes the model and a batch for it, and which modules are patched."""

    name: str
    family: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    select: tuple[tuple[str, Any], ...] = (("repeated", True),)


def kinds(names: str) -> list[str]:
    return names.split()


def text(kind: str, family: str, head: str = "CausalLM", **own: Any) -> Entry:
    """An architecture that reads tokens, by transformers' name of it; `own` are fields of its config."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = build(kind, head, own)
        ids = torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))
        return model, {"input_ids": ids, "labels": ids}

    return Entry(kind, family, make)


def vision(kind: str, **own: Any) -> Entry:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = build(kind, "ImageClassification", {"num_labels": 3, **own})
        size = getattr(model.config, "image_size", 32)
        pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
        return model, {"pixel_values": pixels, "labels": torch.tensor([0, 2])}

    return Entry(kind, "vision", make)


def audio(kind: str, samples: int = 400, features: tuple[int, ...] = (), **own: Any) -> Entry:
    """An architecture that hears: of raw samples, or of `features` by time step."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = build(kind, "AudioClassification", {"num_labels": 3, **own})
        heard = torch.randn(2, *(features or (samples,)), generator=torch.Generator().manual_seed(1))
        return model, {model.main_input_name: heard, "labels": torch.tensor([0, 2])}

    return Entry(kind, "audio", make)


def build(kind: str, head: str, own: dict[str, Any]) -> nn.Module:
    """Return a small model of an architecture with random weights."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    same: dict[str, str] = config_class.attribute_map
    known = {*vars(config_class()), *same, "decoder_start_token_id"}
    sizes = {name: size for name, size in SIZES.items() if name in known and same.get(name) not in own}
    config = config_class(**sizes | own)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    return model.eval()


CONVOLUTIONS = {
    "hidden_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
STAGES = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32, "patch_size": 4, "window_size": 2}

TRANSFORMERS = [
    *(
        text(kind, "decoder")
        for kind in kinds(
            "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt bloom falcon mpt "
            "stablelm starcoder2 cohere cohere2 olmo olmo2 granite glm glm4 gpt_bigcode xglm biogpt persimmon "
            "nemotron helium smollm3 exaone4 arcee ernie4_5 diffllama"
        )
    ),
    text("gptj", "decoder", rotary_dim=4),
    text("codegen", "decoder", rotary_dim=4),
    text("gpt_neo", "decoder", attention_types=[[["global", "local"], 1]], window_size=4),
    *(text(kind, "mixture of experts") for kind in kinds("mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe")),
    *(text(kind, "state space") for kind in kinds("mamba falcon_mamba")),
    text("mamba2", "state space", num_heads=8),
    replace(
        text("jamba", "state space", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4),
        select=(("types", "JambaMambaDecoderLayer"),),
    ),
    text("bamba", "state space", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8),
    text("recurrent_gemma", "state space", lru_width=32, attention_window_size=4, num_hidden_layers=3),
    *(
        text(kind, "encoder", "MaskedLM")
        for kind in kinds(
            "bert roberta distilbert electra deberta deberta-v2 mpnet xlm-roberta camembert convbert fnet "
            "megatron-bert modernbert nystromformer roformer squeezebert"
        )
    ),
    replace(text("albert", "encoder", "MaskedLM"), select=(("types", "AlbertLayer"),)),
    *(
        text(kind, "encoder-decoder", "Seq2SeqLM")
        for kind in kinds(
            "t5 mt5 umt5 bart mbart pegasus marian blenderbot m2m_100 plbart led longt5 switch_transformers"
        )
    ),
    *(vision(kind) for kind in kinds("vit beit dinov2 vit_msn ijepa")),
    *(vision(kind, **STAGES) for kind in ("swin", "swinv2")),
    vision("convnext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    vision("convnextv2", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2]),
    vision("regnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], groups_width=8),
    vision("poolformer", hidden_sizes=[8, 16], depths=[2, 2], num_encoder_blocks=2),
    *(audio(kind, **CONVOLUTIONS) for kind in kinds("wav2vec2 hubert wavlm unispeech-sat data2vec-audio")),
    audio("whisper", features=(80, 20), max_source_positions=10),
    audio("audio-spectrogram-transformer", features=(24, 16), max_length=24, num_mel_bins=16),
]


def image(name: str, what: str, select: dict[str, Any], inputs: Callable[[], dict[str, Any]], **config: Any) -> Entry:
    """A model of diffusers, by its class."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        import diffusers

        torch.manual_seed(0)
        model: nn.Module = getattr(diffusers, what)(**config)
        return model.eval(), inputs()

    return Entry(name, "diffusion", make, tuple(select.items()))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


REPEATED = {"repeated": True}
RESNETS = {"types": "ResnetBlock2D"}
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}

DIFFUSERS = [
    image(
        "UNet",
        "UNet2DModel",
        RESNETS,
        lambda: {"sample": noise(2, 3, 8, 8), "timestep": torch.tensor([3, 5])},
        sample_size=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    ),
    image(
        "UNet with text",
        "UNet2DConditionModel",
        {"types": ("ResnetBlock2D", "BasicTransformerBlock")},
        lambda: {
            "sample": noise(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": noise(2, 5, 16),
        },
        sample_size=8,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **BLOCKS,
    ),
    image(
        "VAE",
        "AutoencoderKL",
        RESNETS,
        lambda: {"sample": noise(2, 3, 16, 16)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **BLOCKS,
    ),
    image(
        "DiT",
        "DiTTransformer2DModel",
        REPEATED,
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "class_labels": torch.tensor([0, 2]),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=10,
        **HEADS,
    ),
    image(
        "PixArt",
        "PixArtTransformer2DModel",
        REPEATED,
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": noise(2, 5, 16),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
        **HEADS,
    ),
    image(
        "Flux",
        "FluxTransformer2DModel",
        REPEATED,
        lambda: {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 5, 16),
            "pooled_projections": noise(2, 12),
            "timestep": torch.tensor([0.3, 0.5]),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        in_channels=4,
        num_single_layers=2,
        joint_attention_dim=16,
        pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
        **HEADS,
    ),
    image(
        "Stable Diffusion 3",
        "SD3Transformer2DModel",
        {"types": "JointTransformerBlock"},
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 16),
            "pooled_projections": noise(2, 12),
            "timestep": torch.tensor([3, 5]),
        },
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=8,
        **HEADS,
    ),
    image(
        "AuraFlow",
        "AuraFlowTransformer2DModel",
        REPEATED,
        lambda: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 5, 16),
            "timestep": torch.tensor([0.3, 0.5]),
        },
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=16,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    ),
    image(
        "prior of Kandinsky",
        "PriorTransformer",
        REPEATED,
        lambda: {
            "hidden_states": noise(2, 8),
            "timestep": torch.tensor([3, 5]),
            "proj_embedding": noise(2, 8),
            "encoder_hidden_states": noise(2, 5, 8),
        },
        embedding_dim=8,
        num_embeddings=5,
        additional_embeddings=4,
        **HEADS,
    ),
]
ZOO = {entry.name: entry for entry in (*TRANSFORMERS, *DIFFUSERS)}
