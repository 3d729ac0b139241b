"""Hostile problems of the strategies of BatchNorm's five ops."""

from __future__ import annotations

from collections.abc import Iterator

from tests.battery.case import ALL_OFF, FAR, MIXED, NO_PARAMETERS, SAME_OFF, Case, Named, masked

BATCH_SLABS: Named = {
    "a short last slab and range": {"shape": (5, 7, 9), "shifts": SAME_OFF},
    "several parts per channel, different alignments": {"shape": (3, 5, 9), "channels": 2, "shifts": ALL_OFF},
    "one row of results": {"shape": (2, 7, 35), "samples_per_block": 8},
    "one channel": {"shape": (3, 1, 70)},
    "planes of two elements, more channels than threads": {"shape": (3, 140, 2), "channels": 140},
    "long planes": {"shape": (1, 2, 1100)},
    "more samples than a chain": {"shape": (40, 2, 5), "samples_per_block": 64},
    "many samples per thread": {"shape": (41, 4, 64), "samples_per_block": 64},
    "many samples per thread, ragged": {"shape": (41, 4, 63), "samples_per_block": 64, "shifts": SAME_OFF},
    "one block for all": {"shape": (5, 9, 20), "grid": 1},
    "rows in slices": {"shape": (265, 3, 2)},
    "rows in several rounds": {"shape": (200, 9, 2), "samples_per_block": 1},
    "NaN in a neighbour": {"shape": (3, 7, 5), "nan": (1, 2, 4)},
    "a constant far from zero": {"shape": (3, 5, 35), **FAR},
    "16 bits": {"shape": (5, 7, 9), "shifts": ALL_OFF, **MIXED},
}
BATCH_PLANES: Named = {
    "a short last chunk": {"shape": (2, 5, 35), "shifts": SAME_OFF},
    "one row of results": {"shape": (1, 5, 13), "shifts": ALL_OFF},
    "one channel": {"shape": (3, 1, 70)},
    "more batches than a chain": {"shape": (1, 1, 17000), "chunk": 20000, "shifts": SAME_OFF},
    "one block for all": {"shape": (5, 9, 20), "grid": 1},
    "rows in slices": {"shape": (133, 3, 5)},
    "rows in several rounds": {"shape": (200, 9, 2)},
    "NaN in a neighbour": {"shape": (2, 3, 21), "nan": (0, 1, 20)},
    "16 bits": {"shape": (5, 7, 19), "shifts": ALL_OFF, **MIXED},
}
#: For clusters of two blocks of 64 threads.
BATCH_CHANNELS: Named = {
    "planes at other places of a pack": {"shape": (7, 5, 35), "shifts": SAME_OFF},
    "tensors at different places of a pack": {"shape": (7, 5, 35), "shifts": ALL_OFF},
    "whole packs": {"shape": (7, 5, 32)},
    "whole packs, misaligned": {"shape": (7, 5, 32), "shifts": SAME_OFF},
    "fewer packs than threads": {"shape": (2, 3, 5)},
    "an idle block": {"shape": (1, 3, 4)},
    "planes of two elements": {"shape": (3, 140, 2)},
    "one channel": {"shape": (3, 1, 70)},
    "a plane longer than a step": {"shape": (2, 2, 1100), "shifts": SAME_OFF},
    "more batches than a chain": {"shape": (1, 2, 34000), "shifts": SAME_OFF},
    "two clusters for nine": {"shape": (5, 9, 20), "grid": 4},
    "one cluster for all": {"shape": (5, 9, 20), "grid": 2},
    "NaN in a neighbour": {"shape": (3, 7, 5), "nan": (1, 2, 4)},
    "a constant far from zero": {"shape": (3, 5, 35), **FAR},
    "16 bits": {"shape": (5, 7, 19), "shifts": ALL_OFF, **MIXED},
}
BATCH_ROWS: Named = {
    "whole rows": {"shape": (7, 8), "shifts": ALL_OFF},
    "wide rows and one left over": {"shape": (17, 5), "shifts": SAME_OFF},
    "rows left over alone": {"shape": (3, 33)},
    "positions": {"shape": (3, 6, 7), "last": True},
    "idle threads": {"shape": (30, 20), "chunk": 15},
    "more columns than threads": {"shape": (5, 264)},
    "two blocks for three blocks of columns": {"shape": (5, 520), "grid": 2},
    "few columns per block": {"shape": (75, 20), "columns": 4, "chunk": 20, "shifts": SAME_OFF},
    "more rows left over than threads": {"shape": (3, 65)},
    "one row of results": {"shape": (20, 8), "chunk": 100},
    "more batches than a chain": {"shape": (140, 256), "chunk": 150},
    "one block for all": {"shape": (35, 22), "grid": 1},
    "rows in slices": {"shape": (291, 3), "chunk": 1},
    "rows in several rounds": {"shape": (200, 12), "chunk": 1},
    "NaN in a neighbour": {"shape": (9, 6), "nan": (3, 2)},
    "16 bits": {"shape": (27, 7), "shifts": ALL_OFF, **MIXED},
}
BATCH_RUNS: Named = {
    "runs start within planes": {"shape": (3, 5, 7), "shifts": SAME_OFF},
    "runs shorter than planes": {"shape": (2, 2, 150), "shifts": ALL_OFF},
    "one channel": {"shape": (3, 1, 70)},
    "one run of whole planes": {"shape": (2, 3, 7)},
    "more planes than threads": {"shape": (3, 90, 2), "chunk": 2048},
    "long runs": {"shape": (1, 2, 1100), "chunk": 2048},
    "one block for all": {"shape": (5, 9, 20), "grid": 1},
    "NaN in a neighbour": {"shape": (2, 3, 21), "nan": (0, 1, 20)},
    "no parameters": {"shape": (2, 3, 20), **NO_PARAMETERS},
    "16 bits": {"shape": (5, 7, 19), "shifts": ALL_OFF, **MIXED},
}
FOUR = ("float64", "bfloat16", "float16", "float32")


