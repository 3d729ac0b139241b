"""Every strategy of BatchNorm against the float64 oracle: shapes, layouts, dtypes, values, orders, sizes past 2^31."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.ops.batch_norm.strategies import STATS
from cunorm.ops.common import limits
from cunorm.runtime import plans
from tests.conftest import Executor
from tests.support.covering import pairwise
from tests.support.problems import BATCH_OPS, BatchArrays, batch_arrays, forget_calls, shifted, sparse, tupled
from tests.support.tolerance import assert_within, batch_elemt, batch_input, batch_reduce, batch_stats

# (N, C, spatial). HxW of 1, 2, 3, 7, 49, 63, 65 and 127 cover every tail of a 16-byte access. C of 1, 3, 5, 20, 33 and
# 64 cover wide rows, last slabs and rows left over. N is 1, 2 or 129, among others.
SHAPES = [
    (1, 1, ()),
    (2, 5, ()),
    (129, 3, ()),
    (17, 64, ()),
    (1, 33, ()),
    (5, 20, (1, 1)),
    (2, 3, (2,)),
    (129, 1, (2,)),
    (129, 3, (3,)),
    (1, 20, (7,)),
    (2, 20, (7, 7)),
    (2, 64, (7, 7)),
    (5, 5, (7, 9)),
    (2, 64, (5, 13)),
    (2, 3, (127,)),
    (1, 33, (2, 5)),
    (3, 33, (3, 3, 3)),
    (1, 1, (1030,)),
    (2, 2, (1030,)),
]
REDUCING = {
    "block": {"strategy": "block", "threads": 64, "channels": 4, "samples_per_block": 2},
    "cluster": {"strategy": "cluster", "threads": 64, "cluster": 2},
    "split": {"strategy": "split", "threads": 64, "chunk": 16},
    "column": {"strategy": "column", "threads": 64, "columns": 64, "chunk": 2},
}
#: Runs of 64 elements start and end within planes. elemt has no strategy `split`.
STREAMING = {
    "block": {"strategy": "block", "threads": 64, "chunk": 64},
    "column": {"strategy": "column", "threads": 64, "columns": 64, "chunk": 2},
}
#: The same tile as in the tests of calls.
GATHER = {"strategy": "column", "threads": 64}
TILES = [
    *[(kind, name) for kind in ("stats", "reduce") for name in REDUCING],
    *[(kind, name) for kind in ("elemt", "input") for name in STREAMING],
]
NAMED = [f"{kind}-{name}" for kind, name in TILES]
LAYOUT_OF = {"block": "first", "cluster": "first", "split": "first", "column": "last"}


def tile_of(kind: str, strategy: str) -> dict[str, Any]:
    return (REDUCING if kind in ("stats", "reduce") else STREAMING)[strategy]


#: The ops of BatchNorm on tensors, by the kind of their tiles.
OP = dict(zip(("stats", "elemt", "reduce", "input"), BATCH_OPS, strict=True))


class Case(BatchArrays):
    """Arrays of one problem with channels first or last in memory. `saved`: the dtype of mean and invstd."""

    def __init__(
        self,
        shape: tuple[int, int, tuple[int, ...]],
        dtype: str = "float32",
        layout: str = "first",
        parameters: str | None = "same",
        offset: float = 0.0,
        saved: str | None = None,
    ) -> None:
        N, C, spatial = shape
        made = batch_arrays((N, C, *spatial), dtype, gamma_dtype=parameters, seed=N + C, offset=offset)
        super().__init__(**vars(made))
        if layout == "last":
            self.x, self.dy = (
                np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) for a in (self.x, self.dy)
            )
        if saved is not None:
            self.mean, self.invstd = (a.astype(DTYPES[saved]) for a in (self.mean, self.invstd))

    def arrays(self, kind: str) -> dict[str, Any]:
        """The arrays of a call by name."""
        return {name: value for name, value in self.given(OP[kind]).items() if name != "count"}

    def run(self, kind: str, executor: Executor, **changes: Any) -> Any:
        """Call the function on these arrays. `changes` replaces or adds arguments."""
        return self.call(OP[kind], executor, **changes)

    def right(self, kind: str, results: Any, executor: Executor) -> None:
        """Compare results with the oracle. Results that are None are skipped."""
        self.check(OP[kind], tuple(map(executor.get, tupled(results))))


def bits(executor: Executor, results: Any) -> list[bytes]:
    return [executor.get(a).tobytes() for a in tupled(results) if a is not None]


def taken(kind: str, strategy: str, shapes: Any = SHAPES, **facts: Any) -> Iterator[Case]:
    """Cases of all shapes and both layouts that the strategy accepts."""
    for shape, layout in itertools.product(shapes, ("first", "last")):
        _, C, spatial = shape
        rows = C > 1 and (layout == "last" or int(np.prod(spatial)) == 1)
        if rows == (strategy == "column"):
            yield Case(shape, layout=layout, **facts)


@pytest.mark.parametrize(
    ("dtype", "kind", "strategy"),
    pairwise(list(DTYPES), ["stats", "reduce", "elemt", "input"], list(REDUCING), legal=lambda row: row[1:] in TILES),
)
def test_matches_the_oracle_on_hostile_shapes(dtype: str, kind: str, strategy: str, executor: Executor) -> None:
    checked = 0
    for case in taken(kind, strategy, dtype=dtype):
        results = case.run(kind, executor, tile=tile_of(kind, strategy))
        try:
            case.right(kind, results, executor)
        except AssertionError as error:
            raise AssertionError(f"{case.x.shape} strides {case.x.strides}: {error}") from None
        checked += 1
    assert checked >= 15


@pytest.mark.parametrize(("kind", "strategy", "tile"), [
    ("stats", "block", {"threads": 64, "channels": 1, "samples_per_block": 256}),
    ("reduce", "block", {"threads": 64, "channels": 64, "samples_per_block": 1}),
    # the last slab has more parts per channel
    ("reduce", "block", {"threads": 64, "channels": 17, "samples_per_block": 1}),
    ("stats", "cluster", {"threads": 64, "cluster": 1}),
    ("reduce", "cluster", {"threads": 64, "cluster": 16}),
    ("stats", "split", {"threads": 64, "chunk": 1}),
    ("reduce", "split", {"threads": 64, "chunk": 100000}),
    ("stats", "column", {"threads": 64, "columns": 64, "chunk": 100000}),
    ("reduce", "column", {"threads": 64, "columns": 1, "chunk": 1}),
    ("elemt", "block", {"threads": 64, "chunk": 8}),
    ("input", "block", {"threads": 64, "chunk": 32768}),
    ("elemt", "column", {"threads": 64, "columns": 64, "chunk": 100000}),
    ("stats", "column", {"threads": 64, "columns": 2, "chunk": 33}),
    ("input", "column", {"threads": 96, "columns": 7, "chunk": 20}),
], ids=str)  # fmt: skip
def test_other_tiles(kind: str, strategy: str, tile: dict[str, int], executor: Executor) -> None:
    """One channel or all, all samples or one, one position per chunk, one chunk for all, one row of results."""
    for case in taken(kind, strategy, [*SHAPES, (2, 33, (2,)), (1, 6, (4,)), (2, 3, (640,))]):
        results = case.run(kind, executor, tile={"strategy": strategy, **tile})
        case.right(kind, results, executor)


@pytest.mark.parametrize("strategy", list(REDUCING))
def test_one_row_of_results_needs_no_workspace(strategy: str, executor: Executor) -> None:
    fields, shape = {
        "block": ({"channels": 2, "samples_per_block": 8}, (5, 3, 7)),
        "cluster": ({"cluster": 4}, (5, 3, 7)),
        "split": ({"chunk": 64}, (1, 3, 60)),
        "column": ({"chunk": 64, "columns": 8}, (50, 8)),
    }[strategy]
    tile = {"strategy": strategy, "threads": 64, **fields}
    for op, kind in (("batch_norm_stats", "stats"), ("batch_norm_backward_reduce", "reduce")):
        plan = cunorm.plan(op, shape=shape, dtype="float32", device="cpu", tile=tile)
        assert (plan.workspace_nbytes, len(plan.launches)) == (0, 1)
        case = Case((shape[0], shape[1], shape[2:]))
        case.right(kind, case.run(kind, executor, tile=tile), executor)


def test_a_thread_may_begin_with_packs_that_have_no_elements(executor: Executor) -> None:
    """A plane of 499 elements touches up to 64 packs. Only the last two of eight of channel 0 do."""
    case = Case((8, 3, (499,)), "bfloat16")
    for kind in ("stats", "reduce"):
        case.right(kind, case.run(kind, executor, tile={**REDUCING["cluster"], "cluster": 1}), executor)


def test_an_element_of_a_neighbour_is_no_centre(executor: Executor) -> None:
    """The first pack of thread 2 has no element of channel 0, but one of channel 1 that overflows if it is squared."""
    case = Case((44, 3, (7,)))
    case.x[0, 1, 1] = 2.0**100
    mean, invstd = map(executor.get, case.run("stats", executor, tile={**REDUCING["cluster"], "cluster": 1}))
    exact = reference.batch_norm_stats(case.x)
    for came, want in zip((mean, invstd), exact, strict=True):
        np.testing.assert_allclose(came[::2], want[::2], rtol=1e-5, atol=1e-6)


def test_the_largest_number_is_its_mean_if_the_first_lane_has_no_elements(executor: Executor) -> None:
    """The first pack of the second block is one that its plane does not reach.

    The largest number is the sum of its weighted parts only if they are relative to an element: rounded, they overflow.
    """
    case = Case((3, 3, (7,)))
    case.x[:] = largest = np.finfo(np.float32).max
    mean, invstd = map(executor.get, case.run("stats", executor, tile=REDUCING["cluster"]))
    assert np.all(mean == largest)
    assert np.all(np.abs(invstd * np.sqrt(np.float64(np.float32(1e-5))) - 1) <= 2e-7)


@pytest.mark.parametrize("flags", list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("strategy", list(REDUCING))
def test_every_mask(strategy: str, flags: tuple[bool, bool, bool], executor: Executor) -> None:
    wanted = dict(zip(("input_g", "gamma_g", "beta_g"), flags, strict=True))
    for shape in ((2, 20, (7,)), (1, 20, (7,))):
        case = Case(shape, layout=LAYOUT_OF[strategy])
        results = case.run("reduce", executor, tile=tile_of("reduce", strategy), **wanted)
        assert [a is not None for a in results] == [flags[0], flags[0], *flags[1:]]
        case.right("reduce", results, executor)


@pytest.mark.parametrize("strategy", list(REDUCING))
def test_x_is_not_read_for_dbeta(strategy: str) -> None:
    plan = cunorm.plan(
        "batch_norm_backward_reduce", shape=(4, 8) if strategy == "column" else (4, 8, 5), dtype="float32",
        output_mask=(False, False, True), device="cpu", tile=tile_of("reduce", strategy),
    )  # fmt: skip
    assert all("x" not in one.arguments.values() for one in plan.launches)


@pytest.mark.parametrize(("kind", "strategy"), TILES, ids=NAMED)
@pytest.mark.parametrize("parameters", ["float32", None])
def test_mixed_and_missing_parameters(parameters: str | None, kind: str, strategy: str, executor: Executor) -> None:
    case = Case((3, 20, (7,)), "bfloat16", LAYOUT_OF[strategy], parameters)
    results = case.run(kind, executor, tile=tile_of(kind, strategy))
    case.right(kind, results, executor)
    if kind == "reduce":
        assert [NAMES[np.dtype(a.dtype)] for a in results] == ["float32"] * 4


@pytest.mark.parametrize("strategy", list(REDUCING))
def test_sums_of_four_dtypes(strategy: str, executor: Executor) -> None:
    """Statistics have x's dtype. Each sum is rounded once, to the dtype of its array in `out`."""
    dtypes = ("float64", "bfloat16", "float16", "float32")
    for shape in ((3, 20, (7,)), (1, 20, (7,))):
        case = Case(shape, "float16", LAYOUT_OF[strategy], saved="float16")
        out = tuple(executor.xp.full(20, 77, DTYPES[dtype]) for dtype in dtypes)
        results = case.run("reduce", executor, out=out, tile=tile_of("reduce", strategy))
        assert all(a is b for a, b in zip(results, out, strict=True))
        case.right("reduce", results, executor)
        if strategy == "column":  # allocated results: their dtypes do not depend on the strategy
            plain = case.run("reduce", executor, tile=tile_of("reduce", strategy))
            case.right("reduce", plain, executor)
            assert [NAMES[np.dtype(a.dtype)] for a in plain] == ["float16"] * 4


