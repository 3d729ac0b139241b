"""torch.compile without graph breaks, static and dynamic, and torch.export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn

from cunorm.torch import GroupNorm, InstanceNorm2d, LayerNorm, RMSNorm, functional
from tests.torch.cases import CAN_INDUCE, CASES, COMPILER_WARNINGS, SHAPE, Case, close, exact, random, tensors

ALL = pytest.mark.parametrize("case", CASES, ids=str)
pytestmark = pytest.mark.filterwarnings(*COMPILER_WARNINGS)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def everything(x: Any, w: Any, b: Any, w2: Any, b2: Any) -> Any:
    """All four norms after each other."""
    y = functional.group_norm(x, 4, w, b, activation="silu")
    y = functional.instance_norm(y, weight=w, bias=b)
    y = functional.layer_norm(y, y.shape[-1:], w2, b2)
    return functional.rms_norm(y, y.shape[-1:], w2)


def given(shape: Any, layout: Any = torch.contiguous_format) -> list[Any]:
    x = random(shape).to(memory_format=layout)
    return [one.detach().requires_grad_() for one in (x, *(random((n,), seed=n) for n in (8, 8, 5, 5)))]


def agree(compiled: Any, plain: Any, tensors: list[Any]) -> None:
    """Assert that both functions and their gradients have the same values."""
    results = []
    for function in (compiled, plain):
        y = function(*tensors)
        results.append((y, *torch.autograd.grad(y, tensors, random(y.shape))))
    close(*results, factor=2)
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_aot_eager(layout: Any) -> None:
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    agree(compiled, everything, given(SHAPE, layout))


def test_dynamic_shapes_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, fullgraph=True, backend=counter, dynamic=True)
    counts = set()
    for shape in (SHAPE, (3, 8, 4, 5), (5, 8, 2, 5)):
        agree(compiled, everything, given(shape))
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.skipif(not CAN_INDUCE, reason="Inductor needs g++ and Python.h")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_inductor(dynamic: bool) -> None:
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic)
    for shape in (SHAPE, (3, 8, 4, 5))[: 1 + dynamic]:
        agree(compiled, everything, given(shape, torch.channels_last))


def test_what_is_copied_or_converted_compiles() -> None:
    def function(x: Any, w: Any) -> Any:
        return functional.group_norm(x.transpose(1, 2), 4, w.half())

    x, w = random((2, 3, 8, 5)).requires_grad_(), random((8,)).requires_grad_()
    agree(torch.compile(function, fullgraph=True, backend="aot_eager"), function, [x, w])


def test_what_is_left_to_torch_compiles() -> None:
    def function(x: Any) -> Any:
        return functional.layer_norm(x, (3,))

    x = random((2, 1, 1, 1, 2, 1, 1, 1, 3)).requires_grad_()
    agree(torch.compile(function, fullgraph=True, backend="aot_eager"), function, [x])


def small() -> nn.Module:
    """A module of every norm."""
    torch.manual_seed(0)
    norms = (GroupNorm(4, 8, activation="silu"), InstanceNorm2d(8, affine=True), LayerNorm((3, 5)), RMSNorm((3, 5)))
    return nn.Sequential(nn.Conv2d(8, 8, 1), *norms)


def test_modules_compile_under_autocast() -> None:
    model = small()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(random(SHAPE)), model(random(SHAPE))
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected, torch.bfloat16)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model = small()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (random(SHAPE),), dynamic_shapes=({0: batch},), strict=strict)
    graphs = [one for one in exported.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    names = {str(node.target) for one in graphs for node in one.graph.nodes}
    assert {f"cunorm.{case.options.name}.default" for case in CASES} <= names
    x = random((5, *SHAPE[1:]))
    close(exported.module()(x), model(x))
    parameters = [dict(one.named_parameters()) for one in (model, exported.module())]
    gradients = []
    for function, named in zip((model, exported.module()), parameters, strict=True):
        wanted = [dict(function.named_parameters())[name] for name in sorted(named)]
        gradients.append(torch.autograd.grad(function(x).pow(3).sum(), wanted))
    close(*gradients, factor=10)


@ALL
def test_compiled_per_sample_gradients(case: Case) -> None:
    x, *parameters = (one.detach() for one in tensors(case, shape=(3, *SHAPE)))
    gradient = torch.func.grad(lambda x, *p: case.mine(x, *p).pow(3).sum(), 1)
    function = torch.func.vmap(gradient, (0, *[None] * len(parameters)))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(compiled(x, *parameters), function(x, *parameters), factor=5)


@ALL
def test_compiled_autograd(case: Case) -> None:
    tensors_, dy = tensors(case), random(SHAPE)
    y = case.mine(*tensors_)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        y.backward(dy)
    close(tuple(one.grad for one in tensors_), exact(case, tensors_, dy)[1:])
