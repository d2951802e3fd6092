"""What each module is really called with, taken from one run of the model as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .calls import Call, Inputs
from .patching import disabled
from .preserving import preserved

__all__ = ["Call", "Inputs", "capture_inputs"]


def capture_inputs(
    model: nn.Module, modules: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Call]:
    """Run `model(*args, **kwargs)` once, unpatched, and return the first call of each of `modules` by FQN.

    Runs in the grad mode and autocast of the caller. A module that was not called is not in the result. The
    model, its gradients and buffers, the arguments and the random state are as before. What the model raises
    is raised.
    """
    calls: dict[str, Call] = {}

    def watch(fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if fqn not in calls:
                calls[fqn] = Call.of(given, named)

        return hook

    inputs = Call.of(args, kwargs).fresh()
    with preserved(model), disabled(model), contextlib.ExitStack() as stack:
        for fqn, module in modules.items():
            # First of all hooks: a replay goes through the module's own hooks again.
            handle = module.register_forward_pre_hook(watch(fqn), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        model(*inputs.args, **inputs.kwargs)
    return {fqn: calls[fqn] for fqn in modules if fqn in calls}
