from __future__ import annotations

from typing import Any

import pytest

from .entries import Entry
from .outcome import run_entry
from .routes import THROUGH

pytestmark = pytest.mark.conformance
# No further case of an entry is started after so many seconds.
CAP = 40.0


def test_a_patched_module_equals_eager(entry: Entry, record: Any, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    outcome = run_entry(entry, THROUGH[option("--through")], option("--cases"), CAP)
    record(outcome)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert not outcome.raised, "\n".join(outcome.raised)
