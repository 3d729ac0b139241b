"""Runs test kernels and checks their results.

They test features that no kernel of the library uses yet, and features whose faults a whole kernel's results would not
show. ``check_<stem>(text)`` takes the text of ``kernels/<stem>.cu`` or of a mutant of it. It raises AssertionError or
KernelFault if the kernel is wrong. The environment variable CUNORM_CPU_BUILD selects the build.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cunorm.core import settings
from cunorm.core.arrays import DTYPES
from cunorm.core.opspec import OPS
from cunorm.executors.cpu import checked as cpu_checked
from cunorm.executors.cpu import executor
from cunorm.executors.cpu.guarded_arrays import PARAMETER, WORKSPACE, GuardedCopies, Region
from cunorm.jit import sources

ORDERS = ("ascending", "descending", "random:3")


def expanded(text: str, stem: str) -> str:
    """Return a test kernel's text as `sources` assembles it for a kernel that an op defines."""
    with mock.patch.dict(OPS, {"a test": SimpleNamespace(kernels={stem: text})}):
        return sources._expand.__wrapped__(stem)  # bypass the cache, whose key is the name: a mutant has another text


def compiled(text: str, entry: str, dtype: str = "float32", **constants: int) -> executor.Kernel:
    """Compile a test kernel, preceded by the head that the host writes."""
    return executor.compile(sources._head({"data_t": dtype}, "NCHW", constants) + expanded(text, entry), entry)


def launch(
    kernel: executor.Kernel,
    grid: int,
    threads: int,
    shared_bytes: int,
    arrays: Sequence[np.ndarray],
    numbers: Sequence[int | float] = (),
    *,
    workspace: Sequence[int] = (),
    record: list[cpu_checked.Count] | None = None,
    **options: Any,
) -> None:
    """Launch on arrays that are registered with the executor; ``workspace`` lists the indices of workspaces."""
    memory = [
        Region(f"array{i}", int(a.ctypes.data), a.nbytes, WORKSPACE if i in workspace else PARAMETER)
        for i, a in enumerate(arrays)
    ]
    arguments = [*(region.address for region in memory), *numbers]
    if settings.cpu_build() != "checked" and record is None:
        executor.launch(kernel, grid, threads, shared_bytes, arguments, memory=memory, **options)
        return
    guarded = GuardedCopies(memory)
    places = [*(guarded.moved(region.address, region.nbytes) for region in memory), *numbers]
    try:
        cpu_checked.checked(executor.launch, kernel, grid, threads, shared_bytes, places, guarded, record, **options)
    finally:
        guarded.give_back()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normally distributed float32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def check_async_copy(text: str) -> None:
    """Check cp.async with two stages."""
    kernel = compiled(text, "async_copy", threads=64)
    for tiles in (1, 2, 5):
        x, y = random(3, tiles, 256), np.full((3, tiles, 256), np.nan, np.float32)
        launch(kernel, 3, 64, 2 * 64 * 16, [x, y], [tiles, 0])
        assert np.array_equal(y, 2 * x)


def check_async_bulk(text: str) -> None:
    """Check bulk copies and mbarriers: one thread loads, others work, one stores."""
    kernel = compiled(text, "async_bulk", threads=96)
    for tiles in (1, 2, 3, 7):
        x, y = random(2, tiles, 400), np.full((2, tiles, 400), np.nan, np.float32)
        launch(kernel, 2, 96, 48 + 2 * 100 * 16, [x, y], [tiles, 100])
        assert np.array_equal(y, 2 * x)


