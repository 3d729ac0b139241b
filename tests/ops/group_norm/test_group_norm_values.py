"""Values that break careless formulas: offsets, constants, outliers, NaN and infinity; and sizes past 2^31."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.group_norm.test_group_norm import TILES, Case, tile_of
from tests.support.problems import sparse

STRATEGIES = list(TILES)
#: A shape that the strategy accepts with parameter gradients, with 64 or more channels.
SHAPE = {**dict.fromkeys(STRATEGIES, (2, 64, (5, 9), 8)), "warp": (40, 64, (), 2)}


def uncentred_dgamma(dy: np.ndarray, x: np.ndarray, mean: np.ndarray, rstd: np.ndarray) -> np.ndarray:
    """The formula that cunorm must not use: rstd * (sum dy * x - mean * sum dy), in float32."""
    N, C = x.shape[:2]
    groups = mean.shape[1]
    dy, x = (a.reshape(N, C, -1).astype(np.float32) for a in (dy, x))
    per_channel = (np.repeat(a, C // groups, axis=1) for a in (mean, rstd))
    m, r = per_channel
    return (r * ((dy * x).sum(-1, dtype=np.float32) - m * dy.sum(-1, dtype=np.float32))).sum(0, dtype=np.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_sums_are_centred(strategy: str, executor: Executor) -> None:
    """x offset by 1e3 with unit spread: dgamma within 1e-6 of sum |dy * xhat| in every channel."""
    case = Case(*SHAPE[strategy], "float32", offset=1e3)
    mean, rstd = case.statistics()
    arrays = (case.dy, case.x, mean, rstd, case.gamma)
    _, dgamma, _ = cunorm.group_norm_backward(
        *map(executor.put, arrays), num_groups=case.groups, tile=tile_of(strategy, "backward")
    )
    exact = reference.group_norm_backward(*arrays, num_groups=case.groups)[1]
    N, C = case.x.shape[:2]
    m, r = (np.repeat(a.astype(np.float64), C // case.groups, axis=1)[:, :, None] for a in (mean, rstd))
    xhat = (case.x.reshape(N, C, -1).astype(np.float64) - m) * r
    allowed = 1e-6 * np.abs(case.dy.reshape(N, C, -1) * xhat).sum(axis=(0, 2))
    assert C >= 64
    assert np.all(np.abs(executor.get(dgamma) - exact) <= allowed)
    careless = uncentred_dgamma(case.dy, case.x, mean, rstd)
    assert np.any(np.abs(careless - exact) > allowed), "the test would not notice an uncentred sum"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("offset", [1e3, -1e3])
def test_offsets(offset: float, strategy: str, direction: str, executor: Executor) -> None:
    case = Case(*SHAPE[strategy], "float32", offset=offset)
    check = case.forward if direction == "forward" else case.backward
    check(executor, tile=tile_of(strategy, direction))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("constant", [0.1, 100.1, 1e4 + 0.1, 1e5 + 0.1])
def test_a_constant_group_has_no_variance(constant: float, strategy: str, layout: str, executor: Executor) -> None:
    eps = 1e-5
    shape = (2, 8, 1030) if layout == "NCHW" else (2, 1030, 8)
    if strategy in ("warp", "registers"):
        shape = (2, 8, 100) if layout == "NCHW" else (2, 1, 800)
    x = executor.put(np.full(shape, constant, np.float32))
    y, mean, rstd = cunorm.group_norm(x, 1, eps=eps, data_format=layout, tile=tile_of(strategy))
    want = 1 / np.sqrt(np.float64(np.float32(eps)))
    assert np.all(executor.get(mean) == np.float32(constant))
    assert np.all(np.abs(executor.get(rstd) / want - 1) <= 2e-7)
    assert np.all(executor.get(y) == 0)


@pytest.mark.parametrize("where", [0, 777])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_outlier(strategy: str, where: int, executor: Executor) -> None:
    """One element is 1e6: the first, relative to which sums are computed, or another."""
    case = Case(2, 8, (128,), 1, "float32")
    case.x.reshape(-1)[where] = 1e6
    case.forward(executor, tile=tile_of(strategy))
    if strategy != "warp":
        case.backward(executor, tile=tile_of(strategy, "backward"))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 5, 1023])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_and_infinity_affect_only_their_group(strategy: str, where: int, value: float, executor: Executor) -> None:
    """In x they affect only their own group; in dy also the parameter gradients of the affected channels."""
    case = Case(2, 8, (128,), 2, "float32")
    case.x.reshape(-1)[where] = value
    with np.errstate(all="ignore"):
        case.forward(executor, tile=tile_of(strategy))
    case = Case(4, 64, (), 2, "float32") if strategy == "warp" else Case(2, 8, (128,), 2, "float32")
    case.dy.reshape(-1)[where % case.dy.size] = value
    with np.errstate(all="ignore"):
        case.backward(executor, tile=tile_of(strategy, "backward"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_and_small_16_bit_values(dtype: str, strategy: str, executor: Executor) -> None:
    """Conversions in both directions preserve subnormal float16 values and values near the largest float16."""
    for scale in (1e-6, 3e4):
        case = Case(*SHAPE[strategy], "float32")
        case.x = np.clip(case.x * scale, -6e4, 6e4).astype(DTYPES[dtype])
        case.dy = (case.dy * min(scale, 1.0)).astype(DTYPES[dtype])
        case.gamma = case.beta = None
        case.forward(executor, tile=tile_of(strategy))
        case.backward(executor, tile=tile_of(strategy, "backward"))


@pytest.mark.parametrize(("layout", "chunk"), [("NCHW", 65536), ("NHWC", 4096)])
def test_long_sums_of_equal_terms(layout: str, chunk: int, executor: Executor) -> None:
    """dy = 0.1 everywhere, like the gradient of a mean: every addition of a long chain rounds in the same direction."""
    case = Case(1, 512, (4096,), 2, "float32", layout) if layout == "NHWC" else Case(1, 2, (131072,), 1, "float32")
    case.dy[...] = 0.1
    case.backward(executor, tile={"strategy": "split", "threads": 128, "chunk": chunk})


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("strategy", ["block", "split"])
def test_more_than_2_to_the_31_elements(strategy: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the last sample of a tensor of 2^31 + 2^14 elements. Only the blocks that process it run in each launch.

    The tensors are sparse memory, in which only the pages that are written exist. 32-bit offsets would point 2^32
    elements lower.
    """
    from cunorm.executors.cpu import executor as cpu

    N, C, HxW, groups = 2**18 + 2, 64, 128, 2
    count = N * C * HxW
    assert count > 2**31
    shape = (N, C, HxW) if layout == "NCHW" else (N, HxW, C)
    dy, x, dx = (sparse(count, DTYPES["bfloat16"]).reshape(shape) for _ in range(3))
    case = Case(1, C, (HxW,), groups, "bfloat16", layout)
    dy[-1], x[-1] = case.dy[0], case.x[0]
    mean, rstd = (np.zeros((N, groups), np.float32) for _ in range(2))
    mean[-1], rstd[-1] = (a[0] for a in case.statistics())

    whole_launch = cpu.launch

    def last_blocks(kernel: Any, grid: int, threads: int, shared_bytes: int, arguments: Any, **known: Any) -> None:
        whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(max(0, grid - 64), grid), **known)

    def first_blocks(kernel: Any, grid: int, threads: int, shared_bytes: int, arguments: Any, **known: Any) -> None:
        whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(0, min(64, grid)), **known)

    # the second sweep of split runs backwards: its first blocks process the last sample
    calls = iter([last_blocks, *([last_blocks] if strategy == "split" else []), first_blocks])
    monkeypatch.setattr(cpu, "launch", lambda *arguments, **known: next(calls)(*arguments, **known))
    tile = tile_of(strategy, "backward") | ({"chunk": 64} if strategy == "split" else {})
    cunorm.group_norm_backward(
        dy, x, mean, rstd, case.gamma, num_groups=groups, data_format=layout, out=(dx, None, None), tile=tile,
        output_mask=(True, False, False), workspace=sparse(2**31, np.uint8),
    )  # fmt: skip
    exact = reference.group_norm_backward(
        case.dy, case.x, mean[-1:], rstd[-1:], case.gamma, num_groups=groups, data_format=layout
    )[0]
    assert np.max(np.abs(dx[-1].astype(np.float64) - exact[0])) <= 2.0**-7 * np.max(np.abs(exact))
    assert np.any(dx[-1] != 0)
