"""What forwards do in models that people wrote: modes, hooks, loops, numbers returned, errors caught, odd classes."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import ran
from torch import nn

import thunderpatch
from thunderpatch.reports import Status


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def patched_copy(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    thunderpatch.apply(twin)
    return twin


def step(module: nn.Module, *args: Any) -> list[torch.Tensor | None]:
    """Return the output, the gradients of tensor arguments and those of parameters, after one backward."""
    module.zero_grad()
    given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = module(*given)
    out.square().sum().backward()
    return [
        out.detach(),
        *(a.grad for a in given if isinstance(a, torch.Tensor)),
        *(p.grad for p in module.parameters()),
    ]


def test_what_a_forward_computes_in_inference_mode_is_an_inference_tensor_at_any_size() -> None:
    class Mixed(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.inference_mode():
                seen = self.linear(x)
            return seen, self.linear(x)

    class Whole(Linear):
        @torch.inference_mode()
        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x), x

    for module in (Mixed(), Whole()):
        twin = patched_copy(module)
        for rows in (2, 3, 4, 5):
            want, got = module(torch.ones(rows, 4)), twin(torch.ones(rows, 4))
            torch.testing.assert_close(got, want)
            assert [t.is_inference() for t in got] == [t.is_inference() for t in want]
        row = thunderpatch.report(twin)[""]
        assert row.status is Status.ROUTED and "inference" in row.reason


@pytest.mark.parametrize("place", ["input", "middle", "output"])
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_a_forward_puts_on_a_tensor_changes_the_gradient(place: str, late: bool) -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if place == "input":
                x.register_hook(lambda grad: grad * 3)
            y = self.up(x)
            if place == "middle" and not late:
                y.register_hook(lambda grad: grad * 3)
            z = self.down(y.relu())
            if place == "middle" and late:  # when it has been used already
                y.register_hook(lambda grad: grad * 3)
            if place == "output":
                z.register_hook(lambda grad: grad * 3)
            return (z + y) if late else z

    module, x = Hooked(), torch.randn(2, 4)
    twin = patched_copy(module)
    for _ in range(2):
        torch.testing.assert_close(step(twin, x), step(module, x))
    assert thunderpatch.report(twin)[""].status in (Status.COMPILED, Status.PARTLY, Status.ROUTED)


def test_an_error_that_the_forward_itself_catches_is_no_failure() -> None:
    class Careful(Linear):
        def forward(self, x: torch.Tensor, narrow: bool = False) -> Any:
            if narrow:
                try:
                    return self.linear(x[:, :2])
                except RuntimeError:
                    return -self.linear(x)
            return self.linear(x)

    module, x = Careful(), torch.randn(2, 4)
    twin = patched_copy(module)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", thunderpatch.ThunderPatchWarning)
        for narrow in (False, True, True, False, True, False):
            torch.testing.assert_close(twin(x, narrow), module(x, narrow))
    row = thunderpatch.report(twin)[""]
    # Dynamo traces the handler too from torch 2.15 on.
    assert row.compiled_calls == 6 or any("Dynamo cannot trace it" in str(warning.message) for warning in said)


def test_numbers_among_the_outputs_are_those_of_each_call() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, scale: float) -> Any:
            rows = x.shape[0]
            return rows * 2, x * scale, scale * 2, (x.sum(0), x.numel()), math.sqrt(scale)

    module = Counts()
    twin = patched_copy(module)
    for rows in range(2, 15):  # more than are compiled one by one
        want, got = module(torch.ones(rows, 3), rows / 3), twin(torch.ones(rows, 3), rows / 3)
        torch.testing.assert_close(got, want)
        assert [type(value) for value in got] == [type(value) for value in want]
    assert thunderpatch.report(twin)[""].compiled_calls == 13


def test_a_forward_may_keep_sizes_and_counts_on_itself_and_in_what_it_is_given() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles: torch.Tensor | None = None
            self.length = 0

        def forward(self, x: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
            length = x.shape[1]
            if self.angles is None or length > self.length:
                self.angles, self.length = torch.arange(length, dtype=x.dtype).cos(), length
            seen["calls"] = seen.get("calls", 0) + 1
            seen.setdefault("sums", []).append(x.sum())
            return x * self.angles[:length, None] + seen["calls"]

    module = Remembers()
    twin = patched_copy(module)
    wanted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for length in (4, 3, 8, 5, 9, 2, 11):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(twin(x, found), module(x, wanted))
        assert twin.length == module.length
    torch.testing.assert_close(found, wanted)


def test_a_loop_over_tensors_is_compiled_with_the_rest() -> None:
    class Powers(Linear):
        def forward(self, x: torch.Tensor) -> Any:
            start = (torch.tensor(0), self.linear(x).detach())
            count, y = torch._higher_order_ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), start)
            return count, y.relu()

    module, x = Powers(), torch.randn(2, 4)
    twin = patched_copy(module)
    torch.testing.assert_close(twin(x), module(x))
    assert thunderpatch.report(twin)[""].compiled_calls == 1


def _row_set(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = x[1] * 2
    return y


def _column_raised(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1] += 1
    return y


def _row_set_and_column_raised(x: torch.Tensor) -> torch.Tensor:
    y = _row_set(x)
    y[:, 1] *= x[:, 0]
    return y


def _row_raised_by_a_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0] += x[1]
    return y.sin()


@pytest.mark.parametrize("function", [_row_set, _column_raised, _row_set_and_column_raised, _row_raised_by_a_row])
@pytest.mark.parametrize("grad", [True, False])
def test_a_part_of_a_tensor_that_is_changed_in_place_keeps_its_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], grad: bool
) -> None:
    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    twin = patched_copy(Changes())
    for _ in range(2):
        x = torch.randn(3, 3, requires_grad=grad)
        other = x.detach().clone().requires_grad_(grad)
        got, want = twin(x), function(other)
        torch.testing.assert_close(got, want)
        if grad:
            got.square().sum().backward()
            want.square().sum().backward()
            torch.testing.assert_close(x.grad, other.grad)


def test_nested_tensors_of_any_lengths_run_as_captured_and_the_report_says_so() -> None:
    module = nn.Linear(4, 4)
    twin = patched_copy(module)
    for lengths in ([2, 3], [4, 1], [1, 1, 5]):
        x = torch.nested.nested_tensor([torch.randn(length, 4) for length in lengths], layout=torch.jagged)
        torch.testing.assert_close(twin(x).values(), module(x).values())
    row = thunderpatch.report(twin)[""]
    assert row.status is Status.ROUTED and row.calls == 3


class Stubborn(Linear):
    """Takes no attributes once it is made, and lets none go."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["ready"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("ready"):
            raise AttributeError("frozen")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError("frozen")


