"""Hostile problems of LayerNorm's strategies."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.battery.case import ALL_OFF, FAR, INFINITE, MASKS, MIXED, NO_PARAMETERS, SAME_OFF, Case, Named, masked

LAYER: Named = {
    "one element": {"shape": (1, 1)},
    "rows of one element": {"shape": (70, 1)},
    "whole packs": {"shape": (5, 16)},
    "every alignment": {"shape": (21, 21), "shifts": SAME_OFF},
    "each array misaligned differently": {"shape": (11, 30), "shifts": ALL_OFF},
    "as many elements as a team of a warp holds, misaligned": {"shape": (9, 64), "shifts": SAME_OFF},
    "two blocks for all": {"shape": (70, 7), "grid": 2},
    "one block for all": {"shape": (45, 37), "grid": 1},
    "in place": {"shape": (9, 30), "in_place": True},
    "a constant far from zero": {"shape": (3, 63), **FAR},
    "a constant whose sum is infinite": {"shape": (9, 2), "constant": 3e38},
    "no parameters": {"shape": (3, 30), **NO_PARAMETERS},
    "16 bits": {"shape": (11, 37), "shifts": ALL_OFF, **MIXED},
}
LAYER_LONG: Named = {
    "as many elements as the block holds, misaligned": {"shape": (9, 512), "shifts": SAME_OFF},
    "long rows": {"shape": (7, 333), "grid": 2},
}
LAYER_CLUSTER: Named = {
    "slices of whole sectors": {"shape": (5, 32)},
    "slices of every alignment": {"shape": (21, 21), "shifts": SAME_OFF},
    "slices, each array misaligned differently": {"shape": (11, 30), "shifts": ALL_OFF},
    "as many elements as the cluster holds, misaligned": {"shape": (9, 512), "shifts": SAME_OFF},
    "two clusters for all": {"shape": (70, 21), "grid": 4},
    "one cluster for all": {"shape": (45, 37), "grid": 2},
    "slices in place": {"shape": (9, 30), "in_place": True},
    "slices of a constant far from zero": {"shape": (3, 63), **FAR},
    "slices without parameters": {"shape": (3, 30), **NO_PARAMETERS},
    "slices of 16 bits": {"shape": (11, 75), "shifts": ALL_OFF, **MIXED},
}
#: Problems for blocks with more packs per thread. These load nothing ahead and keep no parameters or sums in registers.
OF_MANY_PACKS = (
    "every alignment", "each array misaligned differently", "two blocks for all", "in place", "no parameters",
    "16 bits",
)  # fmt: skip
#: Cases of LAYER whose teams have one row each, so that the kernel has no loop.
OF_SINGLE_ROWS = ("whole packs", "every alignment", "each array misaligned differently", "in place", "16 bits")
#: Problems for blocks of several teams.
OF_TEAMS = (
    "one element", "rows of one element", "every alignment", "each array misaligned differently", "two blocks for all",
    "one block for all", "in place", "no parameters", "16 bits", "a constant far from zero",
    "as many elements as the block holds, misaligned", "long rows",
)  # fmt: skip
#: Problems for blocks of a cluster that add up their sums of columns.
OF_MERGED = (
    "every alignment", "each array misaligned differently", "in place", "no parameters", "16 bits", "whole packs",
    "rows of one element", "an infinite mean",
)  # fmt: skip
#: Problems for staged rows whose sums of columns are in shared memory too.
OF_STAGED_SUMS = ("staged: misaligned alike", "staged: one block for all", "staged: in place", "staged: whole packs")
#: Problems for teams of `grid` that have several warps, and several packs per lane.
OF_WIDE_TEAMS = (
    "slabs, the last one short", "every alignment of slabs", "one block for all slabs", "slabs in place",
    "slabs of 16 bits", "slabs of a constant far from zero",
)  # fmt: skip
#: Problems for clusters whose blocks have several teams. Rows consist of whole packs.
CLUSTER_TEAMS: Named = {
    "teams with slices of whole sectors": {"shape": (5, 32)},
    "teams with slices, misaligned": {"shape": (21, 44), "shifts": SAME_OFF},
    "teams with slices, each array misaligned differently": {"shape": (11, 28), "shifts": ALL_OFF},
    "as many elements as a team of the cluster holds": {"shape": (9, 508), "shifts": SAME_OFF},
    "two clusters of teams for all": {"shape": (70, 40), "grid": 4},
    "one cluster of teams for all": {"shape": (45, 36), "grid": 2},
    "teams with slices in place": {"shape": (9, 28), "in_place": True},
    "teams with slices of a constant far from zero": {"shape": (3, 60), **FAR},
    "teams with slices without parameters": {"shape": (3, 28), **NO_PARAMETERS},
    "teams with slices of 16 bits": {"shape": (11, 72), "shifts": ALL_OFF, **MIXED},
}
LAST_SLICES: Named = {
    "a last slice of one element": {"shape": (9, 49)},
    "slices of many packs": {"shape": (9, 49), "shifts": ALL_OFF},
}
#: Problems for rows in shared memory, which consist of whole packs.
LAYER_STAGED: Named = {
    "staged: whole packs": {"shape": (5, 16)},
    "staged: fewer rows than stages": {"shape": (1, 16)},
    "staged: rows that all lanes hold": {"shape": (9, 64)},
    "staged: misaligned alike": {"shape": (21, 44), "shifts": SAME_OFF},
    "staged: each array misaligned differently": {"shape": (11, 28), "shifts": ALL_OFF},
    "staged: only x misaligned": {"shape": (11, 28), "shifts": {"x": 1}},
    "staged: two blocks for all": {"shape": (70, 8), "grid": 2},
    "staged: one block for all": {"shape": (45, 36), "grid": 1},
    "staged: many rows per team": {"shape": (90, 12), "rows_per_team": 100, "grid": 1},
    "staged: in place": {"shape": (9, 28), "in_place": True},
    "staged: a constant far from zero": {"shape": (3, 60), **FAR},
    "staged: no parameters": {"shape": (3, 28), **NO_PARAMETERS},
    "staged: an infinite mean": {"shape": (5, 28), **INFINITE},
    "staged: NaN in another row": {"shape": (9, 20), "nan": (2, 7)},
    "staged: 16 bits": {"shape": (11, 72), "shifts": ALL_OFF, **MIXED},
    "staged: 16 bits, aligned": {"shape": (11, 72), **MIXED},
}
LAYER_SPLIT: Named = {
    "strips and a tail": {"shape": (9, 300), "shifts": SAME_OFF},
    "exactly a strip": {"shape": (3, 128)},
    "strips without parameters": {"shape": (3, 300), **NO_PARAMETERS},
    "strips in place": {"shape": (9, 130), "in_place": True},
    "a strip that exists only because of misalignment": {"shape": (4, 126), "shifts": SAME_OFF},
    "more strips than threads": {"shape": (1, 8600)},
    "two blocks for long rows": {"shape": (9, 300), "grid": 2},
    "one block for rows of many strips": {"shape": (3, 4400), "grid": 1},
    "many columns, whose sums are folded by parts": {"shape": (9, 8200)},
}
#: Problems for `grid`. slabs: number of slabs. smem_kib: KiB of shared memory in which a block keeps rows.
LAYER_GRID: Named = {
    "one slab": {"shape": (5, 100), "slabs": 1},
    "slabs, the last one short": {"shape": (5, 300), "shifts": SAME_OFF},
    "every alignment of slabs": {"shape": (21, 301), "shifts": SAME_OFF},
    "rows of a team have different alignments": {"shape": (21, 301), "shifts": SAME_OFF, "threads": 64},
    "slabs, each array misaligned differently": {"shape": (11, 300), "shifts": ALL_OFF},
    "as many elements as a team holds": {"shape": (9, 256), "slabs": 2},
    "as many elements as a team holds, misaligned": {"shape": (9, 256), "slabs": 2, "shifts": SAME_OFF},
    "fewer rows than teams": {"shape": (1, 203), "shifts": SAME_OFF},
    "more slabs than lanes, of a sector each": {"shape": (3, 320), "slabs": 40},
    "more rows than threads": {"shape": (133, 20)},
    "rows that are not kept": {"shape": (70, 100), "smem_kib": 40},
    "no row is kept": {"shape": (70, 100), "smem_kib": 32},
    "rows that are not kept, misaligned": {"shape": (83, 101), "smem_kib": 40, "shifts": SAME_OFF},
    "two blocks for three slabs": {"shape": (9, 300), "grid": 2},
    "one block for all slabs": {"shape": (9, 301), "grid": 1, "shifts": SAME_OFF},
    "one block for all slabs, whose rows are not kept": {"shape": (70, 100), "smem_kib": 40, "grid": 1},
    "slabs in place": {"shape": (9, 301), "in_place": True},
    "slabs in place, not kept": {"shape": (70, 101), "smem_kib": 32, "in_place": True, "grid": 2},
    "slabs of a constant far from zero": {"shape": (3, 300), **FAR},
    "slabs of a constant whose sum is infinite": {"shape": (9, 21), "constant": 3e38, "shifts": SAME_OFF},
    "a slab of two elements of a constant whose sum is infinite": {"shape": (9, 18), "constant": 3e38},
    "more slabs than lanes, many rows": {"shape": (90, 320), "slabs": 40},
    "slabs without parameters": {"shape": (3, 300), **NO_PARAMETERS},
    "slabs of 16 bits": {"shape": (11, 301), "shifts": ALL_OFF, **MIXED},
    "an outlier first in a slab": {"shape": (3, 300), "outlier": (1, 0)},
    "NaN in another row": {"shape": (5, 300), "nan": (2, 170)},
}


def made(op: str, strategy: str, named: Named, *, extra: bool = False, **tile: int) -> Iterator[Case]:
    """Cases with that tile, whose fields a problem may replace."""
    for label, facts in named.items():
        own = dict(facts)
        fields = tile | {name: own.pop(name) for name in tile if name in own}
        yield Case(op, label, {"strategy": strategy, **fields}, extra=extra, **own)


def _grid_cases(op: str) -> Iterator[Case]:
    grid = dict(LAYER_GRID)
    if op.endswith("backward"):
        grid["slabs of an infinite mean"] = {"shape": (5, 300), **INFINITE}
        grid["slabs, dx alone"] = grid["slabs, the last one short"] | MASKS["dx alone"]
    yield from made(op, "grid", grid, threads=128, lanes=32, packs_per_thread=1, slabs=3, smem_kib=64)
    wide = {f"teams of two warps: {label}": grid[label] for label in OF_WIDE_TEAMS}
    wide["teams of two warps: rows that are not kept, misaligned"] = {"shape": (131, 101), "shifts": SAME_OFF}
    yield from made(op, "grid", wide, threads=256, lanes=64, packs_per_thread=2, slabs=2, smem_kib=136)
    if op.endswith("backward"):
        many = {
            "eight teams: the last slab short, misaligned": {"shape": (21, 300), "shifts": SAME_OFF},
            "eight teams: every alignment of slabs": {"shape": (21, 301), "shifts": SAME_OFF},
            "eight teams: one block for all slabs": {"shape": (9, 300), "grid": 1},
        }
        many["eight teams: dx alone"] = many["eight teams: one block for all slabs"] | MASKS["dx alone"]
        yield from made(op, "grid", many, threads=256, lanes=32, packs_per_thread=2, slabs=2, smem_kib=64)


def _staged_cases(op: str, **rows: int) -> Iterator[Case]:
    staged = LAYER_STAGED | masked(LAYER_STAGED, "staged: misaligned alike", "staged: two blocks for all")
    in_memory = {f"sums in memory, {label}": staged[label] for label in OF_STAGED_SUMS}
    of_teams = {f"teams, {label}": facts for label, facts in staged.items() if "constant" not in label}
    yield from made(op, "warp", staged, threads=64, lanes=8, packs_per_thread=2, stages=2, **rows)
    yield from made(op, "warp", in_memory, threads=64, lanes=4, packs_per_thread=16, stages=3, **rows)
    yield from made(op, "block", staged, threads=64, packs_per_thread=1, cluster=1, stages=3, teams_per_block=1, **rows)
    yield from made(
        op, "block", of_teams, threads=128, packs_per_thread=1, cluster=1, stages=2, teams_per_block=2, **rows
    )


def single_row_cases(op: str) -> Iterator[Case]:
    """Forwards whose teams have one row each: of three warps, of two warps beside another team, of a part of a warp."""

    def named(label: str) -> Named:
        return {f"{label}: {name}": LAYER[name] | {"rows_per_team": 1} for name in OF_SINGLE_ROWS}

    same = {"packs_per_thread": 2, "rows_per_team": 1}
    yield from made(op, "block", named("a row of three warps"), threads=96, teams_per_block=1, **same)
    yield from made(op, "block", named("two rows per block"), threads=128, teams_per_block=2, **same)
    yield from made(op, "warp", named("a row per team"), threads=64, lanes=8, **same)


def layer_norm_cases(op: str) -> Iterator[Case]:
    backward = op.endswith("backward")
    rows = {"rows_per_team": 4}

    made_here = functools.partial(made, op)
    warp, block, split, cluster = dict(LAYER), LAYER | LAYER_LONG, LAYER | LAYER_SPLIT, dict(LAYER_CLUSTER)
    held = {"stages": 1} if backward else {}
    one = {"cluster": 1, **held} if backward else {}
    alone, pair = {"teams_per_block": 1}, {"teams_per_block": 2}
    teams = {f"teams: {label}": block[label] for label in OF_TEAMS}
    cluster_teams = dict(CLUSTER_TEAMS)
    if backward:
        masks = masked(LAYER, "every alignment", "two blocks for all")
        warp, block, split = (warp | masks, block | masks, split | masks | masked(split, "two blocks for long rows"))
        cluster |= masked(cluster, "slices of every alignment")
        teams |= masked(teams, "teams: every alignment")
        cluster_teams |= masked(cluster_teams, "teams with slices, misaligned")
        teams["teams: rows of sums in slices"] = {"shape": (133, 3), "rows_per_team": 1}
        teams["teams: one row of results"] = {"shape": (5, 6), "rows_per_team": 100}
        teams["teams: an infinite mean"] = {"shape": (5, 6), **INFINITE}
        cluster_teams["teams of a cluster, one row of results"] = {"shape": (5, 28), "rows_per_team": 100}
        cluster_teams["teams of a cluster, an infinite mean"] = {"shape": (5, 28), **INFINITE}
        block["rows of sums in slices"] = {"shape": (133, 3), "rows_per_team": 1}
        block["rows of sums in several rounds"] = {"shape": (200, 9), "rows_per_team": 1}
        for named, length in ((warp, 6), (block, 6), (split, 6), (cluster, 26)):
            named["one row of results"] = {"shape": (5, length), "rows_per_team": 100}
            grid = 2 if named is cluster else 1
            named["one block for many rows of sums"] = {"shape": (70, length + 1), "rows_per_team": 1, "grid": grid}
            named["an infinite mean"] = {"shape": (5, length), **INFINITE}
        in_memory = {label: facts for label, facts in warp.items() if "dtype" not in facts}
        in_memory["as many elements as the team holds"] = {"shape": (9, 256), "shifts": SAME_OFF}
        yield from made_here("warp", in_memory, threads=64, lanes=4, packs_per_thread=16, stages=1, **rows)
        merged = {label: block[label] for label in OF_MERGED}
        merged["one cluster for many rows of sums"] = {"shape": (70, 7), "rows_per_team": 1, "grid": 4}
        merged["one row of results of a cluster"] = {"shape": (9, 6), "rows_per_team": 100}
        yield from made_here("block", merged, threads=64, packs_per_thread=2, cluster=4, stages=1, **alone, **rows)
        from_memory = {"merged from memory": block["every alignment"]}
        yield from made_here("block", from_memory, threads=64, packs_per_thread=6, cluster=2, stages=1, **alone, **rows)
        yield from _staged_cases(op, **rows)
        merged = {f"merged teams: {label}": block[label] for label in ("every alignment", "16 bits", "in place")}
        yield from made_here("block", merged, threads=128, packs_per_thread=2, cluster=2, stages=1, **pair, **rows)
    yield from made_here("warp", warp, threads=64, lanes=8, packs_per_thread=2, **held, **rows)
    yield from made_here("block", block, threads=64, packs_per_thread=2, **one, **alone, **rows)
    many = {label: block[label] for label in OF_MANY_PACKS}
    yield from made_here("block", many, threads=64, packs_per_thread=6, **one, **alone, **rows)
    yield from made_here("block", teams, threads=128, packs_per_thread=2, **one, **pair, **rows)
    four = {f"four teams: {label}": block[label] for label in OF_MANY_PACKS}
    yield from made_here(
        "block", four, threads=256, packs_per_thread=2 if backward else 4, teams_per_block=4, **one, **rows
    )
    yield from made_here("cluster", cluster, threads=64, packs_per_thread=1, cluster=2, **alone, **rows)
    yield from made_here("cluster", cluster_teams, threads=128, packs_per_thread=1, cluster=2, **pair, **rows)
    yield from _grid_cases(op)
    yield from made_here("cluster", LAST_SLICES, threads=64, packs_per_thread=6, cluster=4, **alone, **rows)
    yield from made_here("split", split, threads=64, packs_per_thread=1, **rows, **({} if backward else {"chunk": 64}))
