from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.fx import _lazy_graph_module as lazy
from torch.fx.passes import split_module

from thunderpatch import compat
from thunderpatch.errors import ThunderPatchError, ThunderPatchWarning, UnsupportedEnvironmentError

TORCH = str(torch.__version__)
SPLITS_LAZILY = hasattr(split_module, "_make_graph_module")

# Fails the import of one of thunder's modules, and notes what torch looked like at that moment.
BREAK_THUNDER = """
    import importlib.abc, importlib.machinery, sys, warnings
    import torch
    from thunderpatch import compat
    from thunderpatch.errors import UnsupportedEnvironmentError

    warnings.filterwarnings("ignore", category=UserWarning, module="thunder")
    tensor, function = dict(vars(torch.Tensor)), dict(vars(torch.autograd.Function))

    class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        name = "thunder.dynamo.compiler"  # one of the last
        seen = []
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, self) if name == self.name else None
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            function = torch.autograd.Function
            self.seen.append((hasattr(torch.Tensor, "rename"), hasattr(function.apply, "__func__")))
            raise RuntimeError("a broken wheel")

    def attempt():
        try:
            compat.load_thunder()
        except UnsupportedEnvironmentError as error:
            return error

    def thunder_modules():
        return [name for name in sys.modules if name.split(".")[0] == "thunder"]

    def assert_torch_is_as_it_was():
        assert dict(vars(torch.Tensor)) == tensor
        assert dict(vars(torch.autograd.Function)) == function

    def assert_thunder_works():
        from thunder.dynamo import ThunderCompiler
        def backend(graph_module, inputs):
            with compat.backend_context():
                return ThunderCompiler()(graph_module, inputs)
        x = torch.randn(3, requires_grad=True)
        torch.compile(torch.sin, backend=backend)(x).sum().backward()
        torch.testing.assert_close(x.grad, x.detach().cos())

    sys.meta_path.insert(0, Broken())
"""


