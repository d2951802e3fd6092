"""Whatever is done to a tree of modules, and in whatever order: once all is restored, nothing is left."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import thunderpatch
from thunderpatch import ThunderPatchWarning, registry

WIDTH = 3


class Pair(nn.Module):
    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


class Chosen(nn.Module):
    """Sets a forward on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward = self.negated  # type: ignore[assignment]

    def negated(self, x: torch.Tensor) -> torch.Tensor:
        return -self.linear(x)


leaves = st.sampled_from(["linear", "tanh", "norm", "chosen"])
trees = st.recursive(leaves, lambda t: st.tuples(st.sampled_from(["pair", "chain", "shared"]), t, t), max_leaves=5)


def grow(tree: Any) -> nn.Module:
    if isinstance(tree, str):
        return {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "tanh": nn.Tanh,
            "norm": lambda: nn.LayerNorm(WIDTH),
            "chosen": Chosen,
        }[tree]()
    kind, left, right = tree
    one = grow(left)
    if kind == "shared":
        return Pair(one, one)
    return (Pair if kind == "pair" else nn.Sequential)(one, grow(right))


class Picture:
    """All of a model that has to be the same in the end."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.modules = list(model.modules())
        self.vars = [dict(vars(module)) for module in self.modules]
        self.inside = [
            {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}
            for module in self.modules
        ]
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.ids = [id(p) for p in model.parameters()]
        self.out = model(x).detach()

    def check(self, model: nn.Module, x: torch.Tensor) -> None:
        other = Picture(model, x)
        assert other.modules == self.modules and other.vars == self.vars and other.inside == self.inside
        assert list(other.state) == list(self.state) and other.ids == self.ids
        assert all(torch.equal(other.state[name], value) for name, value in self.state.items())
        torch.testing.assert_close(other.out, self.out)


class Machine(RuleBasedStateMachine):
    @initialize(tree=trees)
    def begin(self, tree: Any) -> None:
        self.x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
        torch.manual_seed(0)
        self.model = nn.Sequential(grow(tree))
        self.start = Picture(self.model, self.x)
        self.patches: list[thunderpatch.Patch] = []
        self.contexts: list[contextlib.AbstractContextManager[Any]] = []
        self.wrapped: list[tuple[nn.Module, Any, Any]] = []  # module, what was there, what was put on top
        self.hooks: list[Any] = []

    def pick(self, data: st.DataObject) -> nn.Module:
        modules = [module for module in self.model.modules() if module is not self.model]
        return modules[data.draw(st.integers(0, len(modules) - 1))]

    @rule(
        kinds=st.sets(st.sampled_from([nn.Linear, nn.Tanh, nn.LayerNorm, Chosen, Pair]), min_size=1),
        options=st.sampled_from([{}, {"fullgraph": True}]),
        nested=st.sampled_from(["outermost", "all"]),
    )
    def apply(self, kinds: set[type], options: dict[str, Any], nested: str) -> None:
        with contextlib.suppress(thunderpatch.SelectionError, thunderpatch.AlreadyPatchedError):
            self.patches.append(thunderpatch.apply(self.model, types=list(kinds), nested=nested, **options))

    @rule()
    def apply_to_the_model(self) -> None:
        with contextlib.suppress(thunderpatch.AlreadyPatchedError):
            self.patches.append(thunderpatch.apply(self.model))

    @rule(after=st.integers(0, 2))
    def apply_that_fails_half_way(self, after: int) -> None:
        before, real, seen = [dict(vars(m)) for m in self.model.modules()], registry.install, []

        def install(module: nn.Module, proxy: Any) -> None:
            if len(seen) == after:
                raise MemoryError
            seen.append(module)
            real(module, proxy)

        registry.install = install
        try:
            with contextlib.suppress(MemoryError, thunderpatch.AlreadyPatchedError):
                self.patches.append(thunderpatch.apply(self.model, where=lambda module, fqn: fqn != "", nested="all"))
                return
        finally:
            registry.install = real
        assert [dict(vars(m)) for m in self.model.modules()] == before

    @rule()
    def enter(self) -> None:
        context = thunderpatch.patched(self.model, where=lambda module, fqn: type(module) is nn.Linear or fqn == "")
        with contextlib.suppress(thunderpatch.AlreadyPatchedError):
            context.__enter__()
            self.contexts.append(context)

    @precondition(lambda self: self.contexts)
    @rule(error=st.sampled_from([None, KeyError()]))
    def leave(self, error: Exception | None) -> None:
        context = self.contexts.pop()
        given = (None, None, None) if error is None else (type(error), error, None)
        with self.quiet(), contextlib.suppress(KeyError):
            context.__exit__(*given)

    @precondition(lambda self: self.patches)
    @rule(data=st.data())
    def restore_by_handle(self, data: st.DataObject) -> None:
        with self.quiet():
            patch = self.patches[data.draw(st.integers(0, len(self.patches) - 1))]
            patch.restore()
        assert len(patch) == 0

    @rule()
    def restore(self) -> None:
        with self.quiet():
            thunderpatch.restore(self.model)
        assert not any(map(thunderpatch.is_patched, self.model.modules()))

    @rule(data=st.data())
    def wrap(self, data: st.DataObject) -> None:
        module = self.pick(data)
        below, had = module.forward, vars(module).get("forward")

        @functools.wraps(below)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return below(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        self.wrapped.append((module, had, forward))

    @precondition(lambda self: self.wrapped and vars(self.wrapped[-1][0]).get("forward") is self.wrapped[-1][2])
    @rule()
    def unwrap(self) -> None:
        module, had, _ = self.wrapped.pop()
        if had is None:
            del module.forward
        else:
            module.forward = had

    @rule(data=st.data())
    def hook(self, data: st.DataObject) -> None:
        self.hooks.append(self.pick(data).register_forward_hook(lambda module, args, out: None))

    @precondition(lambda self: self.hooks)
    @rule()
    def unhook(self) -> None:
        self.hooks.pop().remove()

    @rule()
    def copy_and_restore_the_copy(self) -> None:
        state = [thunderpatch.is_patched(m) for m in self.model.modules()]
        clone = copy.deepcopy(self.model)
        torch.testing.assert_close(clone(self.x), self.start.out)
        with self.quiet():
            thunderpatch.restore(clone)
        torch.testing.assert_close(clone(self.x), self.start.out)
        assert [thunderpatch.is_patched(m) for m in self.model.modules()] == state

    @rule()
    def disable(self) -> None:
        with thunderpatch.disabled(self.model):
            torch.testing.assert_close(self.model(self.x), self.start.out)

    @rule()
    def call(self) -> None:
        torch.testing.assert_close(self.model(self.x), self.start.out)

    @invariant()
    def keys_and_modules_stay(self) -> None:
        if hasattr(self, "start"):
            assert list(self.model.state_dict()) == list(self.start.state)
            assert list(self.model.modules()) == self.start.modules

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Restoring below somebody's wrapper is told, and expected here."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ThunderPatchWarning)
            yield

    def teardown(self) -> None:
        if not hasattr(self, "start"):
            return
        while self.wrapped:  # in order, as well-behaved libraries do; what is put back may be ours
            module, had, mine = self.wrapped.pop()
            if vars(module).get("forward") is mine:
                self.wrapped.append((module, had, mine))
                self.unwrap()
        while self.hooks:
            self.unhook()
        while self.contexts:
            self.leave(None)
        with self.quiet():
            thunderpatch.restore(self.model)
        self.start.check(self.model, self.x)


@pytest.mark.filterwarnings("ignore::thunderpatch.errors.ThunderPatchWarning")
class TestAnyOrder(Machine.TestCase):
    settings = settings(
        max_examples=12,
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