class Incomparable(Linear):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = nn.Module.__hash__


class Empty(Linear):
    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False


class Delegating(Linear):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)


@pytest.mark.parametrize("cls", [Stubborn, Incomparable, Empty, Delegating])
def test_a_class_with_ways_of_its_own_is_patched_and_restored(cls: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(cls(), cls()), torch.randn(2, 4)
    want, before = model(x), [dict(vars(module)) for module in model]
    assert len(thunderpatch.apply(model, types=Linear)) == 2
    torch.testing.assert_close(model(x), want)
    assert all(row.compiled_calls == 1 for row in thunderpatch.report(model).rows)
    assert thunderpatch.restore(model) == 2
    assert [list(vars(module)) for module in model] == [list(names) for names in before]


class Rotary(nn.Module):
    """Positions as a rotation in the complex plane, of pairs of real numbers that are a view of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, _, width = x.shape[-3:]
        frequencies = 1.0 / 100 ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        turned = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turned).flatten(-2)


@pytest.mark.parametrize("grad", [False, True])
def test_positions_turn_pairs_of_numbers_in_the_complex_plane(grad: bool) -> None:
    model, x = nn.Sequential(Rotary()), torch.randn(2, 5, 2, 4, requires_grad=grad)
    want = model(x)
    thunderpatch.apply(model, types=Rotary)
    out = model(x)
    torch.testing.assert_close(out, want)
    if grad:
        torch.testing.assert_close(*(torch.autograd.grad(each.sin().sum(), x) for each in (out, want)))


class From(nn.Module):
    """A window that begins where a tensor says."""

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, start, 2) * 2


def test_a_window_begins_where_a_tensor_says_at_each_call() -> None:
    module, x = From(), torch.randn(3, 6, requires_grad=True)
    thunderpatch.apply(module)
    for start in (2, 0, 4):
        out = module(x, torch.tensor(start))
        torch.testing.assert_close(out, x[:, start : start + 2] * 2)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad.sum(0), torch.tensor([6.0 * (start <= k < start + 2) for k in range(6)]))
    (row,) = thunderpatch.report(module).rows
    assert row.compiled_calls == row.calls == 3


class Neighbours(nn.Module):
    """The mean over a node's neighbours in a graph; how many there are needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = self.linear(x[edges[0]])
        total = torch.zeros_like(x).scatter_add(0, edges[1][:, None].expand_as(messages), messages)
        count = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
        return total / count[:, None]


def test_a_mean_over_neighbours_trains_as_in_eager() -> None:
    model, x = nn.Sequential(Neighbours()), torch.randn(5, 3, requires_grad=True)
    edges = torch.randint(0, 5, (2, 9))
    want = model[0](x, edges)
    wanted = torch.autograd.grad(want.sin().sum(), [x, *model.parameters()])
    thunderpatch.apply(model, types=Neighbours)
    out = model[0](x, edges)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), [x, *model.parameters()]), wanted)
    ran(model, 1)


class Cache(nn.Module):
    """Writes what it computes into slices of a buffer, by a name for the slice that another part of the graph gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(2, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.kept[:, : x.shape[1]].copy_(h.detach())
        self.kept.narrow(1, 0, 1).mul_(0.5)
        return self.kept.sum(1) + h.sum(1)


@pytest.mark.parametrize("grad", [False, True])
def test_slices_of_a_buffer_are_written_as_in_eager(grad: bool) -> None:
    model = nn.Sequential(Cache())
    twin = copy.deepcopy(model)
    thunderpatch.apply(model, types=Cache)
    with torch.set_grad_enabled(grad):
        for length in (3, 4):
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(model(x), twin(x))
            torch.testing.assert_close(model[0].kept, twin[0].kept)
    ran(model, 2)