@pytest.mark.parametrize("strategy", list(STREAMING))
def test_sums_and_statistics_of_x_s_dtype(strategy: str, executor: Executor) -> None:
    case = Case((3, 20, (7,)), "float16", LAYOUT_OF[strategy], saved="float16")
    case.right("elemt", case.run("elemt", executor, tile=tile_of("elemt", strategy)), executor)
    case.sum_dy, case.sum_dy_xmu = (a.astype(np.float16) for a in (case.sum_dy, case.sum_dy_xmu))
    case.right("input", case.run("input", executor, tile=tile_of("input", strategy)), executor)


@pytest.mark.parametrize(("kind", "strategy"), TILES, ids=NAMED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_misaligned_slices(dtype: str, kind: str, strategy: str, executor: Executor) -> None:
    """Tensors start 1, 2, ... elements past a 16-byte boundary, each differently. Also y in place of x, dx of dy."""
    for C, length in ((16, 16), (5, 9)):
        case = Case((3, C, (length,)), dtype, LAYOUT_OF[strategy], "float32")
        last = LAYOUT_OF[strategy] == "last"
        for shifts in ((1, 1, 1), (1, 2, 3), (0, 3, 0)):

            def moved(array: np.ndarray, shift: int) -> Any:
                view = shifted(executor, np.moveaxis(array, 1, -1) if last else array, shift)  # noqa: B023
                return executor.xp.moveaxis(view, -1, 1) if last else view  # noqa: B023

            given = case.arrays(kind)
            names = [name for name in given if name in ("dy", "x")]
            tensors = {name: moved(given[name], shift) for name, shift in zip(names, shifts, strict=False)}
            call = functools.partial(case.run, kind, executor, **tensors, tile=tile_of(kind, strategy))
            case.right(kind, call(), executor)
            if kind in ("elemt", "input"):
                out = moved(case.x * 0, shifts[2])
                assert call(out=out) is out
                case.right(kind, out, executor)
                first = tensors[names[0]]
                assert call(out=first) is first
                case.right(kind, first, executor)


#: Several parts per channel, several samples and a last slab, rows left over.
ORDERED = [(2, 5, (70,)), (5, 3, (11,)), (2, 33, (7, 7)), (67, 3, ()), (1, 3, (9,))]


@pytest.mark.parametrize(("kind", "strategy"), TILES, ids=NAMED)
def test_results_do_not_depend_on_the_order_of_threads_or_the_workspace(
    kind: str, strategy: str, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are bitwise equal in every order of threads. The workspace is full of NaN."""
    for shape in ORDERED:
        for case in taken(kind, strategy, [shape]):
            seen = set()
            for order in ("ascending", "descending", "random:1", "random:2"):
                monkeypatch.setenv("CUNORM_CPU_ORDER", order)
                junk = executor.xp.full(2**16, 0xFF, np.uint8)
                results = case.run(kind, executor, tile=tile_of(kind, strategy), workspace=junk)
                seen.add(tuple(bits(executor, results)))
            case.right(kind, results, executor)
            assert len(seen) == 1


@pytest.mark.parametrize(("kind", "strategy"), TILES, ids=NAMED)
def test_a_grid_smaller_than_the_work(
    kind: str, strategy: str, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only three blocks: each processes several items and reuses its shared memory for the next item."""

    def forget() -> None:
        plans._plans.clear()
        forget_calls()

    monkeypatch.setattr(limits, "MAX_GRID", 3)
    forget()
    try:
        for order in ("ascending", "descending", "random:1"):
            monkeypatch.setenv("CUNORM_CPU_ORDER", order)
            for case in taken(kind, strategy, [(9, 33, (5,)), (9, 20, (50,)), (250, 3, ())]):
                case.right(kind, case.run(kind, executor, tile=tile_of(kind, strategy)), executor)
        assert plans._plans
        assert all(one.grid <= 3 for plan in plans._plans.values() for one in plan.launches)
    finally:
        forget()


def test_few_channels_use_many_blocks() -> None:
    for op, data_format in itertools.product(("batch_norm_stats", "batch_norm_backward_reduce"), ("NCHW", "NHWC")):
        shape = (32, 64, 112, 112) if data_format == "NCHW" else (32, 112, 112, 64)
        plan = cunorm.plan(op, shape=shape, dtype="bfloat16", data_format=data_format, device="H200")
        assert plan.launches[0].grid >= 4 * 64


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(REDUCING))
def test_the_documented_example(strategy: str, executor: Executor) -> None:
    """dy of (4, 2) = 1, 1, 1, 2, 2, 2, 3, 3; x = 0..7; mean = invstd = weight = 1. Rearranged as planes if needed."""
    dy, x = np.float32([[1, 1], [1, 2], [2, 2], [3, 3]]), np.arange(8, dtype=np.float32).reshape(4, 2)
    shapes = [(4, 2), (4, 2, 1)] if strategy == "column" else [(1, 2, 4), (2, 2, 2)]
    for shape in shapes:
        if strategy != "column":
            dy_, x_ = (a.reshape(shape[0], shape[2], 2).transpose(0, 2, 1).copy() for a in (dy, x))
        else:
            dy_, x_ = dy.reshape(shape), x.reshape(shape)
        ones = executor.put(np.ones(2, np.float32))
        results = cunorm.batch_norm_backward_reduce(
            executor.put(dy_), executor.put(x_), ones, ones, ones, tile=tile_of("reduce", strategy)
        )
        assert [executor.get(a).tolist() for a in results] == [[7, 8], [21, 30], [21, 30], [7, 8]]


@pytest.mark.parametrize("offset", [1e3, -1e3])
@pytest.mark.parametrize("strategy", list(REDUCING))
def test_offsets(strategy: str, offset: float, executor: Executor) -> None:
    """Products are taken of centred values, and variances are not differences of sums of squares."""
    case = Case((9, 20, (41,)), layout=LAYOUT_OF[strategy], offset=offset)
    for kind in ("stats", "reduce"):
        case.right(kind, case.run(kind, executor, tile=tile_of(kind, strategy)), executor)


@pytest.mark.parametrize("constant", [0.1, 100.1, 1e4 + 0.1, 1e5 + 0.1])
@pytest.mark.parametrize("strategy", list(REDUCING))
def test_a_constant_channel_has_no_variance(strategy: str, constant: float, executor: Executor) -> None:
    case = Case((3, 5, (103,)), layout=LAYOUT_OF[strategy])
    case.x[:, 1::2] = constant
    mean, invstd = map(executor.get, case.run("stats", executor, tile=tile_of("stats", strategy)))
    assert np.all(mean[1::2] == np.float32(constant))
    assert np.all(np.abs(invstd[1::2] * np.sqrt(np.float64(np.float32(1e-5))) - 1) <= 2e-7)


@pytest.mark.parametrize("where", [(0, 0), (1, 51), (2, 102), (1, 7)])
@pytest.mark.parametrize("strategy", list(REDUCING))
def test_an_outlier(strategy: str, where: tuple[int, int], executor: Executor) -> None:
    """One element is 1e6: the first, the middle, the last or another."""
    case = Case((3, 5, (103,)), layout=LAYOUT_OF[strategy])
    case.x[where[0], 2, where[1]] = 1e6
    case.right("stats", case.run("stats", executor, tile=tile_of("stats", strategy)), executor)


@pytest.mark.parametrize("rows", [9001, 9011])
def test_an_outlier_in_a_row_left_over(rows: int, executor: Executor) -> None:
    """A row left over has moments of one element with deviation 0. A merge must still count its distance to others."""
    case = Case((rows, 7, ()), layout="last")
    case.x *= np.float32(1e-4)
    case.x[-1] = 1.0
    case.right("stats", case.run("stats", executor, tile=REDUCING["column"] | {"chunk": 64}), executor)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("kind", "strategy"), TILES, ids=NAMED)
