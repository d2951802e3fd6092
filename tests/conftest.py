from __future__ import annotations

import pytest
import torch


# Tests run side by side, one to a core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(0)