def batch_norm_cases(op: str) -> Iterator[Case]:
    reducing = op in ("batch_norm_stats", "batch_norm_backward_reduce")

    def made(strategy: str, named: Named, **tile: int) -> Iterator[Case]:
        for label, facts in named.items():
            own = dict(facts)
            fields = {name: own.pop(name, value) for name, value in tile.items()}
            yield Case(op, label, {"strategy": strategy, **fields}, **own)

    if not reducing:
        rows = BATCH_ROWS | {"no parameters": {"shape": (5, 6), **NO_PARAMETERS}}
        rows |= {"in place": {"shape": (37, 20), "in_place": True}}
        runs = BATCH_RUNS | {"in place": {"shape": (3, 5, 37), "in_place": True}}
        if op == "batch_norm_backward_elemt":
            rows |= {"counts of ranks": {"shape": (17, 5), "ranks": 5}}
            runs |= {"counts of more ranks than a warp has lanes": {"shape": (3, 5, 37), "ranks": 70}}
        yield from made("block", runs, threads=64, chunk=64)
        yield from made("column", rows, threads=64, columns=64, chunk=2)
        return
    slabs, channels, planes, rows = BATCH_SLABS, BATCH_CHANNELS, BATCH_PLANES, BATCH_ROWS
    if op == "batch_norm_backward_reduce":
        slabs = slabs | masked(slabs, "a short last slab and range", "one row of results")
        channels = channels | masked(channels, "planes at other places of a pack")
        planes = planes | masked(planes, "a short last chunk", "one row of results")
        rows = rows | masked(rows, "wide rows and one left over", "one row of results")
        rows |= {"four dtypes": {"shape": (17, 5), "sums": FOUR}}
    yield from made("block", slabs, threads=64, channels=4, samples_per_block=2)
    yield from made("cluster", channels, threads=64, cluster=2)
    one = {
        f"{label}, a block": channels[label] for label in ("planes at other places of a pack", "one cluster for all")
    }
    # A thread's first packs have no elements: of channel 0, only the last two planes reach into the last pack.
    one["a first batch past the ends"] = {"shape": (8, 3, 499), "dtype": "bfloat16"}
    yield from made("cluster", one, threads=64, cluster=1)
    yield from made("split", planes, threads=64, chunk=16)
    yield from made("column", rows, threads=64, columns=64, chunk=2)


def gather_cases() -> Iterator[Case]:
    tile = {"strategy": "column", "threads": 64}
    for label, facts in {
        "one rank, one channel": {"shape": (1, 1)},
        "running statistics, a tail": {"shape": (5, 70), "sums": ("float32", "float32")},
        "running statistics of 16 bits": {"shape": (5, 70), "sums": ("float16", "bfloat16")},
        "a running mean alone": {"shape": (3, 70), "sums": ("float32",)},
        "one block for all": {"shape": (3, 150), "grid": 1, "shifts": {"x": 1}},
        "float64": {"shape": (3, 9), "dtype": "float64", "sums": ("float64", "float64")},
        "columns of one buffer": {"shape": (5, 71), "packed": True, "sums": ("float32", "float32")},
    }.items():
        yield Case("batch_norm_gather_stats", label, tile, **facts)
