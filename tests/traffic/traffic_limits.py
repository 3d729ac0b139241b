"""The table of the traffic gate: limits of the bytes that each strategy may move, relative to the byte floor.

A row is a class of problems of one strategy. Its tile is one of the battery's, so that few kernels are built. If a row
allows more than the rule for its strategy, `why` contains the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cunorm
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Plan

#: ONCE: the strategy reads and writes every byte once. EDGE: its slices also begin or end within a 32-byte sector.
ONCE, EDGE = 1.02, 1.05
#: Two sweeps. Backward: dy and x are read twice, dx is written once. Forward: x is read twice, y is written once.
SPLIT_BACKWARD, SPLIT_FORWARD = 5 / 3, 3 / 2
#: Bytes of full-width accesses divided by the bytes of their sectors.
EFFICIENT = 0.95

SHORT = "runs of few packs begin or end in the middle of a sector"
#: A run of 16-bit elements has half as many packs as one of float32. If it begins in the middle of a sector, so does
#: each request of a warp: 32 packs then touch 17 sectors instead of 16.
HALF_AS_LONG = 0.93
#: Of 10 bytes of sectors per element, x has 2, and y, whose 4 bytes are in two accesses, has 8. Ragged ends add some.
HALVES, RAGGED_HALVES = 0.6, 0.55
IN_HALVES = "a lane stores its pack of x as two packs of y, each in half of the sectors that a warp stores to at a time"
WHOLE = "a pack at an end of a short plane is read whole, and its sector is also fetched for the next channel"
NARROW = "a block's part of a row is narrow, and neighbouring blocks fetch the sectors that it shares"


@dataclass(frozen=True, eq=False)
class Row:
    """A problem of one strategy, and the limits of its traffic.

    Attributes
    ----------
    op, strategy, label : str
        The label names the problem class.
    sizes : tuple of int
        N, C, HxW, groups; N, C, HxW for InstanceNorm and BatchNorm; rows and length for LayerNorm; ranks and C for
        batch_norm_gather_stats.
    tile : mapping
        Fields of the tile other than the strategy.
    tensors : float
        Upper limit of the bytes of tensors that warps request, divided by the floor.
    fetched : float
        Upper limit of the bytes of the sectors of tensors that blocks touch, divided by the floor. Each sector counts
        once per block and direction.
    wide : float
        Lower limit of the sector efficiency of 16-byte accesses to tensors.
    why : str
        Reason for limits that are looser than the rule.
    layout, dtype : str
    added : bool
        The call passes the optional tensor of its op.
    wide_y : bool
        y is in float32.
    long : bool
    """

    op: str
    strategy: str
    label: str
    sizes: tuple[int, ...]
    tile: Mapping[str, int]
    tensors: float = ONCE
    fetched: float = ONCE
    wide: float = EFFICIENT
    why: str = ""
    layout: str = "NCHW"
    dtype: str = "float32"
    added: bool = False
    wide_y: bool = False
    long: bool = field(default=False)

    def __str__(self) -> str:
        return f"{self.op}-{self.strategy}-{self.label}-{self.dtype}".replace(" ", "_")

    def plan(self, N: int | None = None, mask: tuple[bool, ...] = (True, True, True)) -> Plan:
        """The plan of the row, with N samples if N is passed."""
        N = N or self.sizes[0]
        op, options = OPS[self.op], dict[str, Any]()
        if "num_groups" in op.takes:
            options = {"num_groups": self.sizes[3]}
        if "normalized_shape" in op.takes:
            options = {"normalized_shape": self.sizes[1]}
        if "data_format" in op.takes:
            options["data_format"] = self.layout
        if "output_mask" in op.takes:
            options["output_mask"] = mask[: len(op.flags)]
        for name in ("gamma", "beta"):
            if f"{name}_dtype" in op.takes and not (name == "beta" and "backward" in self.op):
                options[f"{name}_dtype"] = "float32"  # as in the battery
        if self.added:
            options |= dict.fromkeys(op.extras, True)
        if self.wide_y:
            options["y_dtype"] = "float32"
        _, *inner = self.sizes[:3] if "data_format" in op.takes else self.sizes[:2]
        shape = (N, *(inner if self.layout == "NCHW" else inner[::-1]))
        tile = {"strategy": self.strategy, **self.tile}
        return cunorm.plan(self.op, shape=shape, dtype=self.dtype, tile=tile, device="cpu", **options)


def _twice(*rows: Row) -> Iterator[Row]:
    """Set the limits of a strategy that reads its inputs twice, for the rows that do not set `tensors` themselves."""
    for row in rows:
        if row.tensors != ONCE:
            yield row
        elif row.op.endswith("backward"):
            yield replace(row, tensors=SPLIT_BACKWARD, fetched=SPLIT_BACKWARD * row.fetched)
        else:
            yield replace(row, tensors=SPLIT_FORWARD, fetched=SPLIT_FORWARD * row.fetched)


def _both_types(rows: Iterator[Row]) -> Iterator[Row]:
    """Each row in float32, and also in bfloat16 if the battery builds its kernels for bfloat16."""
    for row in rows:
        yield row
        if row.layout == "NCHW":
            short = row.strategy in ("block", "cluster") and row.label in ("odd planes", "misaligned")
            looser: dict[str, Any] = {"wide": HALF_AS_LONG, "why": SHORT} if short else {}
            yield replace(row, dtype="bfloat16", long=True, **looser)


def _group(op: str) -> Iterator[Row]:
    warp = {"threads": 64, "lanes": 8, "packs_per_thread": 2, "samples_per_team": 1}
    slab, split = {"threads": 64, "groups": 1, "stages": 2, "load": "cp_async"}, {"threads": 64, "chunk": 1024}
    block = slab | {"packs_per_thread": 1}
    several, held = block | {"groups": 8}, block | {"stages": 1, "load": "registers", "packs_per_thread": 4}

    yield Row(op, "warp", "aligned planes", (8, 16, 64, 16), warp)
    yield Row(op, "warp", "odd planes", (16, 8, 49, 8), warp, fetched=EDGE, wide=0.83, why=SHORT)
    yield Row(op, "warp", "tails", (12, 12, 61, 12), warp, fetched=EDGE, wide=0.83, why=SHORT)
    yield Row(op, "warp", "HxW = 1", (64, 256, 1, 8), warp)
    yield Row(op, "warp", "several waves", (1100, 32, 64, 32), warp, long=True)
    yield Row(op, "warp", "HxW = 1, pairs of samples", (64, 256, 1, 8), warp | {"samples_per_team": 2})
    yield Row(op, "block", "aligned planes", (4, 16, 1024, 4), block)
    yield Row(op, "block", "odd planes", (8, 32, 49, 4), block, fetched=EDGE)
    yield Row(op, "block", "misaligned", (3, 9, 217, 3), block, fetched=EDGE)
    yield Row(op, "block", "tails", (6, 12, 127, 4), block, fetched=EDGE)
    yield Row(op, "block", "HxW = 1", (64, 256, 1, 8), block)
    yield Row(op, "block", "channels last", (4, 64, 49, 8), block, layout="NHWC")
    yield Row(op, "block", "channels last, short groups", (4, 32, 49, 8), several, layout="NHWC")
    narrow: dict[str, Any] = {"fetched": 3.4, "why": NARROW}  # rows of 12 bytes
    yield Row(op, "block", "channels last, narrow", (4, 24, 49, 8), block, layout="NHWC", **narrow)
    yield Row(op, "block", "several waves", (264, 8, 256, 8), block)
    yield Row(op, "block", "in registers", (8, 16, 64, 2), held)
    yield Row(op, "block", "in registers, odd planes", (16, 16, 49, 2), held, fetched=EDGE)
    yield Row(op, "block", "in registers, HxW = 1", (64, 512, 1, 2), held)
    columns = block | {"stages": 1, "load": "registers", "packs_per_thread": 2}
    yield Row(op, "block", "channels last, in registers", (4, 64, 49, 8), columns, layout="NHWC")
    idle = columns | {"packs_per_thread": 4}
    yield Row(op, "block", "channels last, in registers, idle threads", (4, 192, 33, 8), idle, layout="NHWC")
    cluster = slab | {"cluster": 2, "load": "bulk", **({"samples": 1} if op.endswith("backward") else {})}
    pieces = cluster | {"stages": 1, "load": "registers"}
    yield Row(op, "cluster", "channels last, in registers", (4, 64, 99, 8), pieces, layout="NHWC")
    yield Row(op, "cluster", "aligned planes", (4, 16, 1024, 4), cluster)
    yield Row(op, "cluster", "odd planes", (4, 32, 147, 4), cluster, fetched=EDGE)
    yield Row(op, "cluster", "misaligned", (3, 9, 217, 3), cluster, fetched=EDGE, wide=0.94, why=SHORT)
    yield Row(op, "cluster", "channels last", (4, 64, 196, 8), cluster | {"load": "cp_async"}, layout="NHWC")
    yield Row(op, "cluster", "several waves", (264, 8, 512, 8), cluster)
    if op.endswith("backward"):
        of_two = cluster | {"samples": 2}
        yield Row(op, "cluster", "both samples", (2, 16, 1024, 4), of_two)
        yield Row(
            op, "cluster", "both samples, channels last", (2, 64, 196, 8), of_two | {"load": "cp_async"}, layout="NHWC"
        )
        held = pieces | {"samples": 2}
        yield Row(op, "cluster", "both samples, channels last, in registers", (2, 64, 99, 8), held, layout="NHWC")
    grid = {"threads": 64, "chunk": 512, "groups": 1, "prefetch_tiles": 1, "keep": "l2"}
    yield from _twice(
        Row(op, "grid", "aligned planes", (4, 16, 1024, 4), grid),
        Row(op, "grid", "odd planes", (2, 6, 2401, 2), grid, fetched=EDGE),
        Row(op, "grid", "ahead", (4, 16, 1024, 4), grid | {"prefetch_tiles": 20}),
        Row(op, "grid", "channels last", (4, 64, 196, 2), grid | {"chunk": 64}, layout="NHWC"),
        Row(
            op, "grid", "channels last, all of them", (4, 60, 196, 6), grid | {"groups": 6, "chunk": 64}, layout="NHWC"
        ),
    )
    kept = {"threads": 64, "chunk": 16, "groups": 8, "prefetch_tiles": 1, "keep": "shared"}
    yield Row(op, "grid", "kept", (4, 64, 196, 8), kept, layout="NHWC")
    yield Row(op, "grid", "kept, slabs of two groups", (4, 64, 196, 8), kept | {"groups": 2}, layout="NHWC")
    yield from _twice(
        Row(op, "split", "aligned planes", (4, 16, 1024, 4), split),
        Row(op, "split", "odd planes", (2, 6, 2401, 2), split, fetched=EDGE),
        Row(op, "split", "tails", (6, 12, 1279, 4), split, fetched=EDGE),
        Row(op, "split", "HxW = 1", (64, 256, 1, 8), split),
        Row(op, "split", "channels last", (4, 64, 196, 8), split, layout="NHWC"),
        Row(op, "split", "several waves", (34, 64, 1024, 8), split, long=True),
    )


def _instance(op: str) -> Iterator[Row]:
    """Problems with one channel per group, with tiles of GroupNorm's rows."""
    backward = op.endswith("backward")
    warp = {"threads": 64, "lanes": 8, "packs_per_thread": 2, "samples_per_team": 1}
    slab = {"threads": 64, "groups": 8, "stages": 2, "load": "cp_async"}
    block, of_one = slab | {"packs_per_thread": 1}, {"samples": 1} if backward else {}
    held = {"threads": 64, "groups": 1, "stages": 1, "load": "registers", "packs_per_thread": 4}
    yield Row(op, "warp", "planes of 4^3", (8, 40, 64), warp)
    yield Row(op, "block", "slabs of planes of 4^3", (8, 16, 64), block)
    yield Row(op, "block", "in registers", (4, 16, 512), held)
    yield Row(op, "block", "channels last", (4, 64, 64), block, layout="NHWC")
    half: dict[str, Any] = {"fetched": 2.0, "wide": 0.5, "why": NARROW}  # rows of 16 bytes, half a sector
    yield Row(op, "block", "channels last, half sectors", (4, 64, 64), block | {"groups": 4}, layout="NHWC", **half)
    cluster = slab | {"cluster": 2, **of_one}
    yield Row(op, "cluster", "aligned planes", (4, 16, 1024), cluster | {"groups": 1, "load": "bulk"})
    yield Row(op, "cluster", "channels last", (4, 64, 196), cluster, layout="NHWC")
    if backward:
        yield Row(op, "cluster", "both samples, channels last", (2, 64, 196), cluster | {"samples": 2}, layout="NHWC")
    grid = {"threads": 64, "chunk": 512, "groups": 1, "prefetch_tiles": 1, "keep": "l2"}
    yield from _twice(
        Row(op, "grid", "aligned planes", (4, 16, 1024), grid),
        Row(op, "grid", "channels last", (4, 64, 196), grid | {"groups": 16, "chunk": 64}, layout="NHWC"),
        Row(op, "split", "aligned planes", (4, 16, 1024), {"threads": 64, "chunk": 1024}),
        Row(op, "split", "channels last", (4, 64, 196), {"threads": 64, "chunk": 1024}, layout="NHWC"),
    )