def check_cluster_sum(text: str) -> None:
    """Check distributed shared memory and the cluster's barrier."""
    for cluster in (1, 2, 4):
        kernel = compiled(text, "cluster_sum", threads=64, cluster=cluster)
        x = random(8, 500)
        sums, neighbours = np.full(8, np.nan, np.float32), np.full(8, np.nan, np.float32)
        for resident in (None, 2):
            launch(kernel, 8, 64, 256 + 32, [x, sums, neighbours], [500], cluster=cluster, resident=resident)
            total = x.astype(np.float64).sum(1).reshape(-1, cluster).sum(1)
            assert np.allclose(sums, np.repeat(total, cluster), atol=1e-3)
            assert np.array_equal(neighbours, np.tile((np.arange(cluster) - 1) % cluster, 8 // cluster))


def check_ticket_wait(text: str) -> None:
    """Check blocks that wait for an earlier ticket, with several numbers of resident blocks."""
    kernel = compiled(text, "ticket_wait", threads=32)
    blocks = 9
    x = random(blocks, 32)
    expected = x.copy()
    for i in range(1, blocks):
        expected[i] += expected[i - 1, -1]
    for resident in (1, 2, 5, 9):
        totals, workspace = (np.full((blocks, 32), np.nan, np.float32) for _ in range(2))
        ticket, flags = np.zeros(1, np.uint32), np.zeros(blocks, np.uint32)
        arrays = [x, totals, workspace, ticket, flags]
        launch(kernel, blocks, 32, 32, arrays, workspace=[2, 4], resident=resident)
        assert np.array_equal(totals, expected), resident
        assert np.all(flags == 1)


def check_last_block(text: str) -> None:
    """Check that the last block to arrive sums the values that all blocks stored to the workspace."""
    kernel = compiled(text, "last_block", threads=32)
    x = np.arange(5 * 32, dtype=np.float32)
    for resident in (1, 3):
        total, workspace, ticket = np.zeros(32, np.float32), np.zeros(x.size, np.float32), np.zeros(1, np.uint32)
        launch(kernel, 5, 32, 16, [x, total, workspace, ticket], workspace=[2], resident=resident)
        assert np.array_equal(total, x.reshape(5, 32).sum(0))


def check_statics(text: str) -> None:
    """Check static shared memory, also with several resident blocks."""
    kernel = compiled(text, "statics")
    assert ctypes.sizeof(ctypes.c_float) * 128 <= kernel.static_bytes
    for resident in (None, 3):
        x, y = random(7, 64), np.full((7, 64), np.nan, np.float32)
        launch(kernel, 7, 64, 0, [x, y], resident=resident)
        assert np.array_equal(y, x[:, ::-1] + 1)


def check_moments(text: str) -> None:
    """Check merges of a large set and a distant small one, in both orders: the mean has more digits than float32."""
    kernel = compiled(text, "moments", threads=64)
    rng = np.random.default_rng(0)
    sets = 70
    large = np.stack([rng.integers(1000, 1 << 20, sets), rng.standard_normal(sets), np.zeros(sets), np.ones(sets)], 1)
    small = np.stack([rng.integers(1, 10, sets), 1e4 * rng.standard_normal(sets), np.zeros(sets), np.ones(sets)], 1)
    large, small = large.astype(np.float32), small.astype(np.float32)
    (n, mean, _, m2), (few, far, _, own) = large.astype(np.float64).T, small.astype(np.float64).T
    distance = far - mean
    exact = mean + distance * few / (n + few)
    spread = m2 + own + distance**2 * n * few / (n + few)
    for a, b in ((large, small), (small, large)):
        merged = np.full((sets, 4), np.nan, np.float32)
        launch(kernel, 2, 64, 0, [a, b, merged], [sets])
        count, centre, rest, found = merged.astype(np.float64).T
        assert np.array_equal(count, n + few)
        step = np.abs(distance) * few / (n + few)  # the rounded term
        assert np.all(np.abs(centre + rest - exact) <= 4 * 2.0**-24 * step)
        assert np.allclose(found, spread, rtol=8 * 2.0**-24, atol=0)


def check_arrivals(text: str) -> None:
    """Check blocks that count themselves in and wait until a counter is above a number."""
    kernel = compiled(text, "arrivals", threads=32)
    blocks = 5
    x = np.arange(blocks * 32, dtype=np.float32).reshape(blocks, 32)
    totals, workspace = (np.full((blocks, 32), np.nan, np.float32) for _ in range(2))
    before, counter = np.zeros(blocks, np.uint32), np.zeros(1, np.uint32)
    launch(kernel, blocks, 32, 0, [x, totals, before, workspace, counter], workspace=[3], resident=blocks)
    assert np.array_equal(totals, np.tile(x.sum(0), (blocks, 1)))
    assert sorted(before) == [*range(blocks)]


def check_cluster_exchange(text: str) -> None:
    """Check relaxed arrivals at the cluster's barrier, and a lane per block that reads its shared memory."""
    for cluster in (2, 4):
        kernel = compiled(text, "cluster_exchange", threads=64, cluster=cluster)
        x, y = random(3, 8), np.full((3, 8, 64), np.nan, np.float32)
        launch(kernel, 8, 64, 16, [x, y], [3], cluster=cluster, resident=2)
        expected = np.zeros((3, 8, 64), np.float32)
        expected[..., :cluster] = np.repeat(x.reshape(3, -1, cluster), cluster, axis=1)
        assert np.array_equal(y, expected)


def check_conversions(text: str) -> None:
    """Check the 16-bit conversions, bit for bit; test_conversions.py has more values."""
    for dtype in ("float16", "bfloat16"):
        kernel = compiled(text, "conversions", dtype, threads=64)
        bits = np.arange(0, 65536, 151, dtype=np.uint16)  # of both signs, subnormals, infinity and NaN
        stored = np.concatenate([bits, np.uint16([0x7C00, 0x7F80, 0x7E00])]).view(DTYPES[dtype])
        with np.errstate(all="ignore"):
            wide = stored.astype(np.float32)
            wide = np.where(np.isfinite(wide), wide * np.float32(1 + 2.0**-9), wide)
            exact, back = wide.astype(DTYPES[dtype]), stored.astype(np.float32)
        rounded, widened = np.zeros_like(exact), np.zeros_like(wide)
        launch(kernel, 2, 64, 0, [wide, rounded, stored, widened], [wide.size])
        numbers = ~np.isnan(wide)
        assert np.array_equal(rounded.view(np.uint16)[numbers], exact.view(np.uint16)[numbers])
        assert np.all(np.isnan(rounded.astype(np.float32)[~numbers]))
        assert np.array_equal(widened, back, equal_nan=True)


def check_reciprocals(text: str) -> None:
    """Check the reciprocals of numbers from 1 to infinity."""
    kernel = compiled(text, "reciprocals", threads=64)
    x = np.logspace(0, 38.5, 128, dtype=np.float32)
    x[-2:] = np.float32(2.0**126), np.inf
    y = np.full_like(x, np.nan)
    launch(kernel, 2, 64, 0, [x, y])
    exact = 1 / x.astype(np.float64)
    assert np.all(np.abs(y - exact) <= 2.0**-23 * exact + 2.0**-126)  # a subnormal reciprocal may be flushed


def check_sigmoids(text: str) -> None:
    """Check the sigmoid of 16-bit and of wide data: a relative error that grows with |z| where the sigmoid is small."""
    z = np.concatenate([np.linspace(-80, 80, 126, dtype=np.float32), np.float32([-np.inf, np.inf])])
    exact = 1 / (1 + np.exp(-z.astype(np.float64)))
    for dtype in ("bfloat16", "float32"):
        kernel = compiled(text, "sigmoids", dtype, threads=64)
        y = np.full_like(z, np.nan)
        launch(kernel, 2, 64, 0, [z, y])
        assert (y[-2], y[-1]) == (0, 1)
        error = np.abs(y - exact)[:-2]
        assert np.all(error <= (4 + np.abs(z[:-2])) * 2.0**-23 * exact[:-2])


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
