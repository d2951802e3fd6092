from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

SAMPLE = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--sample",
        nargs="?",
        type=int,
        const=SAMPLE,
        metavar="N",
        help=f"run N entries (default {SAMPLE}), evenly spread",
    )
    group.addoption("--shard", default="1/1", metavar="I/N", help="run the I-th of N equal parts of the entries")
    group.addoption("--kinds", default="", help="run only these of module,op,inplace")
    group.addoption("--dtypes", default="", help="run only these dtypes, such as float32,complex64")
    group.addoption("--cases", type=int, default=2, help="samples per op, beside the special ones")
    group.addoption("--through", default="thunderpatch", choices=("thunderpatch", "thunderfx"))
    group.addoption("--no-code", action="store_true", help="let inductor's parts run as traced, without C++ code")
    group.addoption("--results", type=Path, help="append each outcome as a line of JSON, and skip those there")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    # The databases take long to import: not for those who do not run them.
    return True if "not conformance" in config.option.markexpr else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "entry" not in metafunc.fixturenames:
        return
    from .entries import all_entries, spread

    option = metafunc.config.getoption
    kinds, dtypes = option("--kinds").split(","), option("--dtypes").split(",")
    entries = [
        entry
        for entry in all_entries()
        if (not option("--kinds") or entry.kind in kinds)
        and (not option("--dtypes") or str(entry.dtype).removeprefix("torch.") in dtypes)
    ]
    if option("--sample"):
        entries = spread(entries, option("--sample"))
    part, parts = map(int, option("--shard").split("/"))
    entries = [entry for entry in entries[part - 1 :: parts] if entry.id not in _done(option("--results"))]
    metafunc.parametrize("entry", entries, ids=[entry.id for entry in entries])


def _done(results: Path | None) -> set[str]:
    if results is None or not results.exists():
        return set()
    return {json.loads(line)["id"] for line in results.read_text().splitlines()}


OUTCOMES = pytest.StashKey[list[Any]]()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a function that notes an outcome for the summary and for ``--results``."""
    outcomes = request.config.stash.setdefault(OUTCOMES, [])
    results = request.config.getoption("--results")

    def note(outcome: Any) -> None:
        outcomes.append(outcome)
        if results is not None:
            with results.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    yield note


@pytest.fixture(autouse=True)
def _no_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--no-code"):
        from .routes import without_code

        monkeypatch.setattr("torch._inductor.compile", without_code)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = config.stash.get(OUTCOMES, [])
    if outcomes:
        terminalreporter.section("conformance")
        for what, count in _counts(outcomes).items():
            terminalreporter.write_line(f"{what:>28}  {count}")


def _counts(outcomes: list[Any]) -> dict[str, int]:
    return {
        "entries": len(outcomes),
        "calls compared": sum(outcome.cases for outcome in outcomes),
        "entries random in eager": sum(outcome.random for outcome in outcomes),
        "entries with thunder": sum(outcome.partitions > 0 for outcome in outcomes),
        "silently wrong": sum(bool(outcome.wrong) for outcome in outcomes),
        "raise, eager does not": sum(bool(outcome.raised) for outcome in outcomes),
        "too slow": sum(bool(outcome.slow) for outcome in outcomes),
    }
