from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thunderpatch

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


# The command line


class Stub:
    """Stands in for a function of the package: keeps its arguments and returns a result."""

    def __init__(self, ok: bool = True) -> None:
        self.ok, self.calls, self.plots = ok, [], []

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        self.calls.append((args, kwargs))
        return self

    def __str__(self) -> str:
        return "a result"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok}

    def plot(self, path: str) -> None:
        self.plots.append(path)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(name: str, ok: bool = True) -> Stub:
        made = Stub(ok)
        monkeypatch.setattr(thunderpatch, name, made, raising=False)
        return made

    return put


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "models_of_a_user.py"
    path.write_text(
        textwrap.dedent(
            """
            import time

            import torch
            from torch import nn

            def bare():
                return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

            class Halves(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

                def forward(self, *, x):
                    return self.used(x)

            def halves():
                return Halves(), {"x": torch.ones(2, 4)}

            def picky():
                return nn.Linear(4, 4), torch.ones(2, 5)

            class Sorry(nn.Module):
                def forward(self, x):
                    return x.atan() * 2

            def mixed():
                return nn.Sequential(nn.Linear(4, 4), Sorry()), torch.ones(2, 4)

            def interrupted():
                raise KeyboardInterrupt

            def slow():
                print("started", flush=True)
                time.sleep(30)

            def is_good(model):
                return len(model) == 2
            """
        )
    )
    yield str(path)
    sys.modules.pop("models_of_a_user", None)