def _layer(op: str) -> Iterator[Row]:
    backward = op.endswith("backward")
    held = {"stages": 1} if backward else {}
    warp = {"threads": 64, "lanes": 8, "packs_per_thread": 2, "rows_per_team": 4, **held}
    block = {
        "threads": 64,
        "packs_per_thread": 2,
        "rows_per_team": 4,
        "teams_per_block": 1,
        **({"cluster": 1} if backward else {}),
        **held,
    }
    cluster = {"threads": 64, "packs_per_thread": 2, "rows_per_team": 4, "cluster": 2, "teams_per_block": 1}
    split = {"threads": 64, "packs_per_thread": 1, "rows_per_team": 4, **({} if backward else {"chunk": 1024})}
    yield Row(op, "warp", "aligned", (64, 64), warp)
    yield Row(op, "warp", "odd rows", (64, 63), warp, fetched=EDGE, wide=0.83, why=SHORT)
    yield Row(op, "warp", "tails", (50, 37), warp, fetched=EDGE, wide=0.78, why=SHORT)
    yield Row(op, "warp", "several waves", (17000, 64), warp, long=True)
    yield Row(op, "block", "aligned", (32, 512), block)
    yield Row(op, "block", "odd rows", (32, 335), block, fetched=EDGE)
    yield Row(op, "block", "several waves", (4300, 256), block, long=True)
    yield Row(op, "block", "several teams", (64, 512), block | {"threads": 256, "teams_per_block": 4})
    yield Row(
        op, "block", "several teams, odd rows", (64, 335), block | {"threads": 256, "teams_per_block": 4}, fetched=EDGE
    )
    yield Row(op, "cluster", "several teams", (64, 640), cluster | {"threads": 128, "teams_per_block": 2})
    yield Row(op, "cluster", "aligned", (32, 640), cluster)
    yield Row(op, "cluster", "odd rows", (32, 727), cluster, fetched=EDGE)
    grid = {"threads": 128, "lanes": 32, "packs_per_thread": 1, "slabs": 3, "smem_kib": 64}
    wide = {"threads": 256, "lanes": 64, "packs_per_thread": 2, "slabs": 2, "smem_kib": 136}
    yield Row(op, "grid", "aligned", (32, 384), grid)
    yield Row(op, "grid", "odd rows", (32, 1001), wide, fetched=EDGE)
    yield from _twice(Row(op, "grid", "not kept", (100, 384), grid | {"smem_kib": 40}))
    if backward:
        yield Row(op, "block", "sums put together", (64, 512), block | {"cluster": 4})
        yield Row(op, "warp", "staged", (64, 64), warp | {"stages": 2})
        yield Row(op, "block", "staged", (32, 512), block | {"stages": 2})
    yield from _twice(
        Row(op, "split", "aligned", (8, 2048), split),
        Row(op, "split", "odd rows", (8, 2047), split, fetched=EDGE),
        Row(op, "split", "tails", (9, 1101), split, fetched=EDGE),
        Row(op, "split", "several waves", (270, 4096), split, long=True),
    )


