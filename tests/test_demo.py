import copy

import pytest
import torch
from torch import nn

from thunderpatch.demo import CONTEXT, MODELS, VOCABULARY, Training, gpt, resnet, text, train


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_on_its_inputs_and_can_be_trained(name: str) -> None:
    model, inputs = MODELS[name]()
    output = model(*inputs)
    assert output.shape == ((4, CONTEXT, VOCABULARY) if name == "gpt" else (4, 10))
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_gpt_has_twelve_equal_blocks_and_sees_no_later_byte() -> None:
    model, (ids,) = gpt()
    assert len(model.blocks) == 12 and len({type(block) for block in model.blocks}) == 1
    changed = ids.clone()
    changed[:, 40] = (ids[:, 40] + 1) % VOCABULARY
    with torch.no_grad():
        same = model(ids).isclose(model(changed)).all(dim=-1).all(dim=0)
    assert same[:40].all() and not same[40]


def test_the_resnet_is_shaped_like_resnet18_with_activations_in_place() -> None:
    model, _ = resnet()
    modules = list(model.modules())
    assert sum(isinstance(m, nn.Conv2d) for m in modules) == 20
    assert all(m.inplace for m in modules if isinstance(m, nn.ReLU))


def test_the_text_is_long_and_english() -> None:
    assert len(text()) > 100_000 and text().count(b" the ") > 1000


def test_training_is_decided_by_the_model_and_the_seed_and_lowers_the_loss() -> None:
    model, _ = gpt()
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    seen: list[tuple[int, float]] = []
    first = train(model, steps=5, seed=1, on_step=lambda step, loss: seen.append((step, loss)))
    assert first.losses == train(twin, steps=5, seed=1).losses != train(other, steps=5, seed=2).losses
    assert seen == list(enumerate(first.losses)) and len(first.seconds) == 5
    assert first.losses[-1] < first.losses[0] - 1


def test_the_first_step_is_told_apart_from_the_median_of_the_others() -> None:
    training = Training(losses=[0.0] * 4, seconds=[9.0, 1.0, 5.0, 2.0])
    assert (training.first_seconds, training.step_seconds) == (9.0, 2.0)


def test_one_step_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        train(gpt()[0], steps=1)
