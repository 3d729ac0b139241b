"""Hostile problems of the forwards with y in float32 and x in 16 bits: a pack of x gives two packs of y."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.battery import group_norm, instance_norm, layer_norm
from tests.battery.case import ALL_OFF, MIXED, SAME_OFF, Case, Named

HALF: dict[str, Any] = {"dtype": "float16"}
#: A multiple of 16 bytes follows another one in y where it does not in x.
Y_OFF, X_OFF = {"out": 2}, {"x": 3}
OF_PACKS: Named = {
    "channels within packs": {"shape": (4, 6, 7), "groups": 2, "shifts": SAME_OFF},
    "channels of two elements": {"shape": (5, 40, 2), "groups": 2, "shifts": ALL_OFF},
    "whole packs, two blocks": {"shape": (5, 4, 16), "groups": 4, "grid": 2, **HALF},
    "only y misaligned": {"shape": (3, 2, 32), "groups": 2, "shifts": Y_OFF},
    "channels of one element": {"shape": (5, 33), "groups": 3, "shifts": ALL_OFF},
}
OF_SAMPLES: Named = {
    "samples, each array misaligned differently": {"shape": (11, 36), "groups": 4, "shifts": ALL_OFF},
    "samples of packs": {"shape": (9, 16), "groups": 2, **HALF},
}
OF_BLOCK: Named = {
    "channels of many packs": {"shape": (2, 6, 65), "groups": 2, "shifts": ALL_OFF},
    "more channels than threads": {"shape": (2, 140, 2), "groups": 2, "shifts": SAME_OFF},
    "only x misaligned": {"shape": (3, 4, 32), "groups": 2, "shifts": X_OFF, **HALF},
}
OF_SLABS: Named = OF_BLOCK | {
    "NHWC: odd rows": {"shape": (2, 5, 22), "groups": 2, "shifts": ALL_OFF, "last": True},
    "NHWC: rows of packs": {"shape": (5, 9, 32), "groups": 2, "grid": 2, "last": True, **HALF},
}
#: Fields of a tile of `grid` alone.
OWN = ("slab", "prefetch_tiles", "keep")
OF_GRID: Named = {
    "short last chunks": {"shape": (2, 6, 35), "groups": 2, "shifts": ALL_OFF},
    "whole packs": {"shape": (3, 6, 64), "groups": 3, "prefetch_tiles": 3, **HALF},
    "NHWC: all channels": {"shape": (2, 35, 10), "groups": 5, "slab": 5, "shifts": ALL_OFF, "last": True},
    "NHWC: rows of packs": {"shape": (2, 18, 32), "groups": 2, "slab": 2, "last": True, **HALF},
    "NHWC: kept: all channels": {
        "shape": (2, 35, 10),
        "groups": 5,
        "slab": 5,
        "shifts": ALL_OFF,
        "last": True,
        "keep": "shared",
    },
    "NHWC: kept: rows of packs": {
        "shape": (2, 18, 32),
        "groups": 2,
        "slab": 2,
        "last": True,
        "keep": "shared",
        **HALF,
    },
}
OF_ROWS: Named = {
    "every alignment": {"shape": (21, 37), "shifts": SAME_OFF},
    "each array misaligned differently": {"shape": (11, 75), "shifts": ALL_OFF},
    "whole packs": {"shape": (5, 64), **HALF},
    "rows of whole packs of y": {"shape": (9, 36)},
    "only y misaligned": {"shape": (9, 48), "shifts": Y_OFF},
}
OF_STRIPS: Named = OF_ROWS | {"strips and a tail": {"shape": (9, 300), "shifts": ALL_OFF}}
OF_COLUMNS: Named = OF_ROWS | {"slabs, each array misaligned differently": {"shape": (11, 301), "shifts": ALL_OFF}}
ADDED: Named = {"a tensor is added": {"shape": (11, 72), "shifts": ALL_OFF}}
OF_PLANES: Named = {
    "planes that end within packs": {"shape": (5, 7, 19), "shifts": ALL_OFF},
    "planes of two elements": {"shape": (3, 30, 2), "shifts": SAME_OFF},
    "long runs": {"shape": (1, 2, 1100), "chunk": 2048, **HALF},
    "long runs, only y misaligned": {"shape": (1, 2, 2100), "chunk": 4096, "shifts": Y_OFF},
}
OF_WIDE_ROWS: Named = {
    "rows left over": {"shape": (27, 7), "shifts": ALL_OFF},
    "whole packs": {"shape": (7, 16), **HALF},
    "positions": {"shape": (3, 6, 7), "last": True, "shifts": Y_OFF},
}


def _of_groups(op: str) -> Iterator[Case]:
    made = functools.partial(group_norm._made, op)
    warp, staged = {"threads": 64, "lanes": 8, "samples_per_team": 1}, {"threads": 64, "stages": 2, "load": "cp_async"}
    held = {"threads": 64, "stages": 1, "load": "registers"}
    yield from made("warp", OF_PACKS, packs_per_thread=2, **warp)
    yield from made("warp", {"many packs": OF_BLOCK["channels of many packs"]}, packs_per_thread=4, **warp)
    yield from made("warp", OF_SAMPLES, packs_per_thread=2, **warp | {"samples_per_team": 2})
    yield from made("block", OF_BLOCK, packs_per_thread=2, **held)
    yield from made("block", OF_SLABS, packs_per_thread=1, **staged)
    bulk = {label: facts for label, facts in OF_SLABS.items() if not label.startswith("NHWC")}
    yield from made("block", bulk, packs_per_thread=1, **staged | {"load": "bulk"})
    yield from made("cluster", OF_BLOCK, cluster=2, **held)
    if op == "group_norm":
        columns = {f"{label}, columns": OF_SLABS[label] for label in ("NHWC: rows of packs",)}
        columns["NHWC: groups end within packs"] = {"shape": (2, 9, 40), "groups": 4, "slab": 4, "last": True, **HALF}
        yield from made("block", columns, packs_per_thread=2, **held)
        yield from made("cluster", columns, cluster=2, **held)
    yield from made("cluster", OF_SLABS, cluster=2, **staged)
    yield from made("grid", OF_GRID, threads=64)
    split = {
        label: {name: facts[name] for name in facts if name not in OWN}
        for label, facts in OF_GRID.items()
        if "keep" not in facts
    }
    yield from made("split", split, threads=64)


def _of_rows(op: str) -> Iterator[Case]:
    made, chunk = functools.partial(layer_norm.made, op), {"chunk": 64} if op == "layer_norm" else {}
    tiles: dict[str, dict[str, int]] = {
        "warp": {"threads": 64, "lanes": 8, "packs_per_thread": 2},
        "block": {"threads": 128, "packs_per_thread": 1, "teams_per_block": 2},
        "cluster": {"threads": 64, "packs_per_thread": 1, "cluster": 2, "teams_per_block": 1},
        "split": {"threads": 64, "packs_per_thread": 1, **chunk},
    }
    for strategy, tile in tiles.items():
        yield from made(strategy, OF_STRIPS if strategy == "split" else OF_ROWS, rows_per_team=4, **tile)
        yield from made(strategy, ADDED, extra=True, rows_per_team=4, **tile)
    if op == "layer_norm":
        yield from made("grid", OF_COLUMNS, threads=128, lanes=32, packs_per_thread=1, slabs=3, smem_kib=64)


def _of_channels() -> Iterator[Case]:
    made = functools.partial(layer_norm.made, "batch_norm_elemt")
    yield from made("block", OF_PLANES, threads=64, chunk=64)
    yield from made("column", OF_WIDE_ROWS, threads=64, columns=64, chunk=2)


def _of_planes() -> Iterator[Case]:
    """InstanceNorm launches GroupNorm's kernels: few problems per strategy suffice."""
    made, staged = (
        functools.partial(group_norm._made, "instance_norm"),
        {"threads": 64, "stages": 2, "load": "cp_async"},
    )
    yield from made("warp", instance_norm.WARP, threads=64, lanes=8, packs_per_thread=2, samples_per_team=1)
    yield from made("block", instance_norm.BLOCK, **staged, packs_per_thread=1)
    yield from made("cluster", instance_norm.CLUSTER_LAST, cluster=2, **staged)
    grid = {label: facts for label, facts in instance_norm.GRID.items() if "some" not in label}  # too narrow in 16 bits
    yield from made("grid", grid, threads=64)
    yield from made("split", instance_norm.SPLIT, threads=64)


def wide_cases() -> Iterator[Case]:
    """The cases of every strategy of every forward."""
    made = (*_of_groups("group_norm"), *_of_planes(), *_of_rows("layer_norm"), *_of_rows("rms_norm"), *_of_channels())
    for case in made:
        dtype = case.dtype if case.dtype == HALF["dtype"] else MIXED["dtype"]
        label = f"y in float32: {case.label}"
        yield replace(case, label=label, y_dtype="float32", dtype=dtype, gamma=MIXED["gamma"], beta=MIXED["beta"])
