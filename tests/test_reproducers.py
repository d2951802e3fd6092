from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Ran, run_scripts
from torch import Tensor, nn

import thunderpatch
from thunderpatch import registry, save_reproducers


class Angle(nn.Module):
    """What thunder gets wrong and is routed to inductor, as function and as method."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x * 2, x) + x.atan2(x)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() * 3
        torch._dynamo.graph_break()
        return y.cos() + 1


class Lookup(nn.Module):
    """Integers, a mask, a buffer and a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids: Tensor, mask: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return torch.where(mask.unsqueeze(-1), self.table(ids), 0.0) @ x + self.seen


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return y.float() + x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: self.linear(y).tanh(), x, use_reentrant=False)


class Model(nn.Module):
    """One of each kind of graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inplace = nn.ReLU(inplace=True)
        self.routed, self.halves, self.lookup = Angle(), Halves(), Lookup()
        self.autocast, self.checkpointed, self.dropout = Autocast(), Checkpointed(), nn.Dropout()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.halves(self.routed(self.inplace(self.second(self.first(x)))))
        ids = torch.tensor([[5, 6], [2, 3]])
        x = x + self.lookup(ids, ids > 2, torch.ones(4, 4).t()).sum()
        return self.dropout(self.norm(self.checkpointed(self.autocast(x))))


def called(model: nn.Module, *args: Tensor, **options: object) -> nn.Module:
    thunderpatch.apply(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thunderpatch.ThunderPatchWarning)
        model(*args).sum().backward()
    return model


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """What all scripts of the model did: without data, with `--raw`, and with data."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = called(Model(), x, where=lambda module, fqn: fqn and "." not in fqn)
    folder = tmp_path_factory.mktemp("scripts")
    made = save_reproducers(model, folder / "made")
    raw = [f"{path} --raw" for path in made if path.stem == "routed"]
    data = save_reproducers(model, folder / "data", data=lambda: model(x))
    assert [path.name for path in made] == [path.name for path in data]
    names = [*(path.stem for path in made), "raw routed", *(f"data {path.stem}" for path in data)]
    return dict(zip(names, run_scripts([*made, *raw, *data]), strict=True))


KINDS = ["first", "second", "routed", "halves", "halves-2", "lookup", "autocast", "checkpointed", "dropout", "norm"]


def test_each_graph_has_a_script_named_by_its_fqn_and_shared_code_has_one(ran: dict[str, Ran]) -> None:
    assert [name for name in ran if " " not in name] == ["first", "second", "inplace", *KINDS[2:]]


@pytest.mark.parametrize("name", [*KINDS, *(f"data {name}" for name in KINDS)])
def test_the_script_of_a_right_graph_runs_without_thunderpatch_and_ends_with_0(name: str, ran: dict[str, Ran]) -> None:
    assert ran[name].status == 0, ran[name].output
    if name.endswith("dropout"):
        assert "draws random numbers" in ran[name].output
    else:
        assert "values agree" in ran[name].output
        assert "partitions by thunder" in ran[name].output


@pytest.mark.parametrize("name", ["inplace", "data inplace"])
def test_the_script_of_a_graph_that_thunder_gets_wrong_shows_it_and_ends_with_1(name: str, ran: dict[str, Ran]) -> None:
    assert ran[name].status == 1
    assert "gradient of input 0 is off by" in ran[name].output


def test_what_is_routed_goes_to_inductor_in_the_script_too_and_with_raw_to_thunder(ran: dict[str, Ran]) -> None:
    assert "1 by inductor" in ran["routed"].output
    assert "1 partitions by thunder, 0 by inductor" in ran["raw routed"].output


def test_the_heading_names_all_modules_the_options_and_the_routes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Angle())
    options = {"executors": ["sdpa"], "mode": "max-autotune", "fullgraph": True}
    called(model, torch.randn(2, 4), types=(nn.Linear, Angle), **options)
    first, linear, routed = (path.read_text() for path in save_reproducers(model, tmp_path))
    assert "  0: Linear\n\n" in first and "  1: Linear\n  2: Linear\n\n" in linear
    assert "Options: executors=['sdpa'], fullgraph=True, options={'max_autotune': True" in linear
    assert "OPTIONS = {'executors': ['sdpa']}" in linear and "INDUCTOR = {'max_autotune': True" in linear
    assert "goes to inductor: thunder's gradient of atan2 is NaN at the origin" in routed
    assert torch.__version__ in routed