def test_nan_and_infinity_stay_in_their_channel(kind: str, strategy: str, value: float, executor: Executor) -> None:
    for n, p in ((0, 0), (1, 51), (2, 102), (2, 101), (1, 7)):
        for name in ("x", "dy"):
            case = Case((3, 5, (103,)), layout=LAYOUT_OF[strategy])
            getattr(case, name)[n, 2, p] = value
            with np.errstate(all="ignore"):
                case.right(kind, case.run(kind, executor, tile=tile_of(kind, strategy)), executor)


@pytest.mark.parametrize("strategy", list(STREAMING))
def test_statistics_that_are_not_finite_stay_in_their_channel(strategy: str, executor: Executor) -> None:
    case = Case((3, 5, (7,)), layout=LAYOUT_OF[strategy])
    case.mean[1], case.invstd[3] = np.nan, np.inf
    with np.errstate(all="ignore"):
        for kind in ("elemt", "input"):
            case.right(kind, case.run(kind, executor, tile=tile_of(kind, strategy)), executor)


# ---- parts of a batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(REDUCING))
def test_uneven_parts_combine_to_the_whole_batch(strategy: str, executor: Executor) -> None:
    """The statistics and sums of three ranks with 1, 5 and 3 samples, gathered or added, equal those of one rank."""
    case = Case((9, 5, (11,)), layout=LAYOUT_OF[strategy], offset=3.0)
    parts = [slice(0, 1), slice(1, 6), slice(6, 9)]

    def part(kind: str, rows: slice) -> Any:
        tensors = {name: executor.put(a[rows]) for name, a in case.arrays(kind).items() if a.ndim > 1}
        return case.run(kind, executor, **tensors, tile=tile_of(kind, strategy))

    found = [part("stats", rows) for rows in parts]
    means, invstds = (executor.xp.stack(each) for each in zip(*found, strict=True))
    counts = executor.put(np.array([11, 55, 33]))
    gathered = cunorm.batch_norm_gather_stats(means, invstds, counts, tile=GATHER)
    case.right("stats", gathered, executor)
    sums = [part("reduce", rows) for rows in parts]
    case.right("reduce", tuple(sum(each[1:], each[0]) for each in zip(*sums, strict=True)), executor)


