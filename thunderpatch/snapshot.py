"""What a graph's first run may change, kept so that a failed one leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .recomputation import version


class Snapshot:
    """Keeps random state and inputs as they are before a first run, to put them back if that run fails.

    Inputs are copied only when several parts run, since a part that fails to compile has not run itself.
    """

    def __init__(self, inputs: Sequence[Any], several: bool) -> None:
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and type(t) is not torch.nn.Parameter]
        self._copies = [(t, version(t), t.detach().clone()) for t in tensors] if several else []
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._gradients = torch.is_grad_enabled()  # a compiler that fails may leave them switched off

    def put_back(self) -> None:
        torch.set_grad_enabled(self._gradients)
        with torch.no_grad():
            for tensor, before, copy in self._copies:
                # batch_norm changes its statistics and does not count that as a write; nor is this one counted.
                if version(tensor) != before or not torch.equal(tensor, copy):
                    tensor.data.copy_(copy)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
