"""What else runs a model: outer compilers, exporters, profilers, pruners, threads and other processes."""

from __future__ import annotations

import asyncio
import inspect
import io
import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import thunderpatch

WIDTH = 6
OLD = "recompile_limit" not in inspect.signature(torch.compile).parameters  # torch before 2.12
new_dynamo = pytest.mark.skipif(OLD, reason="isolate is refused there, as a test of its own shows")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = nn.Linear(3, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(self.one(self.first(x).cos())).sin())


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3)


class Captured:
    """A backend that runs graphs as captured and keeps their operations."""

    def __init__(self) -> None:
        self.graphs: list[list[Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs.append([node.target for node in gm.graph.nodes if node.op.startswith("call")])
        return gm.forward


# An outer compiler takes the originals in, unless told to leave the regions to thunder.


@new_dynamo
def test_an_outer_compile_breaks_its_graph_around_isolated_regions(model: Net, x: torch.Tensor) -> None:
    want, seen = model(x), Captured()
    thunderpatch.apply(model, types=Block, isolate=True)
    outer = torch.compile(model, backend=seen)
    for _ in range(2):
        torch.testing.assert_close(outer(x), want)
    assert [len(graph) for graph in seen.graphs] == [2, 2]  # linear and cos, sin and linear
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(2, 2)] * 2
    assert {str(row.status) for row in thunderpatch.report(model)} == {"compiled"}


@pytest.mark.skipif(not OLD, reason="Dynamo sees the proxy")
def test_isolation_is_refused_where_dynamo_does_not_see_the_proxy(model: Net) -> None:
    with pytest.raises(thunderpatch.UnsupportedEnvironmentError, match=r"isolate=True needs torch 2\.12"):
        thunderpatch.apply(model, types=Block, isolate=True)
    assert not thunderpatch.is_patched(model.one)


@new_dynamo
def test_gradients_flow_through_isolated_regions(model: Net, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    thunderpatch.apply(model, types=Block, isolate=True)
    torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, want)


@new_dynamo
def test_isolated_regions_cannot_be_part_of_one_whole_graph(model: Net, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block, isolate=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="isolate=True"):
        torch.compile(model, backend=Captured(), fullgraph=True)(x)


@new_dynamo
def test_a_patched_parent_takes_isolated_regions_in(model: Net, x: torch.Tensor) -> None:
    want = model(x)
    thunderpatch.apply(model, types=[Net, Block], nested="all", isolate=True)
    torch.testing.assert_close(model(x), want)
    assert {row.fqn: str(row.status) for row in thunderpatch.report(model)} == {
        "": "compiled",
        "one": "inlined",
        "two": "inlined",
    }
    assert thunderpatch.report(model)[""].graphs == 1


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=new_dynamo)])
@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_the_original(model: Net, x: torch.Tensor, strict: bool, isolate: bool) -> None:
    want = model(x)
    thunderpatch.apply(model, types=Block, isolate=isolate)
    model(x)
    torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), want)


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=new_dynamo)])
def test_jit_trace_sees_the_original(model: Net, x: torch.Tensor, isolate: bool) -> None:
    thunderpatch.apply(model, types=Block, isolate=isolate)
    want = model(x)
    torch.testing.assert_close(torch.jit.trace(model, x)(torch.cat([x, x])), torch.cat([want, want]))


def test_onnx_export_sees_the_original(model: Net, x: torch.Tensor) -> None:
    pytest.importorskip("onnxscript")
    thunderpatch.apply(model, types=Block)
    model(x)
    program = torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    thunderpatch.restore(model)
    plain = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert plain is not None
    assert [n.op_type for n in program.model.graph] == [n.op_type for n in plain.model.graph] != []


@pytest.mark.integration  # inductor builds a library: half a minute
def test_aot_inductor_builds_a_package_of_the_original(model: Net, x: torch.Tensor, tmp_path: Path) -> None:
    want = model(x)
    thunderpatch.apply(model, types=Block)
    model(x)
    package = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=package)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), want)


# Transforms of functions.


def test_jacobians_and_tangents_are_those_of_the_original(model: Net, x: torch.Tensor) -> None:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    def derivatives() -> Any:
        return torch.func.jacrev(function)(x), torch.func.jacfwd(function)(x), torch.func.jvp(function, (x,), (x,))

    want = derivatives()
    thunderpatch.apply(model, types=Block)
    model(x)
    torch.testing.assert_close(derivatives(), want)


def test_calls_outside_a_transform_are_compiled_before_and_after(model: Net, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block)
    model(x)
    torch.func.vmap(model)(x)
    model(x)
    assert [row.compiled_calls for row in thunderpatch.report(model)] == [2, 2]


# Tools that change the parameters of a module, or watch it.


def pruned(model: Net) -> None:
    prune.l1_unstructured(model.one.linear, "weight", amount=0.5)


def pruned_for_good(model: Net) -> None:
    pruned(model)
    prune.remove(model.one.linear, "weight")


def orthogonal(model: Net) -> None:
    parametrizations.orthogonal(model.one.linear)


def weight_normed(model: Net) -> None:
    parametrizations.weight_norm(model.one.linear)


def frozen(model: Net) -> None:
    model.one.requires_grad_(False)