def gathered(executor: Executor, means: Any, invstds: Any, counts: Any, **options: Any) -> list[np.ndarray]:
    """The four results, compared with the oracle. Running statistics start at 1 and 2."""
    C = means.shape[1]
    dtype = options.pop("running", np.dtype(np.float32))
    running = [executor.put(np.full(C, value).astype(dtype)) for value in (1, 2)]
    names = {"running_mean": running[0], "running_var": running[1]}
    given = map(executor.put, (means, invstds, counts))
    with np.errstate(all="ignore"):
        mean, invstd = cunorm.batch_norm_gather_stats(*given, **names, **options, tile=GATHER)
        exact = reference.batch_norm_gather_stats(
            means, invstds, counts, running_mean=np.ones(C), running_var=np.full(C, 2.0), **options
        )
        results = [executor.get(a) for a in (mean, invstd, *running)]
        for name, came, want in zip(("mean", "invstd", "running_mean", "running_var"), results, exact, strict=True):
            # The merge runs in float64, so its error is negligible beside the rounding of the result.
            assert_within(name, came, want, 1e-13 * np.abs(want) + 1e-13, NAMES[came.dtype])
    return results


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_gathering_matches_the_oracle(dtype: str, executor: Executor) -> None:
    random = np.random.default_rng(0)
    for world, C in ((1, 1), (2, 5), (7, 129), (200, 3)):
        means = random.standard_normal((world, C)).astype(DTYPES[dtype])
        invstds = (0.1 + random.random((world, C))).astype(DTYPES[dtype])
        counts = random.integers(1, 1000, world)
        gathered(executor, means, invstds, counts)
        gathered(executor, means, invstds, counts, momentum=0.0)
        gathered(executor, means, invstds, counts, momentum=1.0, eps=0.0)


