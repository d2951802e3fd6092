"""A gradient that is differentiated itself comes from the region run again, and counts each input once."""

from __future__ import annotations

import torch
from torch import nn

import thunderpatch


class Product(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * y


def curvature(module: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    y = x * 3  # one input is computed from the other
    (grad,) = torch.autograd.grad(module(x, y).sum(), x, create_graph=True)
    return [grad.detach(), *torch.autograd.grad(grad.square().sum(), x)]


def test_an_input_that_is_computed_from_another_counts_once() -> None:
    model = nn.Sequential(Product())
    want = curvature(model[0])
    thunderpatch.apply(model, types=Product, double_backward=True)
    for _ in range(2):
        torch.testing.assert_close(curvature(model[0]), want)
    assert thunderpatch.report(model).rows[0].thunder_partitions == 1


def test_a_hessian_vector_product_equals_eagers() -> None:
    def product(module: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        (grad,) = torch.autograd.grad(module(x, x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad, x, torch.ones_like(x))[0]

    model = nn.Sequential(Product())
    want = product(model[0])
    thunderpatch.apply(model, types=Product)
    torch.testing.assert_close(product(model[0]), want)
