import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thunderpatch.demo import MODELS
from thunderpatch.targets import UsageError, load, parse_input


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_models.py").write_text("WIDTH = 4\n")
    path = tmp_path / "models_of_a_test.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from neighbour_of_models import WIDTH

            ready = nn.Linear(WIDTH, 2)
            number = 3

            class Factories:
                plain = staticmethod(lambda: nn.Linear(WIDTH, 2))

            def positional():
                return nn.Bilinear(WIDTH, WIDTH, 2), (torch.ones(3, WIDTH), torch.ones(3, WIDTH))

            def keywords():
                return nn.Linear(WIDTH, 2), {"input": torch.ones(3, WIDTH)}

            def single():
                return nn.Linear(WIDTH, 2), torch.ones(3, WIDTH)

            def broken():
                raise KeyError("width")
            """
        )
    )
    yield str(path)
    sys.modules.pop("models_of_a_test", None)
    sys.modules.pop("neighbour_of_models", None)


@pytest.mark.parametrize("name", MODELS)
def test_a_built_in_model_is_a_target_with_inputs(name: str) -> None:
    target = load(name)
    assert target.has_inputs and isinstance(target.model(*target.args), torch.Tensor)


@pytest.mark.parametrize("factory", ["positional", "keywords", "single"])
def test_a_factory_gives_its_inputs_as_tuple_dict_or_tensor(models: str, factory: str) -> None:
    target = load(f"{models}:{factory}")
    assert target.model(*target.args, **target.kwargs).shape == (3, 2)


@pytest.mark.parametrize("attribute", ["Factories.plain", "ready"])
def test_a_target_without_inputs_takes_those_of_the_command_line(models: str, attribute: str) -> None:
    assert not load(f"{models}:{attribute}").has_inputs
    target = load(f"{models}:{attribute}", ["5x4"])
    assert target.model(*target.args).shape == (5, 2)
    target = load(f"{models}:{attribute}", ["input=5x4"])
    assert target.args == () and target.model(**target.kwargs).shape == (5, 2)


def test_a_module_of_the_working_directory_is_found(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(models).parent)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load("models_of_a_test:single").has_inputs
    assert load("torch.nn:Identity").model(3) == 3


def test_dtype_casts_what_is_floating_and_mode_is_set(models: str) -> None:
    target = load("gpt", dtype="bfloat16", training=False)
    assert target.args[0].dtype is torch.int64 and not target.model.training
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert load(f"{models}:single", dtype="float64").args[0].dtype is torch.float64
    assert load(f"{models}:ready", ["2x4", "2:float32"], dtype="float64", training=True).args[0].dtype is torch.float64


@pytest.mark.parametrize(
    ("spec", "name", "shape", "dtype"),
    [
        ("2x3", None, (2, 3), torch.float32),
        ("x=7", "x", (7,), torch.float32),
        ("0x4:bfloat16", None, (0, 4), torch.bfloat16),
        ("scalar:float64", None, (), torch.float64),
        ("mask=2x2:bool", "mask", (2, 2), torch.bool),
        ("2:complex64", None, (2,), torch.complex64),
    ],
)
def test_an_input_has_the_name_shape_and_dtype_that_are_asked_for(
    spec: str, name: str | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found, tensor = parse_input(spec)
    assert (found, tuple(tensor.shape), tensor.dtype) == (name, shape, dtype)


def test_a_range_bounds_the_input_and_excludes_its_upper_end() -> None:
    assert set(parse_input("1000:int64:-1..2")[1].tolist()) == {-1, 0, 1}
    _, reals = parse_input("1000:float32:-0.5..1.5")
    assert -0.5 <= reals.min() < 0 < 1 < reals.max() <= 1.5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("2y3", "cannot read the input '2y3': expected [NAME=]SHAPE[:DTYPE[:LOW..HIGH]]"),
        ("2x3:int64:0-5", "cannot read the input"),
        ("2x3:flot32", "torch has no dtype 'flot32'; did you mean float32?"),
        ("2x3:int64", "needs a range, such as 2x3:int64:0..128"),
        ("2x3:int64:5..5", "the range 5..5 of '2x3:int64:5..5' is empty"),
        ("2x3:int64:0.5..2", "as int numbers"),
    ],
)
def test_an_input_that_cannot_be_read_says_what_is_expected(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_input(spec)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp", "no target is called 'gtp'; did you mean gpt? (expected package.module:factory"),
        ("nowhere/models.py:gpt", "there is no file nowhere/models.py"),
        ("no.such.module:gpt", "cannot import no.such.module: ModuleNotFoundError"),
        ("torch.nn:Liner", "torch.nn has no 'Liner'; did you mean Linear?"),
        ("torch.nn:Linear", "torch.nn:Linear() raised TypeError"),
        ("math:pi", "math:pi gives a float; expected a model (nn.Module)"),
    ],
)
def test_a_target_that_is_not_there_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load(name)


def test_what_a_file_raises_is_told_with_its_name(models: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"broken\(\) raised KeyError: 'width'"):
        load(f"{models}:broken")
    (tmp_path / "bad_file_of_a_test.py").write_text("def (")
    with pytest.raises(UsageError, match=r"cannot import .*bad_file_of_a_test.py: SyntaxError"):
        load(f"{tmp_path}/bad_file_of_a_test.py:x")


def test_a_model_is_cast_only_to_what_models_can_be() -> None:
    with pytest.raises(UsageError, match="cannot be cast to int64"):
        load("gpt", dtype="int64")
    with pytest.raises(UsageError, match="cannot move gpt to nowhere"):
        load("gpt", device="nowhere")
