"""Every selected module compiles: no count, shape or class mix, no state and no graph break drops one to eager."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo
from torch import nn

import thunderpatch
from thunderpatch import capture


@pytest.fixture(autouse=True)
def the_limit_is_an_error():
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    assert torch._dynamo.config.recompile_limit == 8


def every_call_compiled(model, calls=1):
    rows = {row.fqn: row for row in thunderpatch.report(model).rows}
    assert rows
    for row in rows.values():
        assert (row.calls, row.compiled_calls) == (calls, calls), row
    return rows


def compare(model, x, calls=1, **selectors):
    expected = model(x)
    with thunderpatch.patched(model, **selectors) as patch:
        for _ in range(calls):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        every_call_compiled(model, calls)
        return len(patch)


def test_64_linears_with_64_relus():
    model = nn.Sequential(*itertools.chain(*((nn.Linear(8, 8), nn.ReLU()) for _ in range(64))))
    assert compare(model, torch.randn(2, 8), types=[nn.Linear, nn.ReLU]) == 128


@pytest.mark.slow
def test_24_linears_of_24_shapes():
    sizes = range(3, 28)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    assert compare(model, torch.randn(2, 3), types=nn.Linear) == 24


ACTIVATIONS = [
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.CELU, nn.SELU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.Softplus),
    *(nn.Softsign, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink),
    *(nn.Softshrink, nn.Hardshrink),
]


def test_20_activation_classes_three_times_each():
    model = nn.Sequential(*(cls() for _ in range(3) for cls in ACTIVATIONS))
    assert compare(model, torch.randn(2, 8), types=ACTIVATIONS) == 60


class ListBlock(nn.Module):
    """Reads a list of tensors at its own number, as KV caches are read."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, x, cache):
        return self.linear(x) + cache[self.number]


class ConstantBlock(ListBlock):
    def forward(self, x, cache):
        return self.linear(x) * (1 + self.number / 64)


class BrokenListBlock(ListBlock):
    def forward(self, x, cache):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + cache[self.number]


class BrokenConstantBlock(ListBlock):
    def forward(self, x, cache):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x * (1 + self.number / 64)


class ListChild(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, cache):
        x = x.tanh()
        torch._dynamo.graph_break()
        return x + cache[self.number]


class ConstantChild(ListChild):
    def forward(self, x, cache):
        x = x.tanh()
        torch._dynamo.graph_break()
        return x * (1 + self.number / 64)


class ParentBlock(ListBlock):
    def __init__(self, number, child):
        super().__init__(number)
        self.child = child

    def forward(self, x, cache):
        return self.child(self.linear(x), cache) + 1


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.cache = [torch.full((8,), float(i)) for i in range(len(blocks))]

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.cache)
        return x


KINDS = {
    "list": lambda i: ListBlock(i),
    "constant": lambda i: ConstantBlock(i),
    "list, graph break": lambda i: BrokenListBlock(i),
    "constant, graph break": lambda i: BrokenConstantBlock(i),
    "list, graph break in a child": lambda i: ParentBlock(i, ListChild(i)),
    "constant, graph break in a child": lambda i: ParentBlock(i, ConstantChild(i)),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "list" else pytest.mark.slow) for k in KINDS])
def test_40_blocks_that_know_their_own_number(kind):
    model = Stack([KINDS[kind](i) for i in range(40)])
    assert compare(model, torch.randn(2, 8), calls=2, repeated=True) == 40


def test_40_blocks_that_read_a_list_cost_one_thunder_compilation():
    model = Stack([ListBlock(i) for i in range(40)])
    thunderpatch.apply(model, repeated=True)
    model(torch.randn(2, 8))
    model(torch.randn(2, 8))
    graphs = {id(graph) for block in model.blocks for graph in block.forward._self_record.graphs}
    assert len(graphs) == 2  # the first block's input needs no gradient, the others' do


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.linear(x))


def test_one_block_through_all_its_states():
    model, threads = Block(), torch.get_num_threads()
    thunderpatch.apply(model)
    count = 0
    try:
        for train, grad, rg, n, batch in itertools.product(
            (True, False), (True, False), (True, False), (1, 2), (1, 2, 3, 5, 8, 13)
        ):
            torch.set_num_threads(n)
            model.train(train).requires_grad_(rg)
            x = torch.randn(batch, 4)
            with torch.set_grad_enabled(grad):
                result = model(x)
                if train:  # thunder draws dropout masks in its own way; a kept element is scaled by 1 / 0.9
                    kept = result != 0
                    torch.testing.assert_close(result[kept] * 0.9, model.linear(x)[kept])
                else:
                    torch.testing.assert_close(result, model.linear(x))
                assert result.requires_grad == (grad and rg)
            count += 1
    finally:
        torch.set_num_threads(threads)
    every_call_compiled(model, count)


def graphs_of(model):
    return {id(g) for m in model.modules() if thunderpatch.is_patched(m) for g in m.forward._self_record.graphs}


def test_32_equal_blocks_cost_one_graph_and_two_where_the_first_input_needs_no_gradient():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(32)))
    x = torch.randn(2, 8)
    with thunderpatch.patched(model, repeated=True), torch.no_grad():
        model(x)
        assert len(graphs_of(model)) == 1
    with thunderpatch.patched(model, repeated=True):
        model(x).sum().backward()
        assert len(graphs_of(model)) == 3  # the one of no_grad is still known


def compiled_graphs(model):
    return {
        id(m.forward._self_record.compiler): m.forward._self_record.compiler.compiled
        for m in model.modules()
        if thunderpatch.is_patched(m)
    }


def test_entering_a_hundred_times_and_a_second_model_compile_nothing_more():
    first, second = (nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2))
    x = torch.randn(2, 5)
    with thunderpatch.patched(first, types=[nn.Linear, nn.Tanh]):
        first(x)
        before = compiled_graphs(first)
    for _ in range(100):
        with thunderpatch.patched(first, types=[nn.Linear, nn.Tanh]):
            first(x)
            assert compiled_graphs(first) == before
    with thunderpatch.patched(second, types=[nn.Linear, nn.Tanh]):
        second(x)
        assert compiled_graphs(second) == before


def test_classes_whose_numbers_differ_do_not_turn_them_into_symbols():
    model = nn.Sequential(nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.Hardtanh(-1, 1), nn.Hardtanh(-2, 2), nn.ReLU6())
    compare(model, torch.randn(2, 8), types=[nn.LeakyReLU, nn.Hardtanh])


def test_1000_equal_modules():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1000)))
    with torch.no_grad():
        assert compare(model, torch.randn(2, 4), types=nn.Linear) == 1000


def test_a_forward_that_is_set_is_found_among_constants_of_any_kind() -> None:
    old = (lambda: "x").__code__
    new = old.replace(co_consts=(*old.co_consts, {"of": "a graph break"}, torch.ones(2)))
    assert not capture._sets_a_forward(new, old)
    sets = new.replace(co_consts=(*new.co_consts, "forward"))
    assert capture._sets_a_forward(sets, old) and not capture._sets_a_forward(sets, sets)
