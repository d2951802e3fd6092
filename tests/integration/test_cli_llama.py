"""Each verb of the command line, at work on a Llama of transformers that a file of the user's makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from thunderpatch.cli import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("models") / "llama_of_a_cli_test.py"
    path.write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\ndef make():\n"
        "    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,\n"
        "                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)\n"
        "    ids = torch.randint(0, 97, (2, 7))\n"
        "    return LlamaForCausalLM(config).eval(), {'input_ids': ids, 'labels': ids, 'use_cache': False}\n"
    )
    before = list(sys.path)
    yield f"{path}:make"
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("verb", ["list", "report", "verify", "culprits", "bench", "tune"])
def test_each_verb_does_its_work_on_llama(verb: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, target, "--types", "LlamaDecoderLayer", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    if verb == "culprits":
        assert plain == []
        return
    rows = plain if verb == "list" else plain["modules" if verb == "tune" else "rows"]
    assert {"model.layers.0", "model.layers.1"} <= {row["fqn"] for row in rows}