@pytest.mark.parametrize("counts", [
    np.array([3, 0, 5], np.int32),
    np.array([2**40, 0, 2**33], np.int64),
    np.array([0.5, 0.0, 0.25], np.float32),
    np.array([1.5, 0.0, 1e300], np.float64),
], ids=lambda counts: str(counts.dtype))  # fmt: skip
@pytest.mark.parametrize("running", [np.dtype(np.float64), DTYPES["bfloat16"]], ids=str)
def test_counts_and_running_statistics_of_any_dtype(counts: Any, running: Any, executor: Executor) -> None:
    """A rank with count 0 is absent; its values do not matter."""
    means, invstds = np.float32([[1, -2], [np.nan, 0], [3, 7]]), np.float32([[1, 2], [0, np.inf], [0.5, 300]])
    gathered(executor, means, invstds, counts, running=running)


def test_gathering_corner_cases(executor: Executor) -> None:
    means, invstds = np.float32([[1, -2], [3, 7]]), np.float32([[1, 2], [0.5, 1e4]])
    one = gathered(executor, means[:1], invstds[:1], np.array([1]))  # a total of one element: the variance stays biased
    assert one[3][0] == np.float32(0.9 * 2 + 0.1 * (1 - 1e-5))
    # invstd exceeds 1 / sqrt(eps): the computed variance is negative and counts as 0
    assert gathered(executor, means, invstds, np.array([0, 4]))[1][1] == np.float32(1 / np.sqrt(1e-5))
    far = np.float64([[1e8], [1e8 + 1]])
    gathered(executor, far, np.float64([[1], [1]]), np.array([4, 4]))
    for spoiled, rank in itertools.product((np.nan, np.inf, -np.inf), (0, 1)):
        strange = means.copy()
        strange[rank, 0] = spoiled
        found = gathered(executor, strange, invstds, np.array([2, 3]))
        assert all(np.isfinite(a[1]) for a in found)
    given = map(executor.put, (means, invstds, np.array([2, 3])))
    mean, invstd = cunorm.batch_norm_gather_stats(*given, tile=GATHER)
    assert executor.get(mean)[1] == found[0][1]
    assert executor.get(invstd)[1] == found[1][1]


