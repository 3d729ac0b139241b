"""Valid calls of batch_norm_gather_stats: counts of every kind, running statistics in place, absent ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.ops.batch_norm.op import BATCH_NORM_GATHER_STATS
from tests.conftest import Executor
from tests.support.contract import unaligned
from tests.support.problems import SENTINEL, laid_out
from tests.support.tolerance import assert_within

TILE = cunorm.Tile("column", threads=64)  # calls with a dictionary as tile are not cached
RUNNING = ("running_mean", "running_var")
COUNTS = [4, 0, 9]
CALLS = BATCH_NORM_GATHER_STATS.calls


def statistics(world: int = 3, C: int = 8, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(world * C)
    means = random.standard_normal((world, C)).astype(DTYPES[dtype])
    return means, (0.2 + random.random((world, C))).astype(DTYPES[dtype])


def gather(executor: Executor, given: tuple[Any, ...], counts: Any, **options: Any) -> list[Any]:
    """All four results, checked against the oracle. Running statistics that are passed as arrays are updated in place.

    ``given`` contains means and invstds as NumPy arrays. Two more arrays, if any, replace them in the call.
    """
    means, invstds, *there = given
    running = {name: options.pop(name) for name in RUNNING if name in options}
    before = {name: executor.get(array).copy() for name, array in running.items()}
    there = there or [executor.put(means), executor.put(invstds)]
    found = list(cunorm.batch_norm_gather_stats(*there, counts, tile=TILE, **running, **options))
    numbers = {name: options[name] for name in ("eps", "momentum") if name in options}
    values = counts if isinstance(counts, (list, tuple)) else executor.get(counts)
    exact = reference.batch_norm_gather_stats(means, invstds, values, **before, **numbers)
    found += [running.get(name) for name in RUNNING]
    for name, came, want in zip(("mean", "invstd", *RUNNING), found, exact, strict=True):
        assert (came is None) == (want is None)
        if came is not None:
            assert_within(name, executor.get(came), want, 1e-12 * np.abs(want) + 1e-12, NAMES[came.dtype])
    return found


def test_counts_of_every_kind_give_the_same(executor: Executor) -> None:
    given, results = statistics(), []
    lists = (COUNTS, tuple(COUNTS), [4.0, 0.0, 9.0], (np.int32(4), 0, 9.0), [np.float32(4), np.uint8(0), 9])
    dtypes = (np.int32, np.int64, np.float32, np.float64)
    spread = executor.xp.full((3, 2), -1, np.int64)  # the elements between the counts are -1
    spread[:, 0] = executor.put(np.array(COUNTS))
    for counts in (*lists, *(executor.put(np.array(COUNTS, dtype)) for dtype in dtypes), spread[:, 0]):
        for _ in range(2):
            found = gather(executor, given, counts)
            results.append([executor.get(array).tobytes() for array in found[:2]])
    assert all(result == results[0] for result in results)


def test_counts_are_checked_in_every_call() -> None:
    """A repeated call with other numbers in the same array is checked again."""
    means, invstds = statistics()
    running = np.full(8, 3, np.float32)
    for counts in (np.array(COUNTS), np.array(COUNTS, float)):
        cunorm.batch_norm_gather_stats(means, invstds, counts, running_mean=running, tile=TILE)
        kept = running.copy()
        counts[:] = [1, -1, 1]
        with pytest.raises(ValueError, match=r"^counts: \["):
            cunorm.batch_norm_gather_stats(means, invstds, counts, running_mean=running, tile=TILE)
        assert np.array_equal(running, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_of_absent_ranks_do_not_matter(value: float, executor: Executor) -> None:
    means, invstds = statistics()
    alone = gather(executor, (means[[0, 2]], invstds[[0, 2]]), [4, 9])
    for spoiled in (means, invstds):
        spoiled[1] = value
        found = gather(executor, (means, invstds), COUNTS)
        for came, want in zip(found[:2], alone[:2], strict=True):
            assert executor.get(came).tobytes() == executor.get(want).tobytes()


@pytest.mark.parametrize("names", [RUNNING, RUNNING[:1], RUNNING[1:]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics_are_updated_in_place(dtype: str, names: tuple[str, ...], executor: Executor) -> None:
    """Of any dtype, dense or strided, alternating with calls of the same arrays without running statistics."""
    given, xp = statistics(), executor.xp
    base = xp.full((8, 6), SENTINEL, DTYPES[dtype])
    dense = [xp.full(8, value, DTYPES[dtype]) for value in (0.5, 2)]
    for arrays in (dense, [base[:, 1], base[::-1, 4]], dense):
        for array in arrays:
            array.fill(2)
        running = dict(zip(names, arrays, strict=False))
        for _ in range(2):  # the second call continues from the results of the first
            gather(executor, given, COUNTS, momentum=0.25, **running)
            gather(executor, given, COUNTS)
        for array in arrays[len(names) :]:
            assert bool((array == 2).all())
        for array in running.values():
            assert not bool((array == 2).any())
    base[:, 1] = base[:, 4] = SENTINEL
    assert bool((base == SENTINEL).all())


def test_momentum_of_0_and_1(executor: Executor) -> None:
    given = statistics()
    for momentum in (0, 1, 0.0, 1.0, np.float32(0.5), 0.1):
        running = {name: executor.put(np.linspace(1, 2, 8).astype(np.float32)) for name in RUNNING}
        mean, *_ = gather(executor, given, COUNTS, momentum=momentum, **running)
        if momentum == 0:
            assert all(
                np.array_equal(executor.get(a), np.linspace(1, 2, 8).astype(np.float32)) for a in running.values()
            )
        if momentum == 1:
            assert np.array_equal(executor.get(running["running_mean"]), executor.get(mean))


def test_a_total_of_one_element_leaves_the_variance_biased(executor: Executor) -> None:
    means, invstds = statistics()
    for counts in ([0, 1, 0], [0.5, 0.25, 0.25], [0.0, 0.125, 0.5]):
        running = executor.xp.zeros(8, np.float64)
        _, invstd, *_ = gather(executor, (means, invstds), counts, running_var=running, momentum=1.0, eps=0.0)
        np.testing.assert_allclose(executor.get(running), executor.get(invstd).astype(float) ** -2, rtol=1e-6)
    running = executor.xp.zeros(8, np.float64)
    _, invstd, *_ = gather(executor, (means, invstds), [0, 2, 0], running_var=running, momentum=1.0, eps=0.0)
    np.testing.assert_allclose(executor.get(running), 2 * executor.get(invstd).astype(float) ** -2, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_columns_of_one_gathered_buffer_are_read_in_place(dtype: str, executor: Executor) -> None:
    """All ranks' means, invstds and counts as one all-gather leaves them. No column is copied."""
    means, invstds = statistics(5, 33, dtype)
    sizes, item = [3, 0, 2**40, 7, 1], DTYPES[dtype].itemsize
    words = 8 // item
    packed = executor.xp.empty((5, 68 // words * words + words), DTYPES[dtype])
    packed[:, :33], packed[:, 33:66] = executor.put(means), executor.put(invstds)
    counts = packed[:, -words:].view(np.int64)[:, 0]
    counts[...] = executor.put(np.array(sizes))
    CALLS.clear()
    found = gather(executor, (means, invstds, packed[:, :33], packed[:, 33:66]), counts)
    (call,) = CALLS.values()
    assert call.copied == () and call.measured == (packed.shape[1],) * 2 + (packed.shape[1] // words,)
    apart = gather(executor, (means, invstds), sizes)
    for came, want in zip(found[:2], apart[:2], strict=True):
        assert executor.get(came).tobytes() == executor.get(want).tobytes()


@pytest.mark.parametrize("layout", ["reversed", "every other", "Fortran", "misaligned", "padded rows", "swapped"])
def test_strided_statistics(layout: str, executor: Executor) -> None:
    means, invstds = statistics()
    there = [laid_out(executor.xp, each, layout) for each in (means, invstds)]
    base = executor.xp.full((8, 4), SENTINEL, np.float32)
    for out in (None, (base[:, 0], base[::-1, 2]), (None, base[:, 1])):
        found = gather(executor, (means, invstds, *there), COUNTS, out=out)
        assert all(came is given for came, given in zip(found, out or (), strict=False) if given is not None)
    base[:, :3] = SENTINEL
    assert bool((base == SENTINEL).all())


def test_broadcast_statistics(executor: Executor) -> None:
    """All ranks have the same statistics, or all channels have."""
    means, invstds = statistics()
    for cut in (np.s_[:1], np.s_[:, :1]):
        same = [np.ascontiguousarray(each[cut]) for each in (means, invstds)]
        there = [executor.xp.broadcast_to(executor.put(each), (3, 8)) for each in same]
        gather(executor, (*(np.broadcast_to(each, (3, 8)) for each in same), *there), COUNTS)


def test_unaligned_arrays(tmp_path: Any) -> None:
    executor, given = Executor("cpu"), statistics()
    running = {name: unaligned(np.ones(8, np.float32)) for name in RUNNING}
    out = (unaligned(np.zeros(8, np.float32)), None)
    gather(executor, (*given, *map(unaligned, given)), unaligned(np.array(COUNTS)), out=out, **running)
    mapped = np.memmap(tmp_path / "means", np.float32, "w+", shape=(3, 8))
    mapped[...] = given[0]
    gather(executor, (*given, mapped, given[1]), COUNTS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_results(dtype: str, executor: Executor) -> None:
    found = gather(executor, statistics(dtype=dtype), COUNTS)
    assert [array.dtype for array in found[:2]] == [DTYPES["float64" if dtype == "float64" else "float32"]] * 2


@pytest.mark.parametrize("given", [True, False])
def test_no_channels(given: bool, executor: Executor) -> None:
    xp = executor.xp
    empty, nothing = xp.zeros((3, 0), np.float32), xp.zeros((0,), np.float32)
    options = {"running_mean": nothing, "out": (nothing[...], None)} if given else {}
    mean, invstd = cunorm.batch_norm_gather_stats(empty, empty, COUNTS, **options)
    assert mean.shape == invstd.shape == (0,)


@pytest.mark.parametrize("world", [0, 1, 3])
def test_a_total_of_0_gives_nan_and_keeps_the_running_statistics(world: int, executor: Executor) -> None:
    """The rule is the same for counts of every kind: on a GPU nobody could raise an error without waiting."""
    means, invstds = statistics(3)
    arrays = (np.zeros(world, dtype) for dtype in (np.int32, np.int64, np.float32, np.float64))
    for counts in ([0] * world, (0.0,) * world, np.zeros(world, np.int64), *map(executor.put, arrays)):
        running = [executor.put(np.full(8, value, np.float32)) for value in (5, 6)]
        named = dict(zip(RUNNING, running, strict=True))
        found = gather(executor, (means[:world], invstds[:world]), counts, **named)
        assert all(np.isnan(executor.get(array)).all() for array in found[:2])
        assert [executor.get(array)[0] for array in running] == [5, 6]


def test_the_cache_distinguishes_calls_that_differ_in_one_argument(executor: Executor) -> None:
    """Alternate such calls, so that a cache key that lacks an argument gives a wrong result."""
    given = statistics()
    for _ in range(2):
        for eps in (1e-5, 0.0, 1e-3, np.float32(1e-2)):
            gather(executor, given, COUNTS, eps=eps)
        for dtype in ("float32", "float64"):
            running = [executor.xp.ones(8, DTYPES[dtype]) for _ in range(2)]
            gather(executor, given, COUNTS, running_mean=running[0])
            gather(executor, given, COUNTS, running_var=running[0])
            gather(executor, given, COUNTS, **dict(zip(RUNNING, running, strict=True)))
        for counts in (COUNTS, [9, 4, 0], [0.5, 1.5, 2.5]):
            gather(executor, given, counts)