def run(script: str) -> None:
    """Run a script in a process of its own, for what cannot be undone in this one."""
    root = Path(compat.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """``compat`` as before its first call, in a process where thunder is imported."""
    compat.load_thunder()
    monkeypatch.setattr(compat, "_loaded", None)
    return monkeypatch


def pretend(monkeypatch: pytest.MonkeyPatch, *, torch_version: str = "2.13.0", thunder_version: str = "0.2.6") -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(metadata, "version", lambda name: thunder_version)


# --- versions ---


def test_a_missing_thunder_is_an_error_that_says_what_to_install(fresh: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    fresh.setattr(metadata, "version", not_found)
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        compat.load_thunder()
    assert TORCH in str(caught.value)
    assert "pip install 'lightning-thunder>=0.2.6,<0.3'" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ThunderPatchError)


@pytest.mark.parametrize("version", ["1.13.1", "2.8.0", "2.8.0+cpu"])
def test_a_torch_before_2_9_is_an_error_that_names_both_versions(fresh: pytest.MonkeyPatch, version: str) -> None:
    pretend(fresh, torch_version=version)
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        compat.load_thunder()
    assert f"found torch {version} and lightning-thunder 0.2.6" in str(caught.value)
    assert "pip install 'torch>=2.9,<2.16'" in str(caught.value)


@pytest.mark.parametrize("version", ["0.1.0", "0.2.5", "0.3.0", "0.3.0.dev20260101", "1.0"])
def test_a_thunder_of_another_series_is_an_error_that_names_both_versions(
    fresh: pytest.MonkeyPatch, version: str
) -> None:
    pretend(fresh, thunder_version=version)
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        compat.load_thunder()
    assert f"found torch 2.13.0 and lightning-thunder {version}" in str(caught.value)
    assert "pip install 'lightning-thunder>=0.2.6,<0.3'" in str(caught.value)


@pytest.mark.parametrize(
    "versions",
    [
        {"torch_version": "2.16.0"},
        {"torch_version": "2.16.0.dev20261201+cu132"},
        {"torch_version": "3.0.0"},
        {"thunder_version": "0.2.7"},
    ],
)
def test_a_version_newer_than_tested_is_one_warning_and_is_tried(
    fresh: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    pretend(fresh, **versions)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compat.load_thunder() is sys.modules["thunder"]
        compat.load_thunder()
    assert [warning.category for warning in caught] == [ThunderPatchWarning]
    assert "tested up to torch 2.15 and lightning-thunder 0.2.6" in str(caught[0].message)
    assert next(iter(versions.values())) in str(caught[0].message)


@pytest.mark.parametrize("version", ["2.9.0a0+git123", "2.9.1", "2.13.0+cpu", "2.15.0", "2.15.3+cu132"])
def test_a_tested_version_is_no_warning(fresh: pytest.MonkeyPatch, version: str) -> None:
    pretend(fresh, torch_version=version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.load_thunder()


# --- the import ---


def test_load_returns_the_one_thunder() -> None:
    thunder = compat.load_thunder()
    assert thunder is compat.load_thunder() is sys.modules["thunder"]
    assert thunder.dynamo is sys.modules["thunder.dynamo"]


def test_first_loads_from_several_threads_give_one_thunder() -> None:
    run(
        BREAK_THUNDER
        + """
    del sys.meta_path[0]
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: compat.load_thunder(), range(4)))
    assert found == {sys.modules["thunder"]}
    assert_torch_is_as_it_was()
    """
    )


def test_a_failed_import_says_so_leaves_nothing_and_can_be_retried() -> None:
    run(
        BREAK_THUNDER
        + """
    first, second = attempt(), attempt()
    for error in (first, second):
        assert f"thunder 0.2.6 cannot be imported with torch {torch.__version__}" in str(error), error
        assert "RuntimeError: a broken wheel" in str(error), error
        assert "--force-reinstall" in str(error), error
        assert isinstance(error.__cause__, RuntimeError)
    assert Broken.seen == [(True, True)] * 2, Broken.seen
    assert thunder_modules() == []
    assert_torch_is_as_it_was()

    del sys.meta_path[0]
    compat.load_thunder()
    assert_torch_is_as_it_was()
    assert_thunder_works()
    """
    )


def test_an_import_that_fails_on_an_untested_torch_advises_a_tested_one() -> None:
    run(
        BREAK_THUNDER
        + """
    from thunderpatch.errors import ThunderPatchWarning
    torch.__version__ = "2.99.0"
    Broken.name = "thunder.core.proxies"  # an early one
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = attempt()
    assert [w.category for w in caught].count(ThunderPatchWarning) == 1
    assert "pip install 'torch>=2.9,<2.16'" in str(error), error
    assert "cannot be imported with torch 2.99.0" in str(error), error
    """
    )


def test_an_interrupted_import_leaves_nothing_and_stays_an_interrupt() -> None:
    run(
        BREAK_THUNDER
        + """
    def interrupt(self, module):
        raise KeyboardInterrupt
    Broken.exec_module = interrupt
    Broken.name = "thunder.core.proxies"  # an early one
    try:
        compat.load_thunder()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    assert thunder_modules() == []
    assert_torch_is_as_it_was()
    """
    )


def test_a_user_who_has_imported_thunder_before_keeps_it_or_is_helped() -> None:
    # On torch 2.13 and newer the plain import fails half-way; what it left must not spoil the next one.
    run(
        BREAK_THUNDER
        + """
    del sys.meta_path[0]
    try:
        import thunder
    except AttributeError:
        assert "thunder" not in sys.modules and thunder_modules(), "the plain import left nothing"
        compat.load_thunder()
    else:
        assert compat.load_thunder() is thunder
    assert_torch_is_as_it_was()
    assert_thunder_works()
    """
    )


@pytest.mark.slow
def test_a_thunder_imported_before_survives_a_failing_thunder_dynamo() -> None:
    run(
        BREAK_THUNDER
        + """
    with compat._lent_names():
        import thunder
    assert isinstance(attempt().__cause__, RuntimeError)
    assert sys.modules["thunder"] is thunder
    assert "thunder.dynamo" not in sys.modules

    del sys.meta_path[0]
    assert compat.load_thunder() is thunder
    assert_thunder_works()
    """
    )


# --- the names lent to torch ---


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_lent_names_are_there_inside_and_gone_after_an_error() -> None:
    before = dict(vars(torch.Tensor)), dict(vars(torch.autograd.Function))
    with pytest.raises(KeyError), compat._lent_names():
        assert [torch.Tensor.align_as, torch.Tensor.rename]
        assert torch.autograd.Function.apply.__func__
        raise KeyError
    assert (dict(vars(torch.Tensor)), dict(vars(torch.autograd.Function))) == before
    assert list(vars(torch.Tensor)) == list(before[0])


def test_names_that_torch_has_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = classmethod(lambda cls, *args: args)
    monkeypatch.setattr(torch.Tensor, "rename", len, raising=False)
    monkeypatch.setattr(torch.autograd.Function, "apply", own)
    with compat._lent_names():
        assert torch.Tensor.rename is len
        assert vars(torch.autograd.Function)["apply"] is own


def test_a_lent_method_behaves_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_NAMED_TENSOR_METHODS", ("gone",))
    with compat._lent_names(), pytest.raises(AttributeError, match="'Tensor' object has no attribute 'gone'"):
        torch.ones(1).gone()
    assert not hasattr(torch.Tensor, "gone")


def test_a_custom_function_works_while_its_apply_is_lent() -> None:
    x = torch.randn(3, requires_grad=True)
    with compat._lent_names():
        (grad,) = torch.autograd.grad(Square.apply(x).sum(), x)
    torch.testing.assert_close(grad, 2 * x.detach())


# --- the backend ---


@pytest.fixture
def lazy_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that splits into lazy graph modules, as 2.12 and newer do."""
    monkeypatch.setattr(split_module, "_make_graph_module", object(), raising=False)


@pytest.mark.usefixtures("lazy_split")
@pytest.mark.parametrize("outside", [True, False])
def test_the_lazy_flag_is_off_inside_and_as_it_was_after(outside: bool) -> None:
    with lazy._use_lazy_graph_module(outside):
        with pytest.raises(KeyError), compat.backend_context():
            assert not lazy._use_lazy_graph_module_flag
            raise KeyError
        assert lazy._use_lazy_graph_module_flag is outside


@pytest.mark.usefixtures("lazy_split")
def test_a_backend_may_call_a_backend() -> None:
    with lazy._use_lazy_graph_module(True), compat.backend_context():
        with lazy._use_lazy_graph_module(True):  # as inductor does around its own work
            with compat.backend_context():
                assert not lazy._use_lazy_graph_module_flag
            assert lazy._use_lazy_graph_module_flag
        assert not lazy._use_lazy_graph_module_flag


@pytest.mark.usefixtures("lazy_split")
def test_two_threads_take_turns_with_each_other_and_with_dynamo() -> None:
    seen: list[bool] = []

    def other() -> None:
        with convert_frame.compile_lock, lazy._use_lazy_graph_module(True), compat.backend_context():
            seen.append(lazy._use_lazy_graph_module_flag)

    thread = threading.Thread(target=other)
    with lazy._use_lazy_graph_module(True):
        with compat.backend_context():
            thread.start()
            thread.join(timeout=0.2)
            assert seen == [], "the other thread did not wait for its turn"
        assert lazy._use_lazy_graph_module_flag
    thread.join()
    assert seen == [False]
    assert not lazy._use_lazy_graph_module_flag


def test_a_torch_that_does_not_split_lazily_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(split_module, "_make_graph_module", raising=False)
    with lazy._use_lazy_graph_module(True), compat.backend_context():
        assert lazy._use_lazy_graph_module_flag


# --- thunder at work ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Split(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(super().forward(x)).cumsum(0)  # sinc: an op that thunder leaves to inductor


@pytest.mark.parametrize("block", [Block, Checkpointed, Split])
def test_value_and_gradients_equal_eager(block: type[Block]) -> None:
    compat.load_thunder()
    from thunder.dynamo import ThunderCompiler

    compiler = ThunderCompiler()

    def backend(graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.nn.Module:
        with compat.backend_context():
            return compiler(graph_module, inputs)

    model, x = block(), torch.randn(4, 8, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected = model(x)
    expected_grads = torch.autograd.grad(expected.sum(), wanted)
    compiled = torch.compile(lambda x: model(x), backend=backend)
    result = compiled(x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), wanted), expected_grads)
    assert any(info.thunder_compiled_fns for info in compiler.subgraph_infos)


@pytest.mark.slow
@pytest.mark.skipif(not SPLITS_LAZILY, reason="this torch splits into plain graph modules")
def test_thunder_still_needs_plain_graph_modules() -> None:
    compat.load_thunder()
    from thunder.dynamo import ThunderCompiler

    def compile_and_run(backend: Callable[..., object]) -> None:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(4))

    def inside(*args: object) -> object:
        with compat.backend_context():
            return ThunderCompiler()(*args)

    compile_and_run(inside)
    with pytest.raises(Exception):  # noqa: B017 - how it fails differs from torch to torch
        compile_and_run(ThunderCompiler())
