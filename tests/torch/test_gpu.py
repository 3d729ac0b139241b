"""cunorm.torch on a GPU: values, streams, memory, graphs."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import cunorm.torch as ct
from tests.torch.cases import (
    CAN_INDUCE,
    CASES,
    CHANNELS,
    COMPILER_WARNINGS,
    SHAPE,
    TOLERANCES,
    Case,
    close,
    exact,
    no_waiting,
    random,
    tensors,
)

pytestmark = pytest.mark.gpu
ALL = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def on_gpu(case: Case, dtype: Any = torch.float32, layout: Any = torch.contiguous_format) -> list[Any]:
    x, *parameters = (one.detach().cuda() for one in tensors(case, dtype))
    return [one.requires_grad_() for one in (x.to(memory_format=layout), *parameters)]


@ALL
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_values_and_gradients(case: Case, dtype: Any) -> None:
    given, dy = on_gpu(case, dtype), random(SHAPE, dtype).cuda()
    y = case.mine(*given)
    close((y, *torch.autograd.grad(y, given, dy)), exact(case, given, dy), dtype)


@pytest.mark.parametrize("case", CHANNELS, ids=str)
def test_channels_last(case: Case) -> None:
    given, dy = on_gpu(case, layout=torch.channels_last), random(SHAPE).cuda()
    y = case.mine(*given)
    assert y.stride() == given[0].stride()
    close((y, *torch.autograd.grad(y, given, dy)), exact(case, given, dy))


@ALL
def test_nothing_waits(case: Case) -> None:
    given, dy = on_gpu(case), random(SHAPE).cuda()
    torch.autograd.grad(case.mine(*given), given, dy)  # compiles
    with no_waiting():
        torch.autograd.grad(case.mine(*given), given, dy)


@ALL
def test_forward_and_backward_run_on_the_current_stream(case: Case) -> None:
    """A long kernel on a side stream writes x first: on another stream the norm would read what was there before."""
    given, dy = on_gpu(case), random(SHAPE).cuda()
    expected = exact(case, given, dy)
    torch.autograd.grad(case.mine(*given), given, dy)
    x = torch.zeros_like(given[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(given[0].detach())
        x.requires_grad_()
        y = case.mine(x, *given[1:])
        found = torch.autograd.grad(y, (x, *given[1:]), dy)
    side.synchronize()
    close((y, *found), expected)


@ALL
def test_capture_and_replay(case: Case) -> None:
    given, dy = on_gpu(case), random(SHAPE).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(case.mine(*given), given, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.mine(*given)
        found = torch.autograd.grad(y, given, dy)
    with torch.no_grad():
        for seed, one in enumerate(given):
            one.copy_(random(one.shape, seed=20 + seed))
    graph.replay()
    torch.cuda.synchronize()
    close((y, *found), exact(case, given, dy))


def least_allocated() -> int:
    """Least bytes that torch has allocated in half a second: the thread of a backward frees its last tensor late."""
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        found.append(int(torch.cuda.memory_allocated()))
        time.sleep(0.01)
    return min(found)


@ALL
def test_memory_is_returned(case: Case) -> None:
    """Results and workspaces come from torch's allocator, and nothing keeps them."""
    given, dy = on_gpu(case), random(SHAPE).cuda()
    torch.autograd.grad(case.mine(*given), given, dy)
    before = least_allocated()
    for _ in range(5):
        torch.autograd.grad(case.mine(*given), given, dy)
    assert least_allocated() == before


def test_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = random(SHAPE).to("cuda:1")
    close(ct.functional.group_norm(x, 4), torch.nn.functional.group_norm(x, 4))
    assert torch.cuda.current_device() == 0


def test_no_samples_and_mixed_devices() -> None:
    x = random((0, *SHAPE[1:])).cuda().requires_grad_()
    weight = torch.ones(8, device="cuda", requires_grad=True)
    ct.functional.group_norm(x, 4, weight).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    with pytest.raises(RuntimeError):
        ct.functional.group_norm(random(SHAPE).cuda(), 4, torch.ones(8))


@ALL
def test_autocast_keeps_the_dtype_of_x(case: Case) -> None:
    x, *parameters = on_gpu(case)
    low, dy = x.detach().half().requires_grad_(), random(SHAPE, torch.float16).cuda()
    with torch.autocast("cuda", torch.float16):
        y = case.mine(low, *parameters)
    found = torch.autograd.grad(y, (low, *parameters), dy)
    assert [one.dtype for one in (y, *found)] == [torch.float16] * 2 + [torch.float32] * len(parameters)
    close((y, *found), exact(case, (low, *parameters), dy), torch.float16)


@pytest.mark.skipif(not CAN_INDUCE, reason="Inductor and Triton need g++ and Python.h")
@pytest.mark.filterwarnings(*COMPILER_WARNINGS)
def test_a_compiled_model_with_graphs() -> None:
    """In float64, because convolutions of float32 may use TF32. The first calls compile and capture."""
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), ct.GroupNorm(4, 8, activation="silu")).cuda().double()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    weights = list(model.parameters())
    for seed in range(4):
        x, dy = (random(SHAPE, torch.float64, seed=seed + more).cuda() for more in (0, 10))
        results = []
        for one in (model, compiled):
            y = one(x)
            results.append((y, *torch.autograd.grad(y, weights, dy)))
        close(*results[::-1], torch.float64, factor=100)
