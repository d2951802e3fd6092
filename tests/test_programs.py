"""Programs that nobody wrote: views, changes in place, parts outside thunder, with gradients and without."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from conformance.routes import without_code
from hypothesis import HealthCheck, Phase, assume, given, settings
from programs import Program, finite, programs, shown
from torch import nn

import thunderpatch

# Each was wrong in silence, or raised, before it was found like this.
FOUND = {
    "two changes in a row": Program(("v1 = x.square()", "v1.exp_()", "v1 += 1"), ("v1",), ""),
    "three, two of them under no_grad": Program(
        ("v1 = torch.tanh(x)", "with torch.no_grad(): v1.exp_()", "v1 += 1", "with torch.no_grad(): y.cumsum_(0)"),
        ("v1", "y"),
        recorded=False,
        graded="",
    ),
    "one tensor under two names in a part": Program(
        ("v1 = x.view_as(x)", "v2 = x + self.weight.sum()", "v3 = torch.add(v1, x, alpha=2)"), ("v3", "v2"), "x"
    ),
    "grad mode after a part in inductor": Program(
        ("v1 = x.square()", "v2 = torch.zeros(4)", "with torch.no_grad(): v2.fill_(0.3)"), ("v1", "v2"), "x"
    ),
    "a history that is overwritten": Program(("v1 = y + y", "v2 = x * y", "v2.copy_(v1)"), ("v2",), "x"),
    "a conversion to its own type": Program(
        ("v1 = y.type_as(y)", "with torch.no_grad(): v1.abs_()", "y.add_(y)", "v2 = v1.to(torch.float32)"), ("v2",), "x"
    ),
    "an output under two names": Program(
        ("v1 = x * x", "v2 = v1.float()", "v3 = v2 * self.weight"), ("v1", "v2", "v3"), ""
    ),
    "a changed input and its view in two parts": Program(
        ("v1 = x.t()", "y[0] = y[0]", "x.clamp_(max=0.4)", "v2 = v1 * self.count"), ("x", "v2"), "", False
    ),
    "parts of an input, changed twice": Program(
        ("v1 = y.squeeze()", "v2 = y.chunk(2, -1)[1]", "v2.abs_()", "v2.index_fill_(0, torch.tensor([0]), 0.7)"),
        ("v2", "y", "v1"),
        "",
        False,
    ),
    "a write to an expanded tensor": Program(("v1 = x.expand(2, *x.shape)", "v1[0] = 0.5"), ("y", "x"), "", False),
    "a write to an unfolded tensor": Program(("v1 = y.unfold(0, 2, 1)", "v1.clamp_(max=0.4)"), ("x", "y"), "", False),
    "a change that nobody reads": Program(("v1 = torch.zeros(y.shape)", "v1[0] = 0.5", "v2 = y * 2"), ("v2",), "x"),
    "a change that only what nobody reads reads": Program(
        ("v1 = x.relu()", "v1.zero_()", "v2 = v1.sin()", "v3 = self.weight * 1"), ("v3",), "", False
    ),
    "statistics of what nobody reads": Program(("v1 = self.norm(x + 1)", "v2 = self.weight * 2"), ("v2",), ""),
    "turned round in place": Program(("v1 = x.float() * 1", "v1.t_()", "v2 = v1.flatten()"), ("v2", "v1"), ""),
    "with a dimension more, in place": Program(
        ("v1 = y.transpose(0, 1)", "v1.unsqueeze_(0)", "v2 = v1 * 2"), ("v2",), ""
    ),
}
EXAMPLES = int(os.environ.get("THUNDERPATCH_PROGRAMS", 60))
# To shrink what fails takes minutes: not where nobody looks for it.
PHASES = [Phase.explicit, Phase.generate] if EXAMPLES == 60 else list(Phase)


def check(program: Program, wanted: list[Any], module: nn.Module) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", thunderpatch.ThunderPatchWarning)
        thunderpatch.apply(module)
        got = shown(module, program)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, msg=lambda why: f"{program.source}\n{why}")


@pytest.fixture(autouse=True, scope="module")
def _no_code() -> object:
    """All of inductor but the compiler of C++, which takes nine tenths of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile", without_code)
        yield


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_right_now(name: str) -> None:
    program = FOUND[name]
    module = program.module()
    wanted = shown(copy.deepcopy(module), program)
    assert finite(wanted)
    check(program, wanted, module)


@settings(
    max_examples=EXAMPLES,
    phases=PHASES,
    deadline=None,
    derandomize=EXAMPLES == 60,
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_a_patched_program_does_what_eager_does(program: Program) -> None:
    module = program.module()
    try:
        wanted = shown(copy.deepcopy(module), program)
    except Exception:
        assume(False)  # eager refuses it
    assume(finite(wanted))
    check(program, wanted, module)