CHANGES = [pruned, pruned_for_good, orthogonal, weight_normed, frozen]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after", "called"])
def test_what_changes_parameters_is_followed(x: torch.Tensor, change: Any, when: str) -> None:
    def trained(patch: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Net()
        if patch and when != "before":
            thunderpatch.apply(model, types=Block)
        if when == "called":
            model(x)
        change(model)
        if patch and when == "before":
            thunderpatch.apply(model, types=Block)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [*found, *(p.detach() for p in model.parameters())]

    torch.testing.assert_close(trained(True), trained(False))


def test_averaged_weights_can_be_swapped_in(model: Net, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([x], average)
    with torch.no_grad():
        got = average(x)
        with thunderpatch.disabled(average):
            torch.testing.assert_close(got, average(x))
        assert not torch.allclose(got, model(x))


def test_tensors_saved_patched_load_plain_and_the_reverse(model: Net, x: torch.Tensor, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path, other = str(tmp_path / "model.safetensors"), Net()
    want = model(x)
    thunderpatch.apply(model, types=Block)
    model(x)
    safetensors.save_model(model, path)
    safetensors.load_model(other, path)
    torch.testing.assert_close(other(x), want)
    with torch.no_grad():
        model.one.linear.weight.zero_()
    safetensors.load_model(model, path)
    torch.testing.assert_close(model(x), want)


def test_a_profiler_shows_regions_by_name_and_changes_no_value(model: Net, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block)
    want = model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.testing.assert_close(model(x), want)
    assert {"thunderpatch:one", "thunderpatch:two"} <= {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_and_inside_gives_eagers_dtypes_and_gradients(
    model: Net, x: torch.Tensor, dtype: torch.dtype
) -> None:
    def run() -> Any:
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            half = model(x)
            with torch.autocast("cpu", enabled=False):
                full = model(x)
        (half.float() + full).square().sum().backward()
        return half.dtype, full.dtype, half.detach(), full.detach(), [p.grad.clone() for p in model.parameters()]

    want = run()
    thunderpatch.apply(model, types=Block)
    got = run()
    assert got[:2] == want[:2] == (dtype, torch.float32)
    torch.testing.assert_close(got[2:], want[2:], rtol=2e-2, atol=2e-2)


# Many callers at once, and other processes.


def test_a_pool_of_threads_serves_mixed_shapes_right(model: Net) -> None:
    """8 threads, 2,000 requests of 6 shapes."""
    batches = [torch.randn(size, 3) for size in (1, 2, 3, 5, 8, 13)]
    with torch.no_grad():
        want = [model(batch) for batch in batches]
    thunderpatch.apply(model, types=Block)
    order = [random.Random(0).randrange(len(batches)) for _ in range(2000)]

    def serve(which: int) -> bool:
        with torch.no_grad():
            return torch.allclose(model(batches[which]), want[which], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(serve, order))
    assert [(row.calls, row.compiled_calls) for row in thunderpatch.report(model)] == [(2000, 2000)] * 2


def test_coroutines_get_right_answers_and_gradients(model: Net) -> None:
    batches = [torch.randn(size, 3) for size in (1, 2, 4)]
    want = [torch.autograd.grad(model(batch).sum(), model.first.weight)[0] for batch in batches]
    thunderpatch.apply(model, types=Block)

    async def serve(which: int) -> torch.Tensor:
        await asyncio.sleep(0)
        with torch.enable_grad():
            return torch.autograd.grad(model(batches[which]).sum(), model.first.weight)[0]

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(*(serve(k % 3) for k in range(60)))

    for k, got in enumerate(asyncio.run(main())):
        torch.testing.assert_close(got, want[k % 3])


class Scored(torch.utils.data.Dataset[torch.Tensor]):
    """Runs a patched model where the data are made: in the loader's workers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.full((1, 3), float(index)))[0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_run_a_patched_model(model: Net, start: str) -> None:
    """A forked worker has the compiled code; a spawned one gets the plain model, as pickle has it."""
    data = Scored(model)
    want = torch.stack([data[k] for k in range(3)])
    thunderpatch.apply(model, types=Block)
    data[0]
    loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context=start)
    torch.testing.assert_close(next(iter(loader)), want)


def _answer(pipe: Any) -> None:
    model, x = pipe.recv()
    plain = not thunderpatch.is_patched(model.one)
    thunderpatch.apply(model, types=Block)
    pipe.send((plain, model(x).detach().numpy()))


@pytest.mark.slow
def test_a_spawned_process_gets_a_plain_model_and_patches_its_own(model: Net, x: torch.Tensor) -> None:
    want = model(x)
    thunderpatch.apply(model, types=Block)
    model(x)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    process.start()
    ours.send((model, x))
    assert ours.poll(120)
    plain, got = ours.recv()
    process.join()
    assert plain
    torch.testing.assert_close(torch.from_numpy(got), want.detach())


def test_a_saved_patched_model_is_a_plain_one(model: Net, x: torch.Tensor) -> None:
    thunderpatch.apply(model, types=Block)
    want, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any(thunderpatch.is_patched(module) for module in loaded.modules())
    torch.testing.assert_close(loaded(x), want)