def _rms(op: str) -> Iterator[Row]:
    backward = op.endswith("backward")
    held, merged = ({"stages": 1}, {"cluster": 1}) if backward else ({}, {})
    warp = {"threads": 64, "lanes": 8, "packs_per_thread": 2, "rows_per_team": 4, **held}
    block = {"threads": 64, "packs_per_thread": 2, "rows_per_team": 4, "teams_per_block": 1, **merged, **held}
    cluster = {"threads": 64, "packs_per_thread": 2, "rows_per_team": 4, "cluster": 2, "teams_per_block": 1}
    split = {"threads": 64, "packs_per_thread": 1, "rows_per_team": 4}
    yield Row(op, "warp", "aligned", (64, 64), warp)
    yield Row(op, "warp", "odd rows", (64, 63), warp, fetched=EDGE, wide=0.83, why=SHORT)
    yield Row(op, "block", "aligned", (32, 512), block)
    yield Row(op, "block", "odd rows", (32, 335), block, fetched=EDGE)
    yield Row(op, "cluster", "aligned", (32, 640), cluster)
    yield from _twice(
        Row(op, "split", "aligned", (8, 2048), split), Row(op, "split", "odd rows", (8, 2047), split, fetched=EDGE)
    )
    yield from _added(op)


def _added(op: str) -> Iterator[Row]:
    """Rows of an op that adds a tensor: a residual in a forward, which also stores the sum h, or dh in a backward."""
    backward = op.endswith("backward")
    held, merged = ({"stages": 1}, {"cluster": 1}) if backward else ({}, {})
    warp = {"threads": 64, "lanes": 8, "packs_per_thread": 3, "rows_per_team": 4, **held}
    block = {"threads": 128, "packs_per_thread": 1, "rows_per_team": 4, "teams_per_block": 2, **merged, **held}
    cluster = {"threads": 64, "packs_per_thread": 1, "rows_per_team": 4, "cluster": 2, "teams_per_block": 1}
    split = {"threads": 64, "packs_per_thread": 1, "rows_per_team": 4}
    split |= {"chunk": 1024} if op == "layer_norm" else {}
    yield Row(op, "warp", "a tensor is added", (64, 96), warp, added=True)
    yield Row(op, "block", "a tensor is added", (32, 256), block, added=True)
    yield Row(op, "cluster", "a tensor is added", (32, 384), cluster, added=True)
    yield from _twice(Row(op, "split", "a tensor is added", (8, 2048), split, added=True))
    if backward:
        of_two = {"threads": 64, "packs_per_thread": 2, "stages": 2, "rows_per_team": 4}
        yield Row(op, "warp", "a tensor is added, staged", (64, 64), of_two | {"lanes": 8}, added=True)