def test_an_option_that_cannot_be_written_down_is_named_in_words(tmp_path: Path) -> None:
    from thunder.core.transform_common import Transform

    class Nothing(Transform):
        """Does nothing."""

    model = called(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), transforms=[Nothing()])
    (path,) = save_reproducers(model, tmp_path)
    assert "OPTIONS = {}" in path.read_text()
    assert "Not in this script, since it cannot be written down: transforms=[" in path.read_text()


def test_input_metadata_is_there_and_data_only_on_request(tmp_path: Path) -> None:
    x = torch.randn(3, 4).t().requires_grad_()
    model = called(nn.Sequential(nn.Linear(3, 2)), x)
    (path,) = save_reproducers(model, tmp_path)
    assert "tensor((4, 3), (1, 4), torch.float32, 'cpu', requires_grad=True)" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.py"]
    save_reproducers(model, tmp_path, data=lambda: model(x))
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert any(torch.equal(value, x) and value.stride() == x.stride() for value in saved.values())
    save_reproducers(model, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.py"]


def test_names_are_safe_on_every_file_system_and_never_the_same(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for k, name in enumerate(["a/b", "A/B", "..", "ä" * 200]):
                self._modules[name] = nn.Linear(4, 4 + k)

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x).sum() for layer in self._modules.values())

    model = called(Odd(), torch.randn(2, 4), types=nn.Linear)
    names = [path.name for path in save_reproducers(model, tmp_path)]
    assert len({name.lower() for name in names}) == 4
    assert all(name.isascii() and "/" not in name and len(name) < 130 for name in names)
    assert all((tmp_path / name).is_file() for name in names)


@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_a_graph_that_could_not_be_compiled_has_a_script_that_says_why(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError('boom """ \\ bang')

    monkeypatch.setattr("thunderpatch.splitting.split", broken)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.erf() * 1.25

    model = Own()
    thunderpatch.apply(model, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(thunderpatch.CompileError):
            model(torch.randn(3))
        assert thunderpatch.report(model)[""].status == "failed"
    else:
        with pytest.warns(thunderpatch.ThunderPatchWarning, match="uncompiled"):
            model(torch.randn(3))
    (path,) = save_reproducers(model, tmp_path)
    text = compile(path.read_text(), path, "exec").co_consts[0]
    assert "It runs uncompiled after" in text and 'boom """ \\ bang' in text


def test_with_a_verification_only_what_is_wrong_gets_a_script_that_tells_how(tmp_path: Path) -> None:
    from faulty import Model as Faulty
    from faulty import compiled_wrongly

    model, x = Faulty(), torch.randn(3, 4)
    with compiled_wrongly("output"):
        found = thunderpatch.verify(model, x, names=["first", "middle", "last"])
    assert [path.stem for path in save_reproducers(model, tmp_path, verification=found)] == ["middle"]
    assert "middle: differs: output[1] is off by" in (tmp_path / "middle.py").read_text()


def test_saving_changes_nothing_that_runs(tmp_path: Path) -> None:
    model = called(Halves(), torch.randn(3, requires_grad=True))
    (record,) = registry.records_of(model)
    before = record.compilations, [graph.call for graph in record.graphs]
    save_reproducers(model, tmp_path)
    assert before == (record.compilations, [graph.call for graph in record.graphs])
    with pytest.raises(ZeroDivisionError):
        save_reproducers(model, tmp_path, data=lambda: 1 / 0)
    assert before == (record.compilations, [graph.call for graph in record.graphs])


def test_a_model_that_ran_nothing_has_no_scripts_and_what_is_no_model_is_refused(tmp_path: Path) -> None:
    assert save_reproducers(nn.Linear(2, 2), tmp_path / "new") == []
    with pytest.raises(thunderpatch.ArgumentError, match=r"takes a torch\.nn\.Module, not int"):
        save_reproducers(3, tmp_path)