def test_running_statistics_are_rounded_once(executor: Executor) -> None:
    """1 + 2^-11 + 2^-40 is above the midpoint of two float16. Rounded to float32 it is the midpoint and rounds down."""
    values = 1 + np.float64([[2.0**-11 + 2.0**-40, 2.0**-11, 2.0**-11 - 2.0**-40, 3 * 2.0**-11 - 2.0**-40]])
    for dtype in ("float16", "bfloat16"):
        scaled = (1 + (values - 1) * (8 if dtype == "bfloat16" else 1)).astype(np.float64)
        running = executor.put(np.zeros(4, DTYPES[dtype]))
        given = map(executor.put, (scaled, np.ones((1, 4)), np.array([5])))
        cunorm.batch_norm_gather_stats(*given, running_mean=running, momentum=1.0, tile=GATHER)
        step = 2.0**-10 if dtype == "float16" else 2.0**-7
        assert executor.get(running).astype(np.float64).tolist() == [1 + step, 1, 1, 1 + step]


def test_no_elements_at_all(executor: Executor) -> None:
    """All counts are 0, which only the kernel sees on a GPU. Results are NaN, and running statistics do not change."""
    plan = cunorm.plan(
        "batch_norm_gather_stats", shape=(2, 3), dtype="float32", device="cpu" if executor.name == "cpu" else 0
    )
    arrays = [np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.zeros(2, np.int64)]
    arrays += [np.zeros(3, np.float32) for _ in range(2)] + [np.full(3, 5, np.float32) for _ in range(2)]
    there = [executor.put(a) for a in arrays]
    addresses = [a.ctypes.data if executor.name == "cpu" else a.data.ptr for a in there]
    plan.launch((*addresses, 0, 1e-5, 0.1, 3, 3, 1))
    mean, invstd, *running = map(executor.get, there[3:])
    assert np.all(np.isnan(mean)) and np.all(np.isnan(invstd))
    assert all(np.all(a == 5) for a in running)


# ---- sizes past 2^31 ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def some_blocks(*wanted: int | None) -> Iterator[None]:
    """Run only some blocks of the next launches: per launch the first n, the last -n if n < 0, or all if None."""
    from cunorm.executors.cpu import executor as cpu

    whole = cpu.launch
    left = iter(wanted)

    def part(kernel: Any, grid: int, threads: int, shared_bytes: int, arguments: Any, **known: Any) -> None:
        count = next(left)
        blocks = None if count is None else (0, count) if count > 0 else (grid + count, grid)
        whole(kernel, grid, threads, shared_bytes, arguments, blocks=blocks, **known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "launch", part)
        yield


#: N, C, HxW, chunk or samples, and the number of the first sweep's last blocks that run. 33 channels leave rows over.
PAST = {
    "block": (2**18 + 2, 64, 128, 256, 16),
    "split": (2, 64, 2**24 + 128, 16384, 2),
    "column": (65075300, 33, 1, 512, 3),
}


