"""Runs of a model that leave no trace: gradients, buffers, attributes and the random state are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TABLES = ("_parameters", "_buffers", "_modules")
_OWN = (*_TABLES, "forward")


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back, at the end of a `with` statement, all that running `model` forward and backward changes.

    That is gradients, buffers and other tensors that modules hold, attributes that they set, lists, dicts and
    sets among them, and the random state of CPU and CUDA. Parameters are expected to be left alone. Meanwhile
    no parameter has a gradient.
    """
    states = [_State(module) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    in_use = torch.cuda.is_initialized()
    cuda = list(range(torch.cuda.device_count())) if in_use else []
    try:
        for parameter, _ in gradients:
            parameter.grad = None  # nothing accumulates into what is there, so that it need not be copied
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        with torch.no_grad():
            for state in states:
                state.put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient


class _State:
    """The attributes of one module, its instance forward aside: patches come and go through that one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {name: value for name, value in vars(module).items() if name not in _OWN}
        self._tables = {name: dict(vars(module)[name]) for name in _TABLES}
        self._contents = [(c, c.copy()) for c in self._attributes.values() if type(c) in (list, dict, set)]
        held = [*self._attributes.values(), *self._tables["_buffers"].values()]
        for container, _ in self._contents:
            held += container.values() if type(container) is dict else container
        self._tensors = [(t, t.detach().clone()) for t in held if type(t) is Tensor]

    def put_back(self) -> None:
        own = vars(self._module)
        for name in [name for name in own if name not in _OWN and name not in self._attributes]:
            del own[name]
        own.update(self._attributes)
        for table, content in self._tables.items():
            _refill(own[table], content)
        for container, content in self._contents:
            _refill(container, content)
        for tensor, value in self._tensors:
            # Whether or not it was written to: batch_norm changes its statistics and does not count it as such.
            # Through `.data`, which is not counted either, so that graphs which saved the tensor stay valid.
            tensor.data.copy_(value)


def version(tensor: Tensor) -> int | None:
    """Return how often a tensor has been written to; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if type(container) is list:
        container.extend(content)
    else:
        container.update(content)
