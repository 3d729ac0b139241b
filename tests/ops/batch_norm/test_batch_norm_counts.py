"""Counts of batch_norm_backward_elemt: a number, or the count of each rank in an array on the device of x."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.ops.batch_norm.op import BATCH_NORM_BACKWARD_ELEMT
from tests.conftest import Executor
from tests.ops.batch_norm.contract import INPUT, tile_of
from tests.support.problems import BatchArrays, batch_arrays, laid_out

#: Counts of more ranks than a warp has lanes. Their sum is exact in float32 too.
MANY = [*range(40), 2**20]


def gradient(executor: Executor, a: BatchArrays, count: Any, strategy: str = "block", **options: Any) -> bytes:
    """The bytes of dx for that count."""
    return bytes(executor.get(a.call(INPUT, executor, count=count, tile=tile_of(INPUT, strategy), **options)).tobytes())


@pytest.mark.parametrize("strategy", ["block", "column"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_counts_of_every_kind_give_the_same(strategy: str, dtype: str, executor: Executor) -> None:
    a = batch_arrays((4, 8) if strategy == "column" else (4, 8, 3, 3), dtype)
    want = gradient(executor, a, sum(MANY), strategy)
    a.check(INPUT, (np.frombuffer(want, a.x.dtype).reshape(a.x.shape),), count=float(sum(MANY)))
    spread = executor.xp.full((len(MANY), 3), -1, np.int64)
    spread[:, 1] = executor.put(np.array(MANY))
    in_host_memory = (MANY, tuple(MANY), [*MANY[:-1], float(MANY[-1])], np.array(MANY))
    arrays = [executor.put(np.array(MANY, dtype)) for dtype in (np.int32, np.int64, np.float32, np.float64)]
    for count in (*in_host_memory, *arrays, spread[:, 1], arrays[0][::-1], executor.put(np.array(sum(MANY)))):
        assert gradient(executor, a, count, strategy) == want


def test_large_counts_are_exact_as_integers(executor: Executor) -> None:
    """A sum in float32 would be 2**25, and dx would differ by a rounding."""
    a = batch_arrays(dtype="float64")
    counts = executor.put(np.array([2**25, 1, 1, 1]))
    assert gradient(executor, a, counts) == gradient(executor, a, 2**25 + 3) != gradient(executor, a, 2**25)


def test_strided_counts_are_not_copied(executor: Executor) -> None:
    a = batch_arrays()
    spread = executor.xp.ones((3, 2), np.int64)
    BATCH_NORM_BACKWARD_ELEMT.calls.clear()
    gradient(executor, a, spread[:, 0])
    (call,) = BATCH_NORM_BACKWARD_ELEMT.calls.values()
    assert call.copied == () and call.measured == (3, 2)


def test_counts_are_read_anew_in_every_call(executor: Executor) -> None:
    a = batch_arrays()
    counts, out = executor.put(np.array([3, 4])), executor.xp.empty_like(executor.put(a.x))
    assert gradient(executor, a, counts, out=out) == gradient(executor, a, 7)
    counts[...] = executor.put(np.array([30, 40]))
    assert gradient(executor, a, counts, out=out) == gradient(executor, a, 70)
    if executor.name == "cpu":
        counts[1] = -1
        with pytest.raises(ValueError, match=r"^count: \[30 -1\]"):
            gradient(executor, a, counts, out=out)


def test_out_that_overlaps_the_counts_is_refused(executor: Executor) -> None:
    a = batch_arrays((2, 8, 2), "float64")
    out = executor.xp.ones((2, 8, 2))
    with pytest.raises(ValueError, match=r"^out: overlaps counts"):
        a.call(INPUT, executor, count=out[0, :3, 0], out=out)


@pytest.mark.parametrize("count", [0, 0.0, [0, 0], (), np.zeros(3, np.int32), np.zeros(0)])
def test_a_total_of_0(count: Any, executor: Executor) -> None:
    """An empty x has an empty dx. The dx of samples that nobody counted is not finite."""
    there = executor.put(count) if isinstance(count, np.ndarray) else count
    with np.errstate(all="ignore"):
        empty = batch_arrays((0, 8, 3))
    assert a_dx(empty, executor, there).shape == (0, 8, 3)
    assert not np.isfinite(a_dx(batch_arrays(), executor, there)).any()


def a_dx(a: BatchArrays, executor: Executor, count: Any) -> np.ndarray:
    found: np.ndarray = executor.get(a.call(INPUT, executor, count=count))
    return found


def test_a_plan_takes_counts(executor: Executor) -> None:
    a = batch_arrays()
    plan = cunorm.plan(INPUT, shape=a.x.shape, dtype="float32", device="cpu" if executor.name == "cpu" else 0)
    arrays = [executor.put(each) for each in (a.dy, a.x, a.mean, a.invstd, a.gamma, a.sum_dy, a.sum_dy_xmu)]
    for count in (36, executor.put(np.array([30, 6])), executor.put(np.array([30.0, 6], np.float32)), [35, 1]):
        found = executor.get(plan(*arrays, count))
        a.check(INPUT, (found,), count=36.0)


def test_counts_in_every_layout(executor: Executor) -> None:
    a, counts = batch_arrays(), np.arange(1.0, 6)
    for layout in ("reversed", "every other", "misaligned"):
        assert gradient(executor, a, laid_out(executor.xp, counts, layout)) == gradient(executor, a, 15)