def _batch(kind: str) -> Iterator[Row]:
    op, reducing = f"batch_norm_{kind}", kind in ("stats", "backward_reduce")
    block = {"threads": 64, "channels": 8, "samples_per_block": 8} if reducing else {"threads": 64, "chunk": 2048}
    yield Row(op, "block", "aligned planes", (8, 32, 1024), block)
    yield Row(op, "block", "odd planes", (8, 32, 49), block, fetched=EDGE)
    yield Row(op, "block", "misaligned", (6, 9, 217), block, fetched=EDGE)
    yield Row(op, "block", "tails", (6, 12, 127), block, fetched=EDGE)
    yield Row(op, "block", "several waves", (64, 160, 196), block, fetched=EDGE, long=True)
    if reducing:
        cluster = {"threads": 64, "cluster": 2}
        yield Row(op, "cluster", "aligned planes", (8, 16, 1024), cluster)
        yield Row(op, "cluster", "odd planes", (2, 6, 2401), cluster, fetched=EDGE)
        ragged = {"tensors": EDGE, "fetched": 1.07}
        yield Row(op, "cluster", "misaligned", (6, 9, 217), cluster, **ragged)
        yield Row(op, "cluster", "several waves", (64, 160, 196), cluster, wide=0.93, why=SHORT, long=True, **ragged)
        short = {"tensors": 1.15, "fetched": 1.31, "wide": 0.87}
        yield Row(op, "cluster", "short odd planes", (8, 32, 49), cluster, why=WHOLE, **short)
        split = {"threads": 64, "chunk": 1024}
        yield Row(op, "split", "aligned planes", (4, 16, 1024), split)
        yield Row(op, "split", "odd planes", (2, 6, 2401), split, fetched=EDGE)
        yield Row(op, "split", "tails", (6, 12, 1279), split, fetched=EDGE)
        yield Row(op, "split", "several waves", (34, 64, 1024), split, long=True)
    column = {"threads": 64, "columns": 8, "chunk": 1024}
    yield Row(op, "column", "channels last", (4, 64, 1024), column, layout="NHWC")
    yield Row(op, "column", "channels last, short chunks", (4, 64, 256), column | {"chunk": 256}, layout="NHWC")
    yield Row(op, "column", "odd channels", (4095, 33, 1), column, fetched=EDGE, wide=0.94, why=SHORT)
    yield Row(op, "column", "HxW = 1", (4096, 64, 1), column)
    yield Row(op, "column", "several waves", (65536, 64, 1), column | {"chunk": 128}, long=True)


