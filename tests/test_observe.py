"""The report against real runs: each status with its reason, and that looking changes nothing."""

from __future__ import annotations

import gc
import html
import json
import logging
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import thunderpatch
from thunderpatch import registry, report, splitting
from thunderpatch.reports import Report, Row, Status


class Scaled(nn.Module):
    """Compiles whole, in thunder."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * 2


class Gate(nn.Module):
    """Its copysign is routed to inductor when a gradient is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.copysign(x * 2, x)


class Lost(nn.Module):
    """Nothing of it is left for thunder."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.copysign(x, x)


class Unknown(nn.Module):
    """Holds an operation that thunder does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0((x * 2).detach()) + x


class Untraceable(nn.Module):
    """Dynamo makes no graph of it."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class Broken(nn.Module):
    """Fails to compile, by `fails_to_compile`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.atan() * 2


class Interrupted(nn.Module):
    """Has a graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.cos() * 3
        torch._dynamo.graph_break()  # here
        return x + 1


class Numbered(nn.Module):
    """Traced anew for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 + self.number


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) + 1


class Unused(nn.Tanh):
    """Of a class that no outer torch.compile has seen: the report tells those by class."""


class TakenIn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + 2


class Outer(nn.Module):
    """What somebody puts torch.compile around."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TakenIn()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Model(nn.Module):
    """One module of each status; `failed` and `outer` are called by others."""

    def __init__(self) -> None:
        super().__init__()
        self.failed, self.outer = Broken(), Outer()
        self.compiled, self.partly, self.routed_partly, self.routed_whole = Scaled(), Unknown(), Gate(), Lost()
        self.routed, self.eager, self.latched = nn.ReLU(inplace=True), Untraceable(), Broken()
        self.parent, self.bypassed = Parent(), nn.MultiheadAttention(4, 2, batch_first=True)
        self.unused, self.disabled, self.displaced, self.restored = Unused(), nn.GELU(), nn.SiLU(), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        x = self.eager(self.latched(self.routed(self.partly(self.routed_partly(self.routed_whole(self.compiled(x)))))))
        x = self.bypassed(x, x, x)[0] + self.parent(x)
        return self.restored(self.displaced(self.disabled(x)))


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
EXPECTED = {
    "compiled": ("compiled", ""),
    "partly": ("partly", "thunder leaves operations to inductor"),
    "routed_partly": ("partly", "copysign to inductor: thunder's gradient of copysign lacks the sign's"),
    "routed_whole": ("routed", "copysign to inductor: thunder's gradient of copysign lacks the sign's"),
    "routed": ("routed", "and thunder gets its gradient wrong"),
    "eager": ("eager", ""),
    "latched": ("latched", "RuntimeError: cannot be had"),
    "failed": ("failed", "the region could not be compiled"),
    "parent": ("compiled", ""),
    "parent.child": ("inlined", "parent is patched and compiles it as a part of itself"),
    # An older Dynamo does not show what it takes in.
    "outer.inner": (
        ("inlined", "an outer torch.compile takes the originals of TakenIn modules in")
        if TORCH >= (2, 12)
        else ("never called", "")
    ),
    "bypassed.out_proj": ("bypassed", "nn.MultiheadAttention reads its weight and never calls it"),
    "unused": ("never called", ""),
    "disabled": ("disabled", "inside `with disabled(...)`"),
    "displaced": ("displaced", "its forward was replaced by a function"),
    "restored": ("restored", ""),
}


def break_compilation(patch: pytest.MonkeyPatch) -> None:
    split = splitting.split

    def failing(gm: fx.GraphModule, *rest: Any) -> Any:
        if any("atan" in str(node.target) for node in gm.graph.nodes):
            raise RuntimeError("cannot be had")
        return split(gm, *rest)

    patch.setattr(splitting, "split", failing)


@pytest.fixture
def fails_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compilation(monkeypatch)


@pytest.fixture(scope="module")
def seen() -> Report:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", thunderpatch.ThunderPatchWarning)
        break_compilation(patch)
        model = Model()
        thunderpatch.apply(model, names=list(EXPECTED), exclude="failed", nested="all", on_error="eager")
        thunderpatch.apply(model, names="failed")
        with pytest.raises(thunderpatch.CompileError):
            model.failed(torch.randn(3))
        torch.compile(model.outer, backend="eager")(torch.randn(3))
        model.displaced.forward = lambda x: F.silu(x)
        model(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
        thunderpatch.restore(model, names="restored")
        with thunderpatch.disabled(model.disabled):
            return report(model)


@pytest.mark.parametrize("fqn", EXPECTED)
def test_each_status_is_told_with_its_reason_in_text_html_and_json(fqn: str, seen: Report) -> None:
    status, reason = EXPECTED[fqn]
    row = seen[fqn]
    assert (row.status, reason in row.reason) == (status, True), row
    # The last word of the verdict may stand in a line of its own.
    assert any(line.split()[:1] == [fqn] and f" {status} " in line for line in str(seen).splitlines())
    assert f"<td>{html.escape(fqn)}</td>" in seen._repr_html_() and f"<td>{status}</td>" in seen._repr_html_()
    (plain,) = [row for row in json.loads(seen.to_json())["rows"] if row["fqn"] == fqn]
    assert plain["status"] == status and reason in plain["reason"]
    # A note may hold the reason as a part of more, or under another kind.
    shown = " ".join(str(seen).split())
    assert reason in shown or row.routes, shown


def test_one_model_shows_every_status_there_is(seen: Report) -> None:
    missing = {"inlined"} if TORCH < (2, 12) else set()  # but for `parent.child`
    assert {status for status, _ in EXPECTED.values()} | missing == set(map(str, Status))
    counts = {str(status): sum(row.status is status for row in seen) for status in Status}
    assert seen.totals["statuses"] == {status: count for status, count in counts.items() if count}
    assert not seen.ok and len(seen) == len(EXPECTED)


def test_every_reason_that_a_row_has_is_in_the_text(seen: Report) -> None:
    shown = "".join(str(seen).split())
    for row in seen:
        for _, text in row.notes():
            assert "".join(text.split()) in shown


def test_why_a_module_ran_eager_is_told_in_the_words_of_dynamo(seen: Report) -> None:
    # Its own words, or where this Dynamo has none, ours.
    assert "no ops traced" in seen["eager"].reason.lower() or "no tensor operations" in seen["eager"].reason


def test_a_wrapper_that_does_not_call_the_patch_displaces_it_and_one_that_does_does_not() -> None:
    model = nn.ModuleList([Scaled(), Scaled()])
    thunderpatch.apply(model, names="*")
    below = [module.forward for module in model]
    model[0].forward = lambda x: below[0].__wrapped__(x)
    model[1].forward = lambda x: below[1](x)
    for module in model:
        module(torch.randn(3))
    found = report(model)
    assert (found["0"].status, found["1"].status) == (Status.DISPLACED, Status.COMPILED)
    assert found["0"].reason == "a function stands on top and has not called it"


def test_a_module_whose_compilation_raises_is_failed(fails_to_compile: None) -> None:
    model = nn.Sequential(Broken(), nn.Tanh())
    thunderpatch.apply(model, types=Broken)
    with pytest.raises(thunderpatch.CompileError):
        model(torch.randn(3))
    found = report(model)
    assert found["0"].status is Status.FAILED and found["0"].reason.startswith("0 (Broken): the region could not be")
    assert not found.ok and found.verdict == "0 of 1 module compiled; 1 failed"


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_an_interrupted_compilation_is_no_failure(on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise UnboundLocalError("cannot clean up")  # as inductor does

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() * 1.5

    model = Own()
    thunderpatch.apply(model, on_error=on_error)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(splitting, "split", interrupted)
        model(torch.randn(3))
    model(torch.randn(3))
    assert report(model)[""].status is Status.COMPILED


def test_a_module_whose_graph_failed_elsewhere_before_is_told_by_its_own_name(fails_to_compile: None) -> None:
    for name in ("first", "second"):
        model = nn.ModuleDict({name: Broken()})
        thunderpatch.apply(model, names=name)
        with pytest.raises(thunderpatch.CompileError, match=rf"^{name} \(Broken\): the region could not be compiled"):
            model[name](torch.randn(3))


def test_a_call_under_a_tracer_is_told_as_bypassed() -> None:
    model = nn.Sequential(Scaled())
    thunderpatch.apply(model, types=Scaled)
    torch.func.grad(lambda x: model(x).sum())(torch.randn(3))
    row = report(model)["0"]
    assert row.status is Status.BYPASSED and "a functorch transform" in row.reason and "1 calls" in row.reason


# What a row tells


def observed(module: nn.Module, *calls: Tensor) -> Row:
    model = nn.Sequential(module)
    thunderpatch.apply(model, names="0")
    for x in calls:
        model(x)
    return report(model)["0"]


def test_a_graph_break_is_told_with_its_source_line() -> None:
    row = observed(Interrupted(), torch.randn(3))
    (line,) = [k for k, text in enumerate(open(__file__), 1) if text.endswith("# here\n")]  # noqa: SIM115
    assert row.graphs == 2 and len(row.graph_breaks) == 1
    where, why = row.graph_breaks[0]
    assert where == f"{__file__}:{line}" and "graph_break" in why


def test_a_recompile_is_told_with_the_guard_that_failed() -> None:
    model = nn.Sequential(Numbered())
    thunderpatch.apply(model, names="0")
    model(torch.randn(3))
    assert report(model)["0"].recompiles == 0
    model[0].number = 2
    model(torch.randn(3))
    row = report(model)["0"]
    assert row.recompiles == 1 and row.calls == row.compiled_calls == 2
    assert "number" in row.recompile_reasons[0]


def test_what_runs_where_is_counted_by_partition_and_operation() -> None:
    row = observed(Unknown(), torch.randn(5))
    assert (row.thunder_partitions > 0, row.inductor_partitions) == (True, 1)
    assert row.ops_thunder >= 2 and row.ops_inductor >= 1
    assert any("bessel_j0" in reason for reason in row.split_reasons)


def test_the_seconds_of_the_first_call_are_told_by_stage() -> None:
    row = observed(Unknown(), torch.randn(7))  # of a shape that no other test has compiled for
    assert set(row.seconds) == {"dynamo", "thunder", "inductor"}
    assert all(seconds > 0 for seconds in row.seconds.values())


def test_what_inductor_takes_is_told_as_its_own_and_all_together_is_no_more_than_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_ = torch._inductor.compile

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1)
        return compile_(*args, **kwargs)

    model = nn.Sequential(Scaled(), Unknown())
    thunderpatch.apply(model, names="*")
    monkeypatch.setattr(torch._inductor, "compile", slow)
    began = time.perf_counter()
    model(torch.randn(9))
    whole = time.perf_counter() - began
    found = report(model)
    assert found["0"].seconds["inductor"] == 0 < found["0"].seconds["thunder"]  # nothing of it is inductor's
    assert found["1"].seconds["inductor"] > 1 > found["1"].seconds["thunder"]
    assert whole / 2 < sum(found.totals["seconds"].values()) < whole


def test_of_modules_that_share_code_the_first_has_waited_for_it() -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    thunderpatch.apply(model, types=nn.Linear)
    model(torch.randn(2, 5, requires_grad=True))
    model(torch.randn(2, 5, requires_grad=True))
    found = report(model)
    assert [found[str(k)].seconds["thunder"] > 0 for k in range(3)] == [True, False, False]
    assert found.totals["seconds"]["thunder"] == found["0"].seconds["thunder"]
    assert found.totals["graphs"] == 1


def test_modules_that_share_compiled_code_say_with_how_many() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    thunderpatch.apply(model, types=(nn.Linear, nn.Tanh))
    model(torch.randn(2, 4))
    found = report(model)
    # The first of the linear layers is given what needs no gradient, which is another graph.
    assert [found[str(k)].shared_with for k in range(4)] == [0, 0, 1, 1]
    assert [found[str(k)].group for k in range(4)] == ["0", "1", "2", "2"]
    assert ("shared", "2, 3: compiled once, for 2") in [(note.kind, str(note)) for note in found.notes]


def test_a_model_without_patches_has_an_empty_report_and_what_is_no_model_is_refused() -> None:
    assert len(report(nn.Linear(2, 2))) == 0
    with pytest.raises(thunderpatch.ArgumentError, match=r"takes a torch\.nn\.Module, not int"):
        report(3)


# What looking changes


def test_a_report_changes_nothing_and_no_call_after_it_compiles() -> None:
    model = nn.Sequential(Interrupted(), Unknown(), nn.Linear(4, 4))
    thunderpatch.apply(model, names="*")
    x = torch.randn(2, 4)
    model(x)
    records = [record for module in model for record in registry.records_of(module)]
    compiled_elsewhere = torch.compile(lambda y: y + 1, backend="eager")
    compiled_elsewhere(x)
    frames = torch._dynamo.utils.counters["frames"]["total"]
    before = [{**vars(record)} for record in records]
    first = report(model)
    str(first), first.to_json(), first._repr_html_()
    assert [{**vars(record)} for record in records] == before
    model(x)
    compiled_elsewhere(x)  # a reset of Dynamo would have it compiled again
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert [record.compilations for record in records] == [state["compilations"] for state in before]


def test_neither_report_nor_record_keeps_a_model_or_an_input_alive(fails_to_compile: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Interrupted(), Broken(), nn.ReLU(inplace=True))
    thunderpatch.apply(model, names="*", on_error="eager")
    x = torch.randn(2, 4)
    with pytest.warns(thunderpatch.ThunderPatchWarning):
        model(x)
    found = report(model)
    assert found["2"].status is Status.LATCHED
    left = [weakref.ref(x), *(weakref.ref(module) for module in model.modules())]
    del x
    gc.collect()
    assert left[0]() is None
    del model
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
    assert len(found) == 4


# Events and ranges


def test_events_are_logged_with_the_fqn(caplog: pytest.LogCaptureFixture, fails_to_compile: None) -> None:
    caplog.set_level(logging.DEBUG, logger="thunderpatch")
    model = nn.ModuleDict({"gate": Gate(), "broken": Broken(), "one": Numbered(), "two": Numbered()})
    model.two.number = 7
    thunderpatch.apply(model, names="*", on_error="eager")
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thunderpatch.ThunderPatchWarning)
        for module in (*model.values(), model.one):
            module(x)
        model.one.number = 9
        model.one(x)
        model.one.number = 7
        model.one(x.detach().clone().requires_grad_())
    events = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "thunderpatch"]

    def told(level: int, *words: str) -> bool:
        return any(at == level and all(word in text for word in words) for at, text in events)

    assert told(logging.INFO, "gate (Gate): captured a graph")
    assert told(logging.INFO, "gate (Gate): compiled its graph")
    assert told(logging.INFO, "gate (Gate): ", "goes to inductor", "lacks the sign's")
    assert told(logging.INFO, "broken (Broken): runs its original from now on, after RuntimeError: cannot be had")
    assert told(logging.DEBUG, "two (Numbered): traced again", "number")
    assert not any(at > logging.INFO for at, _ in events)


def test_a_graph_that_is_found_again_is_logged_with_both_modules(caplog: pytest.LogCaptureFixture) -> None:
    class Tagged(nn.Module):
        def __init__(self, tag: str) -> None:
            super().__init__()
            self.tag = tag

        def forward(self, x: Tensor) -> Tensor:
            return x.cosh() if self.tag else x

    caplog.set_level(logging.DEBUG, logger="thunderpatch")
    model = nn.Sequential(Tagged("a"), Tagged("b"))
    thunderpatch.apply(model, names="*")
    x = torch.randn(3)
    for module in model:
        module(x)
    assert "1 (Tagged): reuses a graph of 0 (Tagged)" in caplog.text


def ranges(model: nn.Module, x: Tensor) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    return [event.name for event in profile.events() if event.name.startswith("thunderpatch:")]


def test_a_profiler_shows_each_patched_module_by_its_fqn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Scaled(), nn.Sequential(Scaled(), nn.Tanh())), torch.randn(3)
    thunderpatch.apply(model, types=Scaled)
    assert ranges(model, x) == ["thunderpatch:0", "thunderpatch:1.0"]  # with compilation in it
    assert ranges(model, x) == ["thunderpatch:0", "thunderpatch:1.0"]
    row = report(model)["1.0"]
    assert row.calls == row.compiled_calls == 2  # attribution finds the module through the range

    def never(*_: Any) -> Any:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", never)
    model(x)


def test_the_range_of_the_model_itself_has_a_name() -> None:
    model = Scaled()
    thunderpatch.apply(model)
    assert ranges(model, torch.randn(3)) == ["thunderpatch:(the model itself)"]


def test_a_class_that_was_inlined_in_another_model_before_says_nothing_of_this_one() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    other, model = nn.Sequential(Plain()), nn.Sequential(Plain())
    thunderpatch.apply(other, types=Plain)
    torch.compile(other, backend="eager")(torch.ones(2))
    thunderpatch.apply(model, types=Plain)
    (row,) = report(model).rows
    assert row.status is Status.NEVER_CALLED
