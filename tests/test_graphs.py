from __future__ import annotations

import torch
from torch import Tensor, nn

import thunderpatch


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.factor


def test_a_float_that_varies_between_modules_and_calls_is_a_constant_of_each_graph() -> None:
    model = nn.Sequential(*(Scaled(k / 8) for k in range(1, 4)))
    x = torch.randn(3, 4)
    with thunderpatch.patched(model, types=Scaled):
        for factor in (0.5, 0.25, 0.5):
            model[1].factor = factor
            expected = x
            for module in model:
                expected = expected.sin() * module.factor
            torch.testing.assert_close(model(x), expected)


def test_dropout_with_another_probability_in_each_block_compiles() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Dropout(p)) for p in (0.0, 0.25, 0.5)))
    with thunderpatch.patched(model, names="*"):
        kept = (model(torch.ones(200)) != 0).float().mean()
    assert 0.2 < kept < 0.55  # 0.75 * 0.5
