"""What a saved reproducer does with its graph: this text is a part of each script, and knows torch and thunder only."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
# How far from eager a value may be, relative to the largest, where float64 does not tell.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 6e-2, torch.float64: 4e-7, torch.complex128: 4e-7}
FACTOR = 8.0  # and as a multiple of eager's own error against float64


def tensor(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool = False,
    leaf: bool = True,
    parameter: bool = False,
    positive: bool = False,
) -> torch.Tensor:
    """Return an input of that kind: random floats, integers that are 0, which is valid as an index, booleans True."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if not (dtype.is_floating_point or dtype.is_complex):
        fill = torch.ones if dtype == torch.bool else torch.zeros
        return fill(size, dtype=dtype, device=device).as_strided(shape, stride)
    base = torch.rand(size) + 0.5 if positive else torch.randn(size)
    if parameter and len(shape) > 1:  # as layers are initialised: what comes out is as large as what goes in
        base /= max(1, torch.Size(shape[1:]).numel()) ** 0.5
    value = base.to(device, dtype).as_strided(shape, stride)
    if parameter:
        return torch.nn.Parameter(value, requires_grad)
    value.requires_grad_(requires_grad)
    return value if leaf else value.clone()


def copied(value: Any) -> Any:
    """Return a copy of an input that nothing written to it will change; of the same strides, without history."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or 0 in value.shape:
        copy = value.detach().clone()
    else:
        span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        copy = value.detach().as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())
    return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy


def import_thunder() -> Any:
    """Import thunder, with the names that it lists at import and this torch no longer has lent to it until then."""
    names = ("align_as", "align_to", "has_names", "refine_names", "rename")
    lent = [name for name in names if not hasattr(torch.Tensor, name)]
    function: Any = torch.autograd.Function
    apply = None if hasattr(function.apply, "__func__") else vars(function).get("apply")
    for name in lent:
        absent = types.FunctionType((lambda self, *args: None).__code__, {}, name)
        setattr(torch.Tensor, name, absent)
    if apply is not None:
        function.apply = classmethod(lambda cls, *args: apply.__get__(None, cls)(*args))
    try:
        import thunder.dynamo
    finally:
        for name in lent:
            delattr(torch.Tensor, name)
        if apply is not None:
            function.apply = apply
    return thunder


def thunder_backend(options: dict[str, Any]) -> Any:
    """Return thunder's backend of torch.compile, which does not work with FX's lazy graph modules (torch >= 2.12)."""
    backend = import_thunder().dynamo.ThunderCompiler(**options)
    lazy: Any = getattr(torch.fx, "_lazy_graph_module", None)

    def call(gm: Any, inputs: Any) -> Any:
        with lazy._use_lazy_graph_module(False) if lazy else contextlib.nullcontext():
            return backend(gm, inputs)

    call.compiler = backend  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def surroundings(grad: bool, dtype: torch.dtype, deterministic: bool, precision: str, autocast: Any) -> Iterator[None]:
    """Set what was set when the graph was captured. Defaults are not put back: the script ends with this."""
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, autocast_dtype in autocast.items():
            stack.enter_context(torch.autocast(kind, autocast_dtype))
        yield


def run(call: Callable[..., Any], inputs: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Return outputs, gradients and what the inputs are afterwards, by name; and whether random numbers were drawn."""
    given, leaves = [], {}
    for i, value in enumerate(inputs):
        copy = copied(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            leaves[f"input {i}"] = copy.requires_grad_()
            # What was no leaf in the model is none here: in-place operations tell the difference.
            copy = copy if value.is_leaf else copy.clone()
        given.append(copy)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    results = pytree.tree_leaves(call(*given))
    drew = not torch.equal(before, torch.get_rng_state())
    found = {f"output {i}": result for i, result in enumerate(results)}
    roots = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
    if roots and leaves:
        torch.manual_seed(2)
        starts = [torch.randn(root.shape, dtype=torch.float64).to(root.device, root.dtype) for root in roots]
        gradients = torch.autograd.grad(roots, list(leaves.values()), starts, allow_unused=True)
        found |= {f"gradient of {name}": value for name, value in zip(leaves, gradients, strict=True)}
    found |= {f"input {i} afterwards": value for i, value in enumerate(given)}
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}, drew


def in_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    wide = copied(value).detach().double().requires_grad_(value.requires_grad)
    return wide if value.is_leaf else wide.clone()


def difference(expected: Any, got: Any, exact: Any) -> str:
    """Return in words how far `got` is from `expected`; nothing where that is rounding."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if expected is got or expected == got else f"is {type(got).__name__}, not {type(expected).__name__}"
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"is {got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    want, have = expected.to(wide), got.to(wide)
    finite = want.isfinite() & have.isfinite()
    if not torch.equal(want[~finite].nan_to_num(), have[~finite].nan_to_num()):
        return "is not finite in other places"
    off = (want - have)[finite].abs().max().item() if finite.any() else 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"differs in {int((want != have).sum())} elements" if off else ""
    allowed = TOLERANCE.get(expected.dtype, 5e-6) * (want[finite].abs().max().item() if finite.any() else 0.0)
    if isinstance(exact, torch.Tensor) and exact.shape == want.shape and finite.any():
        allowed = max(allowed, FACTOR * (want - exact.to(wide))[finite].nan_to_num().abs().max().item())
    return f"is off by {off:.1e}, allowed {allowed:.1e}" if off > allowed else ""


def compare(graph: Any, inputs: Sequence[Any], options: dict[str, Any], inductor: dict[str, Any]) -> int:
    """Run the graph eager and through thunder, forward and backward; print what differs and return the exit status."""
    try:
        expected, drew = run(graph, inputs)
    except Exception as error:
        print(f"eager itself raises on these inputs: {type(error).__name__}: {error}")
        return UNUSABLE
    exact: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # where the graph names a dtype, float64 may not fit
        exact = {} if drew else run(graph, [in_float64(value) for value in inputs])[0]
    backend = thunder_backend(options)
    try:
        with torch._inductor.config.patch(inductor):
            got, _ = run(torch.compile(graph, backend=backend, dynamic=False), inputs)
    except Exception as error:
        print(f"thunder raises where eager does not: {type(error).__name__}: {error}")
        return DIFFERENT
    infos = backend.compiler.subgraph_infos
    kinds = [part.compiler.name for info in infos for part in info.submodule_to_compiled_functions.values()]
    if not kinds:
        print("Dynamo handed nothing to thunder: the graph has no operations")
        return UNUSABLE
    thunder = kinds.count("THUNDER")
    print(f"{thunder} partitions by thunder, {len(kinds) - thunder} by inductor")
    if drew:
        print("the graph draws random numbers, which thunder does in another way: values are not compared")
        return EQUAL
    found = {name: difference(expected[name], got.get(name), exact.get(name)) for name in expected}
    found = {name: words for name, words in found.items() if words}
    for name, words in found.items():
        print(f"{name} {words}")
    print(f"{len(found)} of {len(expected)} values differ" if found else f"all {len(expected)} values agree")
    return DIFFERENT if found else EQUAL
