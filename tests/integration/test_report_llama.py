"""What the report tells of models that others wrote, and that every reproducer of theirs runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_scripts

import thunderpatch
from thunderpatch import demo
from thunderpatch.reports import Report, Row

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

LAYERS, WORDS = 12, 97
LAYER_FQNS = [f"model.layers.{k}" for k in range(LAYERS)]


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).eval()


def prompt() -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))


def prompt_and_token(model: Any) -> None:
    """Read a prompt and then one more token from the cache, as generation does."""
    ids = prompt()
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.fixture(scope="module")
def cached() -> Any:
    model = llama()
    thunderpatch.apply(model, types="LlamaDecoderLayer")
    prompt_and_token(model)
    return model


@pytest.fixture(scope="module")
def seen(cached: Any) -> Report:
    return thunderpatch.report(cached)


def facts(row: Row) -> dict[str, Any]:
    kept = ("thunder_partitions", "inductor_partitions", "ops_thunder", "ops_inductor", "split_reasons", "graphs")
    return {name: getattr(row, name) for name in kept}


@pytest.mark.parametrize("fqn", LAYER_FQNS)
def test_each_layer_tells_its_partitions_and_why_it_is_split(fqn: str, seen: Report) -> None:
    row = seen[fqn]
    assert row.cls == "LlamaDecoderLayer" and row.calls == row.compiled_calls == 2
    assert row.thunder_partitions >= row.graphs >= 2 and row.ops_thunder > 20
    # What is split has reasons, each of which names an operation; what is whole has none.
    elsewhere = row.inductor_partitions + row.eager_partitions > 0
    assert elsewhere == bool(row.split_reasons or row.routes) == (row.status == "partly")
    assert all(": " in reason and "node with name" not in reason for reason in row.split_reasons)
    assert row.reason in str(seen).replace("\n", " ") or row.routes


def test_all_layers_share_one_compilation(seen: Report) -> None:
    rows = [seen[fqn] for fqn in LAYER_FQNS]
    assert [row.shared_with for row in rows] == [LAYERS - 1] * LAYERS
    assert len({row.group for row in rows}) == 1
    assert all(facts(row) == facts(rows[0]) for row in rows)
    assert seen.totals["graphs"] == rows[0].graphs
    # Only the first layer waits for thunder: what later ones trace again is found.
    assert [row.seconds["thunder"] > 0 for row in rows] == [True] + [False] * (LAYERS - 1)
    assert seen.verdict.startswith(f"{LAYERS} of {LAYERS} modules compiled")


def test_the_notes_name_twelve_layers_once(seen: Report) -> None:
    for note in seen.notes:
        if note.kind in ("split", "routed", "shared"):
            assert len(note.names) == LAYERS
    # The guards on each layer's part of the cache differ by its index alone.
    recompiled = [note.text for note in seen.notes if note.kind == "recompiled"]
    assert 0 < len(recompiled) <= 4, recompiled


def backward(model: torch.nn.Module, *inputs: torch.Tensor) -> None:
    model(*inputs).sum().backward()


def test_every_reproducer_of_llama_gpt2_and_the_built_in_models_runs(cached: Any, tmp_path: Path) -> None:
    thunderpatch.apply(generator := gpt2(), repeated=True)
    prompt_and_token(generator)
    trainer = llama()
    thunderpatch.apply(trainer, types=("LlamaMLP", "LlamaRMSNorm"))
    trainer(prompt(), labels=prompt()).loss.backward()
    scripts = thunderpatch.save_reproducers(cached, tmp_path / "llama")
    scripts += thunderpatch.save_reproducers(cached, tmp_path / "data", data=lambda: prompt_and_token(cached))
    scripts += thunderpatch.save_reproducers(trainer, tmp_path / "trained")
    scripts += thunderpatch.save_reproducers(generator, tmp_path / "gpt2")
    for name, make in demo.MODELS.items():
        model, inputs = make()
        thunderpatch.apply(model, repeated=True)
        backward(model, *inputs)
        scripts += thunderpatch.save_reproducers(model, tmp_path / name)
    assert len(scripts) >= 12
    shown = {str(path.relative_to(tmp_path)): ran for path, ran in zip(scripts, run_scripts(scripts), strict=True)}
    for name, (status, output) in shown.items():
        # Thunder gets the gradient of an in-place activation wrong: those graphs run uncompiled, and show why.
        inplace = "The whole graph runs eager" in (tmp_path / name).read_text()
        assert status == int(inplace), f"{name}: {output}"
