"""Whether there are hooks inside a region.

Dynamo compiles hooks of children into the graph but does not guard on them (`skip_nnmodule_hook_guards`), so that
one added later never fires. Each registration anywhere takes the next number of `RemovableHandle.next_id`; while
that stands still, nothing can have been added. A region with hooks in it is looked at on each call instead.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as _module

State = tuple[Any, ...]  # empty: no hooks

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = [
    value
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
    if (value := getattr(_module, name, None)) is not None
]


def state(root: nn.Module) -> State:
    """Return what identifies the hooks that a call of `root.forward` would meet; empty when there are none.

    The hooks of `root` itself run outside its forward. Handle numbers are never used twice.
    """
    found: list[Any] = [("", tuple(hooks)) for hooks in _GLOBAL if hooks]
    seen = {id(root)}
    todo = [child for child in root._modules.values() if child is not None]
    while todo:
        module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for kind in _KINDS:
            hooks = module.__dict__.get(kind)
            if hooks:
                found.append((id(module), kind, tuple(hooks)))
        todo.extend(child for child in module._modules.values() if child is not None)
    return tuple(found)
