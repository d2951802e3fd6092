from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

# Tests run side by side, one to a core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> Iterator[None]:
    torch.manual_seed(0)
    # What the first refused double backward of a process sets.
    recomputation = sys.modules.get("thunderpatch.recomputation")
    if recomputation is not None:
        recomputation.Recomputation.keep_all = False
    yield
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on, "the test left gradients switched off"
