"""transformers trains, saves, resumes, generates and serves a patched model as a plain one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ran

import thunderpatch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # the Trainer needs it
pytestmark = pytest.mark.integration

BLOCKS, WHOLE = {"types": "LlamaDecoderLayer"}, {}


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Token rows with a column that no model takes, as data sets of the wild have."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, 31, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones(6, dtype=torch.long), "labels": ids, "source": "web"}


def trainer(model: Any, folder: Path, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=0.5,
        optim="sgd",  # Adam's first steps are as large for a gradient that is zero but for rounding as for any
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    return transformers.Trainer(model, arguments, train_dataset=Rows())


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SETTINGS = {
    "bfloat16": {"bf16": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize(("setting", "select"), [*((name, BLOCKS) for name in SETTINGS), ("accumulated", WHOLE)])
def test_losses_and_weights_are_eagers(tmp_path: Path, setting: str, select: dict[str, Any]) -> None:
    model = build()
    plain = trainer(copy.deepcopy(model), tmp_path, **SETTINGS[setting])
    plain.train()
    thunderpatch.apply(model, **select)
    patched = trainer(model, tmp_path, **SETTINGS[setting])
    patched.train()
    assert len(losses(plain)) == 4 and losses(plain)[3] < losses(plain)[0]
    close = {"rtol": 2e-2, "atol": 2e-2} if setting == "bfloat16" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(losses(patched), losses(plain), **close)
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.model.named_parameters()), **close)
    rows = thunderpatch.report(model).rows
    assert {row.compiled_calls - row.calls for row in rows} == {0}
    assert min(row.calls for row in rows) >= 4


def test_columns_that_the_signature_names_are_kept_and_others_go(tmp_path: Path) -> None:
    model = build()
    thunderpatch.apply(model)
    kept = trainer(model, tmp_path).get_train_dataloader()
    assert set(next(iter(kept))) == {"input_ids", "attention_mask", "labels"}


def test_training_goes_on_from_a_checkpoint_of_a_patched_model_patched_or_plain(tmp_path: Path) -> None:
    whole = trainer(build(), tmp_path / "whole")
    whole.train()
    model = build()
    thunderpatch.apply(model, **BLOCKS)
    trainer(model, tmp_path, save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    for patched in (True, False):
        resumed = build()
        with torch.no_grad():
            for p in resumed.parameters():
                p.zero_()
        if patched:
            thunderpatch.apply(resumed, **BLOCKS)
        again = trainer(resumed, tmp_path)
        again.train(resume_from_checkpoint=checkpoint)
        torch.testing.assert_close(losses(again), losses(whole), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            dict(resumed.named_parameters()), dict(whole.model.named_parameters()), rtol=1e-3, atol=1e-4
        )
    ran(model, 4)


def test_a_patched_model_is_saved_as_a_plain_one_and_a_loaded_one_can_be_patched(tmp_path: Path) -> None:
    model, ids = build().eval(), Rows()[0]["input_ids"][None]
    with torch.no_grad():
        want = model(ids).logits
        thunderpatch.apply(model, **BLOCKS)
        model(ids)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(model) and list(loaded.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(loaded(ids).logits, want)
        thunderpatch.apply(loaded, **BLOCKS)
        torch.testing.assert_close(loaded(ids).logits, want)
    ran(loaded, 1)


# Generation: a call for each token, on a cache that grows, has a fixed size, or is kept elsewhere.


@pytest.fixture(scope="module")
def generator() -> Iterator[Any]:
    model = build().eval()
    thunderpatch.apply(model, **BLOCKS)
    yield model


class OffloadedCache(transformers.DynamicCache):
    """Keeps what a layer has seen elsewhere until its next call; transformers' own cache needs a GPU for that."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.away: dict[int, list[Any]] = {}

    @torch.compiler.disable
    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer in self.away:
            self.layers[layer].keys, self.layers[layer].values = map(torch.from_numpy, self.away.pop(layer))
        seen = super().update(key, value, layer, *args, **kwargs)
        self.away[layer] = [tensor.numpy().copy() for tensor in seen]
        self.layers[layer].keys, self.layers[layer].values = (torch.full_like(tensor, torch.nan) for tensor in seen)
        return seen


WAYS = {
    "greedy": {"cache_implementation": "dynamic"},
    "beams": {"num_beams": 2},
    "drawn": {"do_sample": True, "top_k": 5},
    "static": {"cache_implementation": "static"},
    "offloaded": {"past_key_values": OffloadedCache},
}


@pytest.mark.parametrize("way", WAYS)
def test_generation_gives_the_same_tokens(generator: Any, way: str) -> None:
    ids = Rows()[1]["input_ids"][None]

    def tokens() -> list[list[int]]:
        torch.manual_seed(3)
        settings = {name: value(generator.config) if callable(value) else value for name, value in WAYS[way].items()}
        return generator.generate(ids, max_new_tokens=3, min_new_tokens=3, **settings).tolist()

    with thunderpatch.disabled(generator):
        want = tokens()
    before = [row.calls for row in thunderpatch.report(generator)]
    assert tokens() == want
    rows = thunderpatch.report(generator).rows
    assert [row.calls - count for row, count in zip(rows, before, strict=True)] == [3] * 2
    assert all(row.compiled_calls == row.calls for row in rows)


def test_a_pipeline_serves_a_patched_model(generator: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(31)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="w0", eos_token="w2", padding_side="left"
    )
    pipeline = transformers.pipeline("text-generation", model=generator, tokenizer=tokenizer, device="cpu")

    def texts() -> Any:
        return pipeline("w4 w5 w6 w7 w8 w9", max_new_tokens=3, do_sample=False)

    with thunderpatch.disabled(generator):
        want = texts()
    before = [row.compiled_calls for row in thunderpatch.report(generator)]
    assert texts() == want
    assert [row.compiled_calls for row in thunderpatch.report(generator)] == [count + 3 for count in before]
