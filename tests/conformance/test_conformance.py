from __future__ import annotations

from typing import Any

import pytest
import torch

from .entries import Entry
from .outcome import run_entry
from .routes import THROUGH

pytestmark = pytest.mark.conformance
# No further case of an entry is started after so many seconds.
CAP = 40.0


# What Dynamo itself cannot capture, with the first torch that can.
NOT_CAPTURED = dict.fromkeys(("split", "unsafe_split"), ("2.12", "Dynamo fails on a split of an empty tensor"))


def test_a_patched_module_equals_eager(entry: Entry, record: Any, request: pytest.FixtureRequest) -> None:
    since, reason = NOT_CAPTURED.get(entry.name, ("0", ""))
    if torch.__version__ < since and entry.kind == "op":
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    option = request.config.getoption
    outcome = run_entry(entry, THROUGH[option("--through")], option("--cases"), CAP)
    record(outcome)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert not outcome.raised, "\n".join(outcome.raised)
