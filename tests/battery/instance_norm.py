"""Problems of InstanceNorm that GroupNorm's do not contain: channels-last groups of one channel, planes of 4^3.

The kernels and the tiles are those of GroupNorm's cases, so no further kernel is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.battery.case import ALL_OFF, MASKS, NO_PARAMETERS, Case, Named
from tests.battery.group_norm import _made

WARP: Named = {
    "planes of 4^3, more channels than teams": {"shape": (2, 11, 4, 4, 4), "grid": 2},
    "planes of 3^3, no parameters": {"shape": (3, 5, 3, 3, 3), **NO_PARAMETERS},
}
#: HxW = 1, two samples per team.
ROWS: Named = {"channels of one element, more than teams": {"shape": (5, 20), "shifts": ALL_OFF}}
REGISTERS: Named = {"planes of 4^3": {"shape": (2, 5, 4, 4, 4), "grid": 3}}
BLOCK: Named = {
    "planes of 4^3, slabs of two channels": {"shape": (2, 6, 4, 4, 4), "slab": 2},
    "NHWC: slabs of half a pack": {"shape": (2, 4, 4, 4, 8), "slab": 2, "last": True},
    "NHWC: slabs of some channels": {"shape": (2, 7, 24), "slab": 8, "last": True, "grid": 2},
    "NHWC: all channels": {"shape": (3, 9, 7), "slab": 7, "last": True, "shifts": ALL_OFF},
}
#: Clusters of two blocks.
CLUSTER: Named = {"planes of 4^3, slabs of three channels": {"shape": (2, 6, 4, 4, 4), "slab": 3, "grid": 2}}
CLUSTER_REGISTERS: Named = {"slices of planes of 4^3": {"shape": (2, 3, 4, 4, 4)}}
CLUSTER_LAST: Named = {"NHWC: slabs of some channels": {"shape": (2, 18, 12), "slab": 4, "last": True, "grid": 4}}
GRID: Named = {
    "planes of 4^3": {"shape": (2, 5, 4, 4, 4), "prefetch_tiles": 3},
    "NHWC: all channels": {"shape": (2, 37, 20), "slab": 20, "last": True, "grid": 2},
    "NHWC: slabs of some channels": {"shape": (2, 18, 48), "slab": 16, "last": True},
}
GRID_KEPT: Named = {
    "NHWC: kept: all channels": {"shape": (2, 37, 20), "slab": 20, "last": True, "grid": 2, "keep": "shared"},
    "NHWC: kept: slabs of some channels": {"shape": (2, 18, 48), "slab": 16, "last": True, "keep": "shared"},
}
SPLIT: Named = {
    "planes of 4^3": {"shape": (2, 5, 4, 4, 4), "chunk": 64},
    "NHWC: more columns than threads, chunks": {"shape": (2, 35, 262), "last": True, "grid": 2},
}


def instance_norm_cases(op: str) -> Iterator[Case]:
    backward = op.endswith("backward")
    one: dict[str, Any] = {"threads": 64, "cluster": 2, **({"samples": 1} if backward else {})}
    staged: dict[str, Any] = {"threads": 64, "stages": 2, "load": "cp_async"}
    block = dict(BLOCK)
    if backward:
        block["NHWC: all channels, dgamma alone"] = block["NHWC: all channels"] | MASKS["dgamma alone"]
    yield from _made(op, "warp", WARP, threads=64, lanes=8, packs_per_thread=2, samples_per_team=1)
    yield from _made(op, "warp", ROWS, threads=64, lanes=8, packs_per_thread=2, samples_per_team=2)
    yield from _made(op, "block", block, **staged, packs_per_thread=1)
    yield from _made(op, "block", REGISTERS, threads=64, stages=1, load="registers", packs_per_thread=2)
    yield from _made(op, "cluster", CLUSTER, **one, stages=2, load="bulk")
    yield from _made(op, "cluster", CLUSTER_REGISTERS, **one, stages=1, load="registers")
    yield from _made(op, "cluster", CLUSTER_LAST, **one, stages=2, load="cp_async")
    if backward:
        samples: Named = {"NHWC: both samples": {"shape": (2, 19, 12), "slab": 4, "last": True}}
        yield from _made(op, "cluster", samples, **one | {"samples": 2}, stages=2, load="cp_async")
    yield from _made(op, "grid", GRID, threads=64)
    yield from _made(op, "grid", GRID_KEPT, threads=64)
    yield from _made(op, "split", SPLIT, threads=64)
