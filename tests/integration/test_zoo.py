"""Each architecture of the zoo, patched, equals eager, or fails in the way that its row of the table says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from .architectures import TRANSFORMERS, ZOO  # it needs both
from .zoo import PARTS, examine, examine_part

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::thunderpatch.ThunderPatchWarning")]

# Architectures that do not compile with default settings: what stands in their way. Of the masks of LED's attention,
# inductor up to torch 2.11 makes C++ that does not compile.
IN_THE_WAY = {"led": "CppCompileError"} if torch.__version__ < "2.12" else {}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in IN_THE_WAY])
def test_repeated_blocks_equal_eager(name: str) -> None:
    result = examine(ZOO[name])
    assert result.patched > 0 and result.why == ""


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_does_not_compile_says_so_and_equals_eager_when_it_may_run_eager(name: str) -> None:
    assert IN_THE_WAY[name] in examine(ZOO[name]).why
    assert examine(ZOO[name], on_error="eager").why == ""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "vit"])
def test_parts_of_blocks_equal_eager(name: str, part: str) -> None:
    assert examine_part(ZOO[name], part) == "equal"


def test_there_are_sixty_transformers_and_eight_diffusers() -> None:
    assert len(TRANSFORMERS) >= 60 and len(ZOO) - len(TRANSFORMERS) >= 8