@pytest.mark.parametrize("strategy", list(PAST))
def test_sums_past_2_to_the_31_elements(strategy: str) -> None:
    """Check the end of a tensor of more than 2^31 elements. Only the last blocks of the sweep run.

    The tensors are sparse memory, in which only the pages that are written exist. All other elements are zeros.
    """
    N, C, HxW, chunk, blocks = PAST[strategy]
    assert N * C * HxW > 2**31
    dy, x = (sparse(N * C * HxW, DTYPES["bfloat16"]).reshape(N, C, HxW) for _ in range(2))
    case = Case((2, C, (HxW % 1000,)) if strategy != "column" else (7, C, (1,)), "bfloat16")
    n = 7 if strategy == "column" else 1
    end = (slice(N - n, N), slice(C - 1, C) if strategy == "split" else slice(None), slice(-100, None))
    dy[end], x[end] = (a[-n:, end[1], -100:] for a in (case.dy, case.x))
    mean, invstd = np.linspace(0.5, 1, C, dtype=np.float32), np.ones(C, np.float32)
    tile = {"strategy": strategy, "threads": 64}
    tile |= {"channels": 4, "samples_per_block": chunk} if strategy == "block" else {"chunk": chunk}
    tile |= {"threads": 128, "columns": 128} if strategy == "column" else {}
    workspace = sparse(2**28, np.uint8)
    with some_blocks(-blocks, None, None):
        sums = cunorm.batch_norm_backward_reduce(dy, x, mean, invstd, tile=tile, workspace=workspace)
    exact = reference.batch_norm_backward_reduce(dy[end], x[end], mean[end[1]], invstd[end[1]])
    bounds = batch_reduce(dy[end], x[end], mean[end[1]], invstd[end[1]], "bfloat16")
    for came, want, bound in zip(sums, exact, bounds, strict=True):
        assert_within("sums", came[end[1]], want, bound, "float32")
        assert np.count_nonzero(came) == want.size
    # Moments of zeros in the workspace have count 0, so the results are those of the blocks that ran.
    with some_blocks(-blocks, None, None):
        found = cunorm.batch_norm_stats(x, tile=tile, workspace=sparse(2**28, np.uint8))
    swept = {
        "block": x[2**18 :],
        "split": x[1:, -1:, HxW - 128 - (2 * blocks - 1) * chunk :],
        "column": x[(PAST["column"][0] // 16 - 1) // 512 * 512 * 16 :],
    }[strategy]
    exact = reference.batch_norm_stats(swept)
    for came, want, bound in zip(found, exact, batch_stats(swept, *exact, "bfloat16"), strict=True):
        assert_within("moments", came[end[1]], want, bound, "float32")


@pytest.mark.parametrize(("strategy", "shape"), [
    ("block", (2**18 + 2, 64, 128)),
    ("block", (1, 1, 2**31 + 1030)),  # a plane of more elements than an int can count
    ("block", (1, 2, 2**31 - 2050)),
    ("column", (65075300, 33, 1)),
], ids=str)  # fmt: skip
def test_elements_past_2_to_the_31(strategy: str, shape: tuple[int, ...]) -> None:
    """Check the end of a tensor of more than 2^31 elements, which the first blocks process."""
    N, C, HxW = shape
    dy, x, out = (sparse(N * C * HxW, DTYPES["bfloat16"]) for _ in range(3))
    random = np.random.default_rng(0)
    for a in (dy, x):
        a[-1000:] = random.standard_normal(1000).astype(a.dtype)
    mean, invstd, sum_dy, sum_dy_xmu = random.standard_normal((4, C)).astype(np.float32)
    tile = {"strategy": strategy, "threads": 64}
    tile |= {"chunk": 2048} if strategy == "block" else {"threads": 128, "columns": 128, "chunk": 256}
    channel = (np.arange(N * C * HxW - 1000, N * C * HxW) // HxW) % C
    row = (1, 1000)  # one channel per element
    for kind in ("elemt", "input"):
        tensors = [a.reshape(shape) for a in ((x, out) if kind == "elemt" else (dy, x, out))]
        saved = (mean, invstd, None)
        alone = tuple(None if a is None else a[channel] for a in saved)
        if kind == "elemt":
            with some_blocks(4):
                cunorm.batch_norm_elemt(tensors[0], *saved, out=tensors[-1], tile=tile)
            arrays = (x[-1000:].reshape(row), *alone, None)
            exact, bound = reference.batch_norm_elemt(*arrays), batch_elemt(*arrays, "bfloat16")
        else:
            given = (*tensors[:2], *saved, sum_dy, sum_dy_xmu, 9)
            with some_blocks(4):
                cunorm.batch_norm_backward_elemt(*given, out=tensors[-1], tile=tile)
            arrays = (dy[-1000:].reshape(row), x[-1000:].reshape(row), *alone, sum_dy[channel], sum_dy_xmu[channel])
            exact, bound = reference.batch_norm_backward_elemt(*arrays, 9), batch_input(*arrays, 9, "bfloat16")
        assert_within(kind, out[-1000:].reshape(row), exact, bound, "bfloat16")
        out[-1000:] = 0


def test_a_cluster_past_2_to_the_31_elements() -> None:
    """Only the last cluster runs, whose channel is the last one. The tensors are sparse memory."""
    N, C, HxW = 2, 2**22, 301
    assert N * C * HxW > 2**31
    dy, x = (sparse(N * C * HxW, DTYPES["bfloat16"]).reshape(N, C, HxW) for _ in range(2))
    case, last = Case((N, 1, (HxW,)), "bfloat16"), (slice(None), slice(C - 1, C))
    dy[last], x[last] = case.dy, case.x
    found = [np.zeros(C, np.float32) for _ in range(6)]
    mean, invstd = np.linspace(0.5, 1, C, dtype=np.float32), np.ones(C, np.float32)
    tile = REDUCING["cluster"]
    with some_blocks(-tile["cluster"]):
        cunorm.batch_norm_stats(x, tile=tile, out=(found[0], found[1]))
    with some_blocks(-tile["cluster"]):
        cunorm.batch_norm_backward_reduce(dy, x, mean, invstd, tile=tile, out=tuple(found[2:]))
    given = (dy[last], x[last], mean[-1:], invstd[-1:])
    exact = (*reference.batch_norm_stats(x[last]), *reference.batch_norm_backward_reduce(*given))
    bounds = (*batch_stats(x[last], *exact[:2], "bfloat16"), *batch_reduce(*given, "bfloat16"))
    for came, want, bound in zip(found, exact, bounds, strict=True):
        assert_within("result", came[-1:], want, bound, "float32")
        assert np.count_nonzero(came) == 1


# ---- legality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "tile", "sentence"), [
    ((4, 8), REDUCING["split"], "split: channels-last data has no planes"),
    ((4, 8), REDUCING["block"], "block: channels-last data has no planes"),
    ((4, 8, 3), REDUCING["column"], "column: channels-first data has no rows of channels"),
    ((4, 1, 3), REDUCING["column"], "column: channels-first data has no rows of channels"),
    ((4, 8, 3), {**REDUCING["split"], "chunk": 2**21}, "split: chunk is 2097152"),
    ((4, 8, 3), {**REDUCING["split"], "threads": 65}, "split: threads is 65"),
    ((4, 8), {**REDUCING["column"], "columns": 65}, "column: columns is 65, expected at most threads, 64"),
    ((4, 20000, 2), {**REDUCING["block"], "channels": 20000}, "block: needs .* bytes of shared memory"),
    ((4, 8, 2**19), REDUCING["block"], "block: channels is 4, expected slabs of at most 1048576 elements"),
    ((2**21, 2, 2), {**REDUCING["block"], "samples_per_block": 2**21}, "block: samples_per_block is 2097152"),
    ((4, 8), REDUCING["cluster"], "cluster: channels-last data has no planes"),
    ((4, 8, 3), {**REDUCING["cluster"], "cluster": 3}, "cluster: cluster is 3, but .* supports a power of two"),
    ((4, 8, 3), {**REDUCING["cluster"], "threads": 65}, "cluster: threads is 65"),
    ((2**15, 2, 2**17), REDUCING["cluster"], "a channel has up to 1073774592 packs, expected at most 1073741824"),
    ((1, 2, 2**30 + 1), REDUCING["cluster"], "HxW is 1073741825, expected planes of at most 1073741824 elements"),
], ids=str)  # fmt: skip
def test_refusals(shape: tuple[int, ...], tile: dict[str, Any], sentence: str) -> None:
    with pytest.raises(cunorm.UnsupportedTile, match=sentence):
        cunorm.plan("batch_norm_stats", shape=shape, dtype="float32", device="cpu", tile=tile)
    streaming = STREAMING.get(tile["strategy"], {})
    if "channels-" in sentence and streaming:
        with pytest.raises(cunorm.UnsupportedTile, match=sentence):
            cunorm.plan("batch_norm_elemt", shape=shape, dtype="float32", device="cpu", tile=streaming)


def test_every_problem_has_a_legal_tile() -> None:
    for shape, data_format, dtype in itertools.product(
        ((1, 1), (1, 1, 2**22), (3, 2, 2), (2, 4099), (2, 64, 3, 2**20)), ("NCHW", "NHWC"), ("float16", "float64")
    ):
        for op in ("stats", "elemt", "backward_reduce", "backward_elemt"):
            made = cunorm.plan(f"batch_norm_{op}", shape=shape, dtype=dtype, data_format=data_format, device="A100")
            assert made.launches
    assert set(STATS) == {"block", "cluster", "split", "column"}


def test_clusters_need_an_architecture_that_has_them() -> None:
    """A cluster of one block is legal on all of them."""
    one, two = ({**REDUCING["cluster"], "cluster": cluster} for cluster in (1, 2))
    for op in ("batch_norm_stats", "batch_norm_backward_reduce"):
        made = cunorm.plan(op, shape=(4, 8, 3), dtype="float32", device="A100", tile=one)
        assert [launch.kernel for launch in made.launches] == [f"{op}_cluster"]
        with pytest.raises(cunorm.UnsupportedTile, match=r"cluster is 2, but NVIDIA A100.* supports no clusters"):
            cunorm.plan(op, shape=(4, 8, 3), dtype="float32", device="A100", tile=two)