def _wide() -> Iterator[Row]:
    """The forwards with y in float32. x is read once, or twice by a strategy that reads it twice."""
    block: dict[str, Any] = {"threads": 64, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1}
    held = {"threads": 64, "groups": 1, "stages": 1, "load": "registers"}
    rows = {"threads": 64, "packs_per_thread": 1, "rows_per_team": 4}
    one = {"teams_per_block": 1}
    for op in ("group_norm", "instance_norm"):
        groups = 4 if op == "group_norm" else 16
        warp = {"threads": 64, "lanes": 8, "packs_per_thread": 2, "samples_per_team": 1}
        slabs = block | {"groups": 1 if op == "group_norm" else 16}
        yield Row(op, "warp", "wide y", (16, 16, 128 * groups // 16, groups), warp)
        yield Row(op, "block", "wide y", (4, 16, 1024, groups), slabs | {"groups": 1})
        yield Row(op, "block", "wide y, odd planes", (8, 16, 217, groups), block, fetched=EDGE, wide=RAGGED_HALVES)
        yield Row(op, "block", "wide y, channels last", (4, 64, 49, 4), slabs, layout="NHWC")
        yield Row(op, "block", "wide y, in registers", (4, 16, 64, groups), held | {"packs_per_thread": 2})
        if op == "group_norm":
            columns = held | {"packs_per_thread": 2}
            yield Row(op, "block", "wide y, channels last, in registers", (4, 64, 49, 4), columns, layout="NHWC")
        yield Row(op, "cluster", "wide y", (4, 16, 1024, groups), held | {"load": "bulk", "cluster": 2})
        grid = {"threads": 64, "chunk": 512, "groups": 1, "prefetch_tiles": 1, "keep": "l2"}
        split = {"threads": 64, "chunk": 1024}
        yield from _read_twice(
            Row(op, "grid", "wide y", (4, 16, 1024, groups), grid),
            Row(op, "split", "wide y", (4, 16, 1024, groups), split),
        )
    for op in ("layer_norm", "rms_norm"):
        yield Row(op, "warp", "wide y", (64, 128), {**rows, "lanes": 8, "packs_per_thread": 2})
        yield Row(
            op,
            "warp",
            "wide y, odd rows",
            (64, 127),
            {**rows, "lanes": 8, "packs_per_thread": 2},
            fetched=EDGE,
            wide=RAGGED_HALVES,
        )
        yield Row(op, "block", "wide y", (32, 512), rows | one)
        yield Row(op, "cluster", "wide y", (32, 640), rows | one | {"cluster": 2})
        chunk = {"chunk": 1024} if op == "layer_norm" else {}
        yield from _read_twice(Row(op, "split", "wide y", (8, 2048), rows | chunk))
    grid = {"threads": 128, "lanes": 32, "packs_per_thread": 1, "slabs": 3, "smem_kib": 64}
    yield Row("layer_norm", "grid", "wide y", (32, 384), grid)
    yield Row("batch_norm_elemt", "block", "wide y", (8, 32, 1024), {"threads": 64, "chunk": 2048})
    yield Row(
        "batch_norm_elemt",
        "block",
        "wide y, odd planes",
        (8, 32, 49),
        {"threads": 64, "chunk": 2048},
        fetched=EDGE,
        wide=RAGGED_HALVES,
    )
    yield Row("batch_norm_elemt", "column", "wide y", (4096, 64, 1), {"threads": 64, "columns": 8, "chunk": 1024})


def _read_twice(*rows: Row) -> Iterator[Row]:
    """Set the limits of a strategy that reads x, 2 of 6 bytes, twice."""
    for row in rows:
        yield replace(row, tensors=8 / 6, fetched=8 / 6 * ONCE)


def _gather() -> Iterator[Row]:
    tile = {"threads": 64}
    yield Row("batch_norm_gather_stats", "column", "aligned", (8, 256), tile)
    # A block of 64 channels reads 256 bytes of a row.
    yield Row("batch_norm_gather_stats", "column", "tails", (5, 70), tile, fetched=1.15, why=NARROW)


ROWS: tuple[Row, ...] = (
    *_both_types(row for op in ("group_norm", "group_norm_backward") for row in _group(op)),
    *_both_types(row for op in ("instance_norm", "instance_norm_backward") for row in _instance(op)),
    *_both_types(row for op in ("layer_norm", "layer_norm_backward") for row in _layer(op)),
    *(row for op in ("layer_norm", "layer_norm_backward") for row in _added(op)),
    *_both_types(row for op in ("rms_norm", "rms_norm_backward") for row in _rms(op)),
    *_both_types(row for kind in ("stats", "elemt", "backward_reduce", "backward_elemt") for row in _batch(kind)),
    *(replace(row, dtype="bfloat16", wide_y=True, wide=min(row.wide, HALVES), why=IN_HALVES) for row in _wide()),
    *_gather(),
)
