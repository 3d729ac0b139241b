"""The traffic gate, which compares the counted bytes that kernels move with the byte floor; tests of the counting."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.devices import KNOWN, known
from cunorm.core.errors import KernelFault
from cunorm.executors.cpu.checked import SECTOR_BYTES, TRACE, Moves
from cunorm.executors.cpu.guarded_arrays import PARAMETER, ROLES, TENSOR, WORKSPACE
from cunorm.ops.group_norm import grid
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Target
from cunorm.traffic import reuse, sampling, traffic
from cunorm.traffic.traffic import Traffic, record, trace_by_tickets
from tests.kernels.kernel_checks import compiled, launch
from tests.support.paths import KERNELS
from tests.traffic.traffic_limits import EDGE, EFFICIENT, ROWS, SPLIT_BACKWARD, Row

STRATEGIES = [(name, strategy) for name, op in OPS.items() for strategy in op.strategies]
#: For strips of rows, the formula counts a strip as if it crossed a boundary of a pack, even if not.
LOOSE = 0.998


@cache
def measured(row: Row, N: int | None = None, mask: tuple[bool, ...] = (True, True, True)) -> Traffic:
    made: Traffic = row.plan(N, mask).traffic()
    return made


def _first(op: str, strategy: str) -> Row:
    return next(row for row in ROWS if (row.op, row.strategy) == (op, strategy))


def parameters(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, marks=[pytest.mark.long] if row.long else [], id=str(row)) for row in rows]


# ---- the gate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", parameters(list(ROWS)))
def test_traffic_is_within_the_limits_of_the_table(row: Row) -> None:
    found = measured(row)
    tensors = found.of(TENSOR)
    assert found.sample is None
    assert 1 - 1e-9 <= found.tensor_ratio <= row.tensors + 1e-9, f"requests {found.tensor_ratio:.4f} of the floor"
    assert found.fetched_ratio <= row.fetched + 1e-9, f"fetches {found.fetched_ratio:.4f} of the floor"
    assert tensors.wide_efficiency >= row.wide, (
        f"sector efficiency of 16-byte accesses is {tensors.wide_efficiency:.4f}"
    )
    for one in found.launches:  # no access bypasses load and store
        for role, moves in one.roles.items():
            assert (moves.lane_loaded, moves.lane_stored) == (moves.raw_loaded, moves.raw_stored), (one.entry, role)
    plan = row.plan()
    assert plan.strategy is not None and plan.tile is not None
    said, moved = plan.strategy.of(plan.problem, plan.tile).workspace_traffic, found.of(WORKSPACE)
    if row.strategy == "split" and (row.op == "layer_norm_backward" or row.op.startswith("rms_norm")):
        assert LOOSE * said <= moved.nbytes <= said
    elif row.op in ("group_norm_backward", "instance_norm_backward") and row.strategy in ("split", "grid"):
        # In a sweep along channels, some lanes of a warp load the same words, so a warp requests fewer than its lanes.
        flat = plan.problem.layout == "NCHW" and plan.problem.HxW > 1
        assert (moved.nbytes if flat else moved.lane_nbytes) == said
        assert moved.nbytes <= said
    else:
        assert moved.nbytes == said


def test_a_row_with_looser_limits_than_the_rule_has_a_reason() -> None:
    for row in ROWS:
        twice = SPLIT_BACKWARD if row.op.endswith("backward") else 3 / 2
        rule = twice if row.strategy in ("split", "grid") and not row.op.startswith("batch_norm") else EDGE
        if row.tensors > rule or row.fetched > rule * EDGE or row.wide < EFFICIENT:
            assert row.why, row


@pytest.mark.parametrize("strategy", ["warp", "block", "split"])
@pytest.mark.parametrize("op", ["group_norm_backward", "layer_norm_backward"])
def test_masked_outputs_cause_no_traffic(op: str, strategy: str) -> None:
    """Floor and traffic depend on the outputs: without dx there is no second sweep, for dbeta alone x is not read."""
    row = _first(op, strategy)
    for mask, tensors in (((False, True, True), 2), ((False, False, True), 1)):
        found = measured(row, mask=mask)
        assert found.floor_bytes == tensors * found.problem.nbytes
        assert found.tensor_ratio == pytest.approx(1)
        names = {entry.entry for entry in found.launches}
        assert not any(name.endswith("_input") for name in names)


@pytest.mark.parametrize(("op", "strategy"), STRATEGIES)
def test_every_strategy_is_in_the_table(op: str, strategy: str) -> None:
    rows = [row for row in ROWS if (row.op, row.strategy) == (op, strategy)]
    assert rows
    assert op == "batch_norm_gather_stats" or {row.dtype for row in rows} == {"float32", "bfloat16"}


def test_an_access_that_bypasses_load_and_store_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    kernel = compiled((KERNELS / "bypass.cu").read_text(), "bypass", threads=32)
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    launch(kernel, 1, 32, 0, [x, y], [-1])
    assert (y == 1).all()
    with pytest.raises(KernelFault, match=r"thread 7: 4-byte load at bypass\.cu:7 of array0 that bypasses load and st"):
        launch(kernel, 1, 32, 0, [x, y], [7])


# ---- the second read of `grid` ---------------------------------------------------------------------------------------


def _second_reads(op: str, tile: dict[str, Any], shape: tuple[int, ...], groups: int, layout: str) -> Traffic:
    plan = cunorm.plan(
        op, shape=shape, dtype="bfloat16", num_groups=groups, data_format=layout, device="cpu", tile=tile
    )
    made: Traffic = plan.traffic()
    assert made.sample is None and made.reuse.again > 0
    return made


@pytest.mark.parametrize("lead", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("op", "layout", "shape", "slab"),
    [
        ("group_norm_backward", "NCHW", (1, 32, 49152), 1),
        pytest.param("group_norm", "NCHW", (1, 48, 65536), 1, marks=pytest.mark.long),
        ("group_norm_backward", "NHWC", (1, 16384, 128), 8),
    ],
)
def test_second_reads_hit_the_cache_with_grid_and_miss_it_with_split(
    op: str, layout: str, shape: tuple[int, ...], slab: int, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with an eighth of H200's multiprocessors and L2 cache, so an eighth of the elements is enough."""
    small = dataclasses.replace(known("H200"), multiprocessors=16, l2_bytes=known("H200").l2_bytes // 8)
    monkeypatch.setitem(KNOWN, "H200", small)
    groups = shape[-1] // 4 if layout == "NHWC" else shape[1] // 4
    chunk = 64 if layout == "NHWC" else 1024
    tile = {
        "strategy": "grid",
        "threads": 128,
        "chunk": chunk,
        "groups": slab,
        "prefetch_tiles": lead if slab == 1 else 1,
        "keep": "l2",
    }
    found = _second_reads(op, tile, shape, groups, layout)
    assert found.reuse.within(small.l2_bytes // 2) >= 0.95
    assert found.reuse.at(0.95) <= grid.GroupGrid(found.problem, cunorm.Tile.of(tile)).reach(small)
    other = _second_reads(op, {"strategy": "split", "threads": 128, "chunk": chunk}, shape, groups, layout)
    assert other.reuse.within(small.l2_bytes // 2) < 0.95


# ---- linearity in slices, samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "strategy"), STRATEGIES)
def test_bytes_are_linear_in_slices(op: str, strategy: str) -> None:
    row = _first(op, strategy)
    # Several rows or samples form one partial result. Use a multiple of that number, and more than one.
    of_rows = "normalized_shape" in OPS[op].takes
    step = 8 * row.tile.get("rows_per_team", 1) if of_rows else row.tile.get("samples_per_team", 1)
    step *= 2 if strategy == "column" else 1
    few, some, many = (measured(row, step * N) for N in (2, 4, 8))
    if op.startswith("batch") and strategy == "column" and "gather" not in op:  # chunks span all rows together
        few, some, many = (measured(row, N) for N in (2, 4, 8))
    for role in ROLES:
        # The number of requests with which a fold reads the workspace's rows grows in steps, not linearly.
        every = (
            [one.name for one in dataclasses.fields(Moves)] if role == TENSOR else ["loaded", "stored", "raw_stored"]
        )
        for name in every:
            a, b, c = (getattr(found.of(role), name) for found in (few, some, many))
            assert c - b == 2 * (b - a), (role, name)
    assert many.floor_bytes == 2 * some.floor_bytes == 4 * few.floor_bytes


@pytest.mark.parametrize(
    ("op", "strategy", "N"),
    [
        ("group_norm_backward", "block", 64),
        ("group_norm_backward", "grid", 32),  # more samples are not resident together, and reuse distances grow less
        ("group_norm_backward", "split", 64),  # 64 samples have enough partial rows to be summed in slices
        ("group_norm", "split", 64),
        ("layer_norm_backward", "warp", 4096),
        ("layer_norm_backward", "split", 128),
        ("batch_norm_stats", "split", 64),
        ("batch_norm_stats", "column", 64),
    ],
)
def test_a_sampled_count_equals_the_whole_count(
    op: str, strategy: str, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _first(op, strategy)
    whole = measured(row, N)
    for limit in ("WHOLE", "LARGEST"):  # LARGEST applies if blocks take turns
        monkeypatch.setattr(sampling, limit, 2**18)
    part: Traffic = row.plan(N).traffic()
    assert part.sample is not None
    assert part.sample.total == N > part.sample.many == 2 * part.sample.few
    assert [one.entry for one in part.launches] == [one.entry for one in whole.launches]
    assert [one.blocks for one in part.launches] == [one.blocks for one in whole.launches]
    for role in ROLES:
        for name in ("loaded", "stored", "load_sectors", "store_sectors", "lane_loaded", "wide_bytes", "raw_loaded"):
            assert getattr(part.of(role), name) == getattr(whole.of(role), name), (role, name)
    assert part.fetched_ratio == whole.fetched_ratio
    assert part.reuse.again == whole.reuse.again
    assert part.reuse.at(0.5) == pytest.approx(whole.reuse.at(0.5), rel=0.2, abs=4096)
    assert str(part.sample) in str(part)


def test_a_sample_may_be_larger_than_the_limit_of_whole_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 rows, samples of 24 rows: no smaller sample extrapolates linearly to the problem's blocks."""
    row = dataclasses.replace(_first("batch_norm_stats", "column"), sizes=(1024, 64, 24))
    row = dataclasses.replace(row, tile=row.tile | {"chunk": 256})
    whole = measured(row)
    monkeypatch.setattr(sampling, "WHOLE", 2**15)
    monkeypatch.setattr(sampling, "LARGEST", 2**20)
    part: Traffic = row.plan().traffic()
    assert part.sample is not None and part.sample.many * 24 * 64 > 2**15
    assert part.of(TENSOR) == whole.of(TENSOR)
    monkeypatch.setattr(sampling, "LARGEST", 2**21)  # the problem is not larger than that
    assert row.plan().traffic().sample is None


def test_a_sample_has_a_workspace_if_the_problem_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of 8 samples is one row of results and needs no workspace, so it cannot be extrapolated to many rows."""
    row = _first("batch_norm_stats", "block")
    whole = measured(row, 64)
    monkeypatch.setattr(sampling, "WHOLE", 2**19)  # 16 samples
    monkeypatch.setattr(sampling, "LARGEST", 2**20)
    part: Traffic = row.plan(64).traffic()
    assert part.sample is not None and part.sample.few == 2 * row.tile["samples_per_block"]
    assert part.of(WORKSPACE) == whole.of(WORKSPACE)


def test_a_problem_of_one_sample_is_sampled_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(_first("group_norm_backward", "block"), sizes=(1, 64, 1024, 16))
    whole = measured(row)
    monkeypatch.setattr(sampling, "WHOLE", 2**17)
    part: Traffic = row.plan().traffic()
    assert part.sample is not None and part.sample.axis == "group"
    assert part.of(TENSOR) == whole.of(TENSOR)


def test_a_problem_too_large_to_count_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", 2**10)
    monkeypatch.setattr(sampling, "LARGEST", 2**12)
    plan = cunorm.plan("layer_norm", shape=(1, 8192), dtype="float32", normalized_shape=8192, device="cpu")
    with pytest.raises(
        ValueError, match=r"rows=1 length=8192.* has 16384 elements .* counts up to 4096.* cannot be cut"
    ):
        plan.traffic()


# ---- reuse ----------------------------------------------------------------------------------------------------------


def trace(sectors: list[int], blocks: list[int], regions: list[int]) -> np.ndarray:
    found = np.zeros(len(sectors), TRACE)
    found["sector"], found["block"], found["region"], found["bytes"] = sectors, blocks, regions, 4
    return found


def stack_distances(traces: list[np.ndarray], resident: list[int], wanted: list[bool]) -> list[int]:
    """Depth at which each load finds its sector in a stack of sectors, with the latest sector on top."""
    stack: list[int] = []
    found = []
    for one, alive in zip(traces, resident, strict=True):
        queues = [one[one["block"] == block].tolist() for block in range(12)]
        queues = [queue for queue in queues if queue]
        live, queues = queues[:alive], queues[alive:]
        while live:
            at = 0
            while at < len(live):
                sector, _, _, _, region, _ = live[at].pop(0)
                if sector in stack:
                    if region % 2 == 0 and wanted[region // 2]:
                        found.append(stack.index(sector))
                    stack.remove(sector)
                stack.insert(0, sector)
                if live[at]:
                    at += 1
                elif queues:
                    live[at] = queues.pop(0)
                    at += 1
                else:
                    del live[at]
    return found


def test_distances_equal_those_of_a_stack_of_sectors() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        traces, resident = [], []
        for _ in range(int(random.integers(1, 4))):
            count, sectors, blocks = (int(random.integers(0, most)) for most in (300, 80, 12))
            at = random.integers(0, sectors + 1, count)
            regions = 2 * (at % 3) + random.integers(0, 2, count)
            traces.append(
                trace((at * 12345).tolist(), random.integers(0, blocks + 1, count).tolist(), regions.tolist())
            )
            resident.append(int(random.integers(1, 9)))
        wanted = [True, False, True]
        found = reuse.replay(traces, resident, wanted)
        assert found.distances.tolist() == stack_distances(traces, resident, wanted)
        for one, fetched, asked in zip(traces, found.fetched, found.asked, strict=True):
            for region in range(6):
                own = one[one["region"] == region]
                assert fetched[region] == len(set(zip(own["sector"].tolist(), own["block"].tolist(), strict=True)))
                assert asked[region] == 4 * len(own)


def test_distances_of_a_trace_that_is_longer_than_the_time_axis() -> None:
    """Marks are compacted when the time axis is full: far more accesses than sectors, and then more sectors."""
    rounds = np.tile(np.arange(1000, dtype=np.uint64), 3000)
    far = np.arange(2_000_000, dtype=np.uint64) % 1_500_000
    sectors = np.concatenate([rounds, far])
    one = np.zeros(len(sectors), TRACE)
    one["sector"] = sectors
    found = reuse.replay([one], [1], [True]).distances
    assert len(found) == len(sectors) - 1_500_000
    assert (found[: len(rounds) - 1000] == 999).all()
    assert (found[-500_000:] == 1_499_999).all()


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_the_work_of_a_ticket_is_one_tile_whatever_warp_runs_first(order: str) -> None:
    """After a barrier, the executor may run other warps, and other lanes, before the thread that draws a ticket."""
    # A tile has 16 sectors.
    tile = {"strategy": "grid", "threads": 64, "chunk": 64, "groups": 1, "prefetch_tiles": 1, "keep": "l2"}
    plan = cunorm.plan("group_norm", shape=(4, 8, 256), dtype="float32", num_groups=4, device="cpu", tile=tile)
    main, count = plan.launches[-1], record(plan, order)[-1]
    found = trace_by_tickets(count, main)
    sector = found["sector"].astype(np.int64) - count.starts["x"] // SECTOR_BYTES
    loads = (found["region"] == 2 * list(count.starts).index("x")) & (sector >= 0)
    assert main.grid == 4 * 4 * 4  # as many blocks as tiles, so most draw twice
    tickets = {(int(at) // 16, int(ticket)) for at, ticket in zip(sector[loads], found["block"][loads], strict=True)}
    assert len(tickets) == len({ticket for _, ticket in tickets}) == 2 * main.grid  # sums and outputs
    assert found["phase"].max() > 1


def test_shares_and_distances_of_reuse() -> None:
    found = reuse.Reuse.of(1000, np.arange(101))
    assert (found.reads, found.again) == (1000, 101)
    assert found.at(0.5) == 50 * 32
    assert found.within(50 * 32) == pytest.approx(0.5)
    assert (found.within(-1), found.within(100 * 32)) == (0, 1)
    assert reuse.Reuse.of(10, np.zeros(4)).within(0) == 1
    nothing = reuse.Reuse.of(10, np.empty(0))
    assert (nothing.again, nothing.within(0), nothing.at(0.5)) == (0, 1, 0)


def test_a_second_sweep_reads_again_after_all_tensors_and_a_single_sweep_never_does() -> None:
    split, block = (measured(_first("group_norm_backward", strategy)) for strategy in ("split", "block"))
    assert block.reuse.again == 0
    assert split.reuse.again == split.reuse.reads // 2
    # All blocks run at once. Each reads its part again after all have read dy and x, and some have written dx.
    assert 0.6 * split.floor_bytes < split.reuse.at(0) <= split.reuse.at(1) < 1.05 * split.floor_bytes
    assert measured(_first("batch_norm_stats", "column")).reuse.again == 0


@pytest.mark.parametrize("plane", [(8, 8), (16, 16)], ids=str)
def test_moments_of_neighbouring_elements_are_in_different_banks(plane: tuple[int, int]) -> None:
    """Planes whose threads are a power of two have as few bank conflicts as planes of an odd size.

    The counter counts the four numbers of a set of moments one by one, so that its ratio is above 1 without a conflict.
    """

    def conflicts(plane: tuple[int, int]) -> float:
        tile = cunorm.Tile("block", channels=4, samples_per_block=32, threads=256)
        plan = cunorm.plan("batch_norm_stats", shape=(32, 8, *plane), dtype="bfloat16", device="cpu", tile=tile)
        return float(plan.traffic().bank_conflicts)

    assert conflicts(plane) <= 1.05 * conflicts((7, 7))


# ---- the counting ---------------------------------------------------------------------------------------------------


def test_counts_equal_those_computed_by_hand() -> None:
    row = _first("group_norm_backward", "block")  # 16 groups of 4 channels and 1024 positions
    found = measured(row)
    main, sums = found.launches
    groups, tensor = 4 * 4, 4 * 16 * 1024 * 4
    assert found.floor_bytes == 3 * tensor
    assert (main.entry, main.blocks, main.threads) == ("group_norm_backward_block", groups, 64)
    assert main.roles[TENSOR].loaded == 2 * tensor and main.roles[TENSOR].stored == tensor
    assert main.roles[TENSOR].load_requests == 2 * tensor // 512
    assert main.roles[TENSOR].load_sectors == main.roles[TENSOR].load_fetched == 2 * tensor // 32
    assert main.roles[PARAMETER].loaded == groups * (4 + 4 + 4 * 4)  # mean, rstd, gamma of a group
    assert main.roles[WORKSPACE].stored == sums.roles[WORKSPACE].loaded == 4 * 16 * 8
    assert sums.roles[PARAMETER].stored == 2 * 16 * 4
    assert main.barriers_per_block == int(main.barriers_per_block) >= 1
    assert main.shuffles_per_block > 0
    assert found.bank_conflicts >= 1
    assert main.resident == 6 * 132  # limited by its 32 KiB of shared memory


def test_a_plan_without_launches_has_no_traffic() -> None:
    for options in ({"shape": (0, 8, 4)}, {"shape": (2, 8, 4), "output_mask": (False, False, False)}):
        plan = cunorm.plan("group_norm_backward", dtype="float32", num_groups=2, device="cpu", **options)
        found = plan.traffic()
        assert (found.floor_bytes, found.total, found.launches) == (0, Moves(), ())
        assert (found.tensor_ratio, found.fetched_ratio, found.bank_conflicts) == (0, 0, 1)
        assert "nothing to launch" in str(found)


def test_a_plan_for_another_device_is_counted_on_the_cpu_for_that_device() -> None:
    row = _first("group_norm", "block")
    there = dataclasses.replace(row.plan(), place=Target("gpu", 0, known("A100")))
    found = there.traffic()
    assert found.device.name == known("A100").name
    assert found.launches[0].resident == 8 * 108
    assert found.of(TENSOR) == measured(row).of(TENSOR)


@pytest.mark.parametrize(
    ("op", "outputs", "tensors"),
    [
        ("group_norm", ("y", "mean", "rstd"), 2),
        ("layer_norm_backward", ("dx",), 3),
        ("layer_norm_backward", ("dgamma", "dbeta"), 2),
        ("layer_norm_backward", ("dbeta",), 1),
        ("batch_norm_stats", ("mean", "invstd"), 1),
        ("batch_norm_elemt", ("y",), 2),
        ("batch_norm_backward_reduce", ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta"), 2),
        ("batch_norm_backward_reduce", ("dbeta",), 1),
        ("batch_norm_backward_elemt", ("dx",), 3),
        ("batch_norm_gather_stats", ("mean", "invstd"), 2),
        ("group_norm_backward", (), 0),
    ],
)
def test_the_byte_floor(op: str, outputs: tuple[str, ...], tensors: int) -> None:
    problem = dataclasses.replace(_first(op, next(iter(OPS[op].strategies))).plan().problem, outputs=outputs)
    assert traffic.floor_bytes(problem) == tensors * problem.nbytes


def test_json_and_text_contain_the_same() -> None:
    found = measured(_first("group_norm_backward", "split"))
    document = json.loads(json.dumps(found.as_dict()))
    assert document["schema"] == "cunorm-traffic/1"
    assert document["executor"] == "cpu executor: counted, not timed"
    assert document["tensor_ratio"] == pytest.approx(5 / 3)
    assert document["roles"]["tensor"]["loaded"] == found.of(TENSOR).loaded
    assert [one["entry"] for one in document["launches"]] == [one.entry for one in found.launches]
    text = str(found)
    assert "counted, not timed" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert all(one.entry in text for one in found.launches)
