"""Lightning trains a patched module as a plain one, with the callback that the README shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import WIDTH, Block, ran
from torch import nn

import thunderpatch

lightning = pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Task(lightning.LightningModule):
    """Keeps each step's loss; fails at one step if told to."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.blocks, self.head, self.fails_at = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 1), fails_at
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = self(batch).float().square().mean()
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("checked", self(batch).float().square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Thunder(lightning.Callback):
    """Patches at the start of a fit, validation, test or prediction, and restores at its end."""

    def __init__(self, **selectors_and_options: Any) -> None:
        self.arguments = selectors_and_options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.patch = thunderpatch.apply(pl_module, **self.arguments)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.patch.restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.patch.restore()


def task(**arguments: Any) -> Task:
    torch.manual_seed(1)
    return Task(**arguments)


def data() -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2)), batch_size=2)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    return lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": 2, "enable_checkpointing": False, **settings},
    )


SETTINGS = {
    "float32": {},
    "bfloat16": {"precision": "bf16-mixed"},
    "bfloat16 weights": {"precision": "bf16-true"},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_fit_gives_eagers_losses_and_weights_and_leaves_nothing(tmp_path: Path, setting: str) -> None:
    plain, model = task(), task()
    trainer(tmp_path, **SETTINGS[setting]).fit(plain, data(), data())
    trainer(tmp_path, Thunder(types=Block), **SETTINGS[setting]).fit(model, data(), data())
    close = {"rtol": 2e-2, "atol": 2e-2} if "bfloat16" in setting else {}
    torch.testing.assert_close(model.losses, plain.losses, **close)
    assert len(plain.losses) == 8
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), **close)
    ran(model, 18)  # 8 batches of training, 8 of validation and 2 of the check before
    assert not any("forward" in vars(module) for module in model.modules())


class Late(Task):
    """Makes its blocks where Lightning lets sharded models do so."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.blocks = self.blocks, None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = self.made


class AtFitStart(Thunder):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        with pytest.raises(thunderpatch.SelectionError):
            thunderpatch.apply(pl_module, names="blocks.*")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().setup(trainer, pl_module, "fit")


def test_modules_made_in_configure_model_are_patched_when_the_fit_starts(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Late()
    trainer(tmp_path, AtFitStart(names="blocks.*"), max_epochs=1).fit(model, data())
    assert {row.fqn: row.compiled_calls for row in thunderpatch.report(model)} == {"blocks.0": 4, "blocks.1": 4}
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_fit_that_fails_leaves_the_model_unpatched(tmp_path: Path) -> None:
    model = task(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, Thunder(types=Block)).fit(model, data())
    assert not any("forward" in vars(module) for module in model.modules())
    ran(model, 2)


def test_a_checkpoint_of_a_patched_fit_loads_plain_and_resumes_patched(tmp_path: Path) -> None:
    plain, model = task(), task()
    trainer(tmp_path).fit(plain, data())
    keeps = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="kept")
    trainer(tmp_path, Thunder(types=Block), keeps, max_epochs=1, enable_checkpointing=True).fit(model, data())
    path = tmp_path / "kept.ckpt"
    loaded = Task.load_from_checkpoint(path)
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()))
    assert list(loaded.state_dict()) == list(plain.state_dict())
    resumed = task()
    trainer(tmp_path, Thunder(types=Block)).fit(resumed, data(), ckpt_path=path)
    torch.testing.assert_close(resumed.losses, plain.losses[4:])
    ran(resumed, 4)


def test_a_trainer_takes_what_thunderfx_returns(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19746: it takes a LightningModule, and thunder had made another thing of that."""
    plain, model = task(), task()
    trainer(tmp_path, max_epochs=1).fit(plain, data())
    trainer(tmp_path, max_epochs=1).fit(thunderpatch.thunderfx(model), data())
    torch.testing.assert_close(model.losses, plain.losses)
    ran(model, 4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("whole", [False, True])
def test_fabric_trains_a_patched_model_as_a_plain_one(when: str, whole: bool) -> None:
    def losses(patch: str) -> list[torch.Tensor]:
        fabric, model = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"), nn.Sequential(task())
        select = {"types": [Task, nn.Sequential]} if whole else {"types": Block}
        if patch == "before":
            thunderpatch.apply(model, **select)
        prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if patch == "after":
            thunderpatch.apply(prepared, **select)
        found = []
        for batch in data():
            optimizer.zero_grad()
            loss = prepared(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            found.append(loss.detach())
        if patch:
            ran(model, 4)
        return found

    torch.testing.assert_close(losses(when), losses(""), rtol=2e-2, atol=2e-2)
