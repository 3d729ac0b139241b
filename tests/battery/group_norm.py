"""Hostile problems of GroupNorm's strategies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tests.battery.case import ALL_OFF, FAR, INFINITE, MASKS, MIXED, NO_PARAMETERS, SAME_OFF, Case, Named, masked

GROUP_WARP: Named = {
    "one-element groups": {"shape": (2, 2), "groups": 2},
    "channels of one element": {"shape": (9, 12), "groups": 3},
    "whole packs, two blocks for three": {"shape": (5, 4, 16), "groups": 4, "grid": 2},
    "one channel per group, misaligned": {"shape": (3, 3, 21), "groups": 3, "shifts": ALL_OFF},
    "as many elements as the team holds, misaligned": {"shape": (3, 2, 64), "groups": 2, "shifts": SAME_OFF},
    "channels end within packs": {"shape": (3, 6, 7), "groups": 2},
    "packs begin before their group": {"shape": (4, 6, 7), "groups": 2, "shifts": SAME_OFF},
    "two channels of whole packs": {"shape": (2, 4, 16), "groups": 2},
    "two channels of most of the lanes": {"shape": (3, 4, 31), "groups": 2},
    "more channels than packs": {"shape": (5, 60, 2), "groups": 2, "shifts": ALL_OFF},
    "a constant far from zero": {"shape": (3, 4, 15), "groups": 2, **FAR},
    "NaN in a neighbour": {"shape": (2, 6, 5), "groups": 3, "nan": (0, 2, 4)},
    "fewer elements, all misaligned alike": {"shape": (9, 21), "groups": 1, "shifts": SAME_OFF},
    "no parameters": {"shape": (3, 2, 30), "groups": 2, **NO_PARAMETERS},
    "channels of one element, no parameters": {"shape": (3, 12), "groups": 3, **NO_PARAMETERS},
    "one block for all": {"shape": (40, 6), "groups": 2, "grid": 1},
    "one block for all, channels of several elements": {"shape": (12, 6, 5), "groups": 2, "grid": 1},
    "in place": {"shape": (5, 12), "groups": 2, "in_place": True},
    "16 bits": {"shape": (5, 33), "groups": 3, "shifts": ALL_OFF, **MIXED},
}
#: HxW = 1, several samples per team, 8 teams per block.
GROUP_ROWS: Named = {
    "samples kept, groups of different alignments": {"shape": (9, 12), "groups": 2, "shifts": SAME_OFF},
    "an odd last sample, one element": {"shape": (3, 2), "groups": 2},
    "one row of sums": {"shape": (2, 40), "groups": 5},
    "dead teams, misaligned samples": {"shape": (7, 21), "groups": 3, "grid": 1, "shifts": ALL_OFF},
    "teams without a sample": {"shape": (3, 35), "groups": 5, "shifts": SAME_OFF},
    "one group per team of the block": {"shape": (5, 24), "groups": 8},
    "more groups than teams, two blocks": {"shape": (5, 48), "groups": 16, "grid": 2},
    "one group, all teams add up": {"shape": (70, 7), "groups": 1, "shifts": SAME_OFF},
    "as many elements as the team holds": {"shape": (5, 192), "groups": 3},
    "samples in place": {"shape": (9, 20), "groups": 2, "in_place": True},
    "samples without parameters": {"shape": (9, 20), "groups": 4, **NO_PARAMETERS},
    "samples of 16 bits": {"shape": (11, 36), "groups": 4, "shifts": ALL_OFF, **MIXED},
}
GROUP_BLOCK_REGISTERS: Named = {
    "one-element groups": {"shape": (2, 2), "groups": 2},
    "channels of one element, two blocks": {"shape": (9, 300), "groups": 3, "grid": 2},
    "channels end within packs": {"shape": (2, 9, 31), "groups": 1, "shifts": SAME_OFF},
    "channels of one element, no parameters": {"shape": (3, 180), "groups": 2, **NO_PARAMETERS},
    "as many elements as the block holds, misaligned": {"shape": (3, 4, 128), "groups": 1, "shifts": SAME_OFF},
    "one channel per group, misaligned": {"shape": (2, 3, 131), "groups": 3, "shifts": ALL_OFF},
    "more channels than threads": {"shape": (2, 200, 2), "groups": 2},
    "one block for all": {"shape": (5, 12, 20), "groups": 2, "grid": 1},
    "an outlier first": {"shape": (1, 2, 200), "groups": 1, "outlier": (0, 0, 0)},
    "no parameters": {"shape": (3, 8, 30), "groups": 2, **NO_PARAMETERS},
    "in place": {"shape": (3, 5, 37), "groups": 1, "in_place": True},
    "16 bits": {"shape": (2, 6, 65), "groups": 2, "shifts": ALL_OFF, **MIXED},
    "a constant far from zero": {"shape": (2, 4, 90), "groups": 2, **FAR},
    "NaN in a neighbour": {"shape": (2, 6, 25), "groups": 3, "nan": (0, 2, 4)},
}
GROUP_BLOCK: Named = {
    "one part per channel": {"shape": (2, 6, 35), "groups": 2},
    "several parts per channel": {"shape": (2, 4, 9), "groups": 2, "shifts": SAME_OFF},
    "long planes": {"shape": (1, 2, 1100), "groups": 1, "shifts": ALL_OFF},
    "more channels than threads": {"shape": (2, 140, 2), "groups": 2, "slab": 2},
    "one-element groups": {"shape": (3, 4, 1), "groups": 4, "slab": 2},
    "more groups than warps": {"shape": (2, 10, 5), "groups": 5, "slab": 5},
    "more groups than threads": {"shape": (1, 140, 1), "groups": 70, "slab": 70},
    "a constant far from zero, next to NaN": {"shape": (2, 4, 90), "groups": 2, "slab": 2, "nan": (0, 0, 0), **FAR},
    "one group of one-element channels, a ragged end": {"shape": (2, 21, 1), "groups": 1},
    "two blocks for ten": {"shape": (5, 6, 9), "groups": 2, "grid": 2},
    "one block for all, groups of many channels": {"shape": (3, 80, 3), "groups": 2, "grid": 1},
    "no parameters": {"shape": (1, 6, 5), "groups": 2, **NO_PARAMETERS},
}
GROUP_BLOCK_LAST: Named = {
    "odd rows": {"shape": (2, 5, 6), "groups": 2, "shifts": ALL_OFF},
    "one channel": {"shape": (2, 70, 3), "groups": 3},
    "more channels than threads": {"shape": (2, 3, 140), "groups": 2, "slab": 2},
    "two blocks for ten": {"shape": (5, 9, 10), "groups": 2, "grid": 2},
    "many packs": {"shape": (1, 150, 8), "groups": 1},
    "more packs in a row than threads": {"shape": (2, 3, 266), "groups": 2, "slab": 2},
    "16 bits": {"shape": (2, 5, 22), "groups": 2, "shifts": ALL_OFF, **MIXED},
    "no parameters": {"shape": (1, 5, 6), "groups": 2, **NO_PARAMETERS},
}
#: Problems for load=bulk that need `block`, because the pieces of a cluster are too long for them.
GROUP_BLOCK_BULK: Named = {
    "a chunk of one ragged pack": {"shape": (1, 1, 9), "groups": 1, "shifts": SAME_OFF},
    "a chunk of two ragged packs": {"shape": (3, 1, 10), "groups": 1, "shifts": SAME_OFF},
    "nothing but a ragged pack": {"shape": (5, 1, 3), "groups": 1, "grid": 1},
}
GROUP_SPLIT: Named = {
    "a short last chunk": {"shape": (2, 6, 35), "groups": 2, "shifts": SAME_OFF},
    "chunks shorter than a pack": {"shape": (2, 3, 7), "groups": 3, "chunk": 3, "shifts": ALL_OFF},
    "one chunk, whole packs": {"shape": (1, 2, 64), "groups": 1, "chunk": 64},
    "one short chunk": {"shape": (2, 3, 9), "groups": 1, "chunk": 64},
    "more batches than a chain": {"shape": (1, 1, 17000), "groups": 1, "chunk": 20000, "shifts": SAME_OFF},
    "many parts per group": {"shape": (2, 5, 300), "groups": 1},
    "two blocks for many": {"shape": (5, 6, 40), "groups": 2, "grid": 2},
    "one block for all, parts for every warp": {"shape": (3, 40, 20), "groups": 2, "grid": 1},
    "rows of sums in slices": {"shape": (133, 3, 3), "groups": 1},
    "no parameters": {"shape": (1, 6, 18), "groups": 2, **NO_PARAMETERS},
}
GROUP_SPLIT_LAST: Named = {
    "channels of one element": {"shape": (6, 10), "groups": 2, "last": False},
    "rows of two packs and a tail": {"shape": (2, 35, 10), "groups": 5, "shifts": ALL_OFF},
    "idle threads": {"shape": (2, 37, 20), "groups": 2},
    "more columns than threads": {"shape": (2, 3, 262), "groups": 2},
    "two blocks for three blocks of columns": {"shape": (2, 3, 520), "groups": 2, "grid": 2},
    "as many columns as threads, a long chain": {"shape": (1, 140, 256), "groups": 1, "chunk": 150},
    "one row": {"shape": (1, 1, 7), "groups": 1, "last": False},
    "two blocks for many": {"shape": (5, 40, 12), "groups": 3, "grid": 2},
    "no parameters": {"shape": (1, 18, 6), "groups": 2, **NO_PARAMETERS},
}
GROUP_CLUSTER: Named = {
    "a channel in both pieces": {"shape": (2, 6, 35), "groups": 2},
    "long planes": {"shape": (1, 2, 1100), "groups": 1, "shifts": ALL_OFF},
    "all misaligned alike": {"shape": (3, 2, 64), "groups": 2, "shifts": SAME_OFF},
    "groups in one piece, and in both": {"shape": (2, 10, 11), "groups": 5, "slab": 5},
    "more channels than threads": {"shape": (2, 140, 2), "groups": 2, "slab": 2},
    "an empty piece": {"shape": (2, 2, 16), "groups": 1},
    "a piece of one whole pack": {"shape": (1, 2, 18), "groups": 1},
    "ragged packs, then whole ones": {"shape": (5, 6, 15), "groups": 2, "grid": 2},
    "an outlier first": {"shape": (1, 2, 1100), "groups": 1, "outlier": (0, 0, 0)},
    "two clusters for ten": {"shape": (5, 6, 40), "groups": 2, "grid": 4},
    "one cluster for all": {"shape": (3, 8, 20), "groups": 2, "grid": 2},
    "no parameters": {"shape": (1, 6, 18), "groups": 2, **NO_PARAMETERS},
}
GROUP_CLUSTER_LAST: Named = {
    "odd rows": {"shape": (2, 5, 6), "groups": 2, "shifts": ALL_OFF},
    "one row per block": {"shape": (1, 2, 12), "groups": 3, "slab": 3},
    "more channels than threads": {"shape": (2, 3, 140), "groups": 2, "slab": 2},
    "two clusters for ten": {"shape": (5, 9, 10), "groups": 2, "grid": 4},
    "many rows": {"shape": (1, 150, 8), "groups": 1},
    "no parameters": {"shape": (1, 5, 6), "groups": 2, **NO_PARAMETERS},
}
#: For clusters of two blocks.
GROUP_CLUSTER_REGISTERS: Named = {
    "slices: a channel in both": {"shape": (2, 6, 35), "groups": 2},
    "slices: misaligned alike": {"shape": (3, 2, 64), "groups": 2, "shifts": SAME_OFF},
    "slices: channels of one element": {"shape": (3, 180), "groups": 2},
    "slices: channels within packs": {"shape": (2, 60, 2), "groups": 2, "shifts": ALL_OFF},
    "slices: whole packs": {"shape": (2, 6, 32), "groups": 2},
    "slices: one channel per group, misaligned": {"shape": (2, 3, 131), "groups": 3, "shifts": ALL_OFF},
    "slices: two clusters for ten": {"shape": (5, 6, 40), "groups": 2, "grid": 4},
    "slices: one cluster for all": {"shape": (3, 8, 20), "groups": 2, "grid": 2},
    "slices: no parameters": {"shape": (2, 6, 18), "groups": 2, **NO_PARAMETERS},
    "slices: in place": {"shape": (3, 5, 37), "groups": 1, "in_place": True},
    "slices: an outlier first": {"shape": (1, 2, 200), "groups": 1, "outlier": (0, 0, 0)},
    "slices: a constant far from zero": {"shape": (2, 4, 90), "groups": 2, **FAR},
    "slices: NaN in a neighbour": {"shape": (2, 6, 25), "groups": 3, "nan": (0, 2, 4)},
    "slices: 16 bits": {"shape": (2, 6, 65), "groups": 2, "shifts": ALL_OFF, **MIXED},
}
#: Channels-last slabs in the registers of a block of 64 threads, with five packs each.
GROUP_COLUMNS: Named = {
    "one column": {"shape": (2, 150, 8), "groups": 2},
    "idle threads, groups end within packs": {"shape": (2, 35, 24), "groups": 4, "slab": 2},
    "four groups, some packs without rows": {"shape": (2, 29, 40), "groups": 8, "slab": 4},
    "more packs than lanes": {"shape": (2, 4, 160), "groups": 1},
    "as many packs as threads, one row each": {"shape": (1, 2, 512), "groups": 2},
    "two positions": {"shape": (3, 2, 40), "groups": 4, "slab": 2},
    "misaligned": {"shape": (2, 20, 24), "groups": 4, "slab": 2, "shifts": ALL_OFF},
    "three blocks for ten": {"shape": (5, 30, 24), "groups": 4, "slab": 2, "grid": 3},
    "outliers first": {"shape": (1, 40, 24), "groups": 2, "slab": 2, "outlier": (0, 0, 0)},
    "a constant far from zero": {"shape": (2, 40, 24), "groups": 2, "slab": 2, **FAR},
    "NaN in a neighbour": {"shape": (2, 25, 24), "groups": 4, "slab": 2, "nan": (0, 2, 4)},
    "in place": {"shape": (3, 30, 24), "groups": 4, "slab": 2, "in_place": True},
    "no parameters": {"shape": (2, 30, 24), "groups": 4, "slab": 2, **NO_PARAMETERS},
    "16 bits": {"shape": (2, 21, 80), "groups": 8, "slab": 4, "shifts": ALL_OFF, **MIXED},
    "16 bits, whole packs": {"shape": (2, 21, 80), "groups": 4, "slab": 2, **MIXED},
}
#: The same in clusters of two blocks.
GROUP_CLUSTER_COLUMNS: Named = {
    "columns: one row per block": {"shape": (2, 2, 24), "groups": 4, "slab": 2},
    "columns: fewer rows in the last block": {"shape": (2, 35, 40), "groups": 8, "slab": 4},
    "columns: misaligned": {"shape": (2, 21, 24), "groups": 4, "slab": 2, "shifts": ALL_OFF},
    "columns: two clusters for ten": {"shape": (5, 40, 24), "groups": 4, "slab": 2, "grid": 4},
    "columns: outliers first": {"shape": (1, 80, 24), "groups": 2, "slab": 2, "outlier": (0, 0, 0)},
    "columns: a constant far from zero": {"shape": (2, 40, 24), "groups": 2, "slab": 2, **FAR},
    "columns: NaN in a neighbour": {"shape": (2, 25, 24), "groups": 4, "slab": 2, "nan": (0, 2, 4)},
    "columns: in place": {"shape": (3, 41, 24), "groups": 4, "slab": 2, "in_place": True},
    "columns: no parameters": {"shape": (2, 30, 8), "groups": 2, **NO_PARAMETERS},
    "columns: 16 bits": {"shape": (2, 21, 80), "groups": 8, "slab": 4, "shifts": ALL_OFF, **MIXED},
}
#: For clusters that have the blocks of both samples of a group.
GROUP_CLUSTER_SAMPLES: Named = {
    "samples: a channel in several packs": {"shape": (2, 6, 35), "groups": 2},
    "samples: misaligned alike": {"shape": (2, 6, 37), "groups": 2, "shifts": SAME_OFF},
    "samples: each array misaligned differently": {"shape": (2, 6, 37), "groups": 2, "shifts": ALL_OFF},
    "samples: channels within packs": {"shape": (2, 60, 2), "groups": 2, "shifts": ALL_OFF},
    "samples: whole packs": {"shape": (2, 6, 32), "groups": 2},
    "samples: one cluster for all": {"shape": (2, 12, 20), "groups": 4, "grid": 4},
    "samples: in place": {"shape": (2, 5, 37), "groups": 1, "in_place": True},
    "samples: no parameters": {"shape": (2, 6, 18), "groups": 2, **NO_PARAMETERS},
    "samples: a constant far from zero": {"shape": (2, 4, 90), "groups": 2, **FAR},
    "samples: an infinite mean": {"shape": (2, 6, 35), "groups": 2, **INFINITE},
    "samples: NaN in a neighbour": {"shape": (2, 6, 25), "groups": 3, "nan": (0, 2, 4)},
    "samples: dgamma alone": {"shape": (2, 6, 35), "groups": 2, **MASKS["dgamma alone"]},
    "samples: dbeta alone": {"shape": (2, 6, 35), "groups": 2, **MASKS["dbeta alone"]},
    "samples: no dx": {"shape": (2, 6, 35), "groups": 2, **MASKS["no dx"]},
    "samples: 16 bits": {"shape": (2, 6, 65), "groups": 2, "shifts": ALL_OFF, **MIXED},
}
#: The same for channels-last slabs in registers.
GROUP_COLUMN_SAMPLES: Named = {
    "samples: fewer rows in the last block": {"shape": (2, 35, 40), "groups": 8, "slab": 4},
    "samples: misaligned": {"shape": (2, 21, 24), "groups": 4, "slab": 2, "shifts": ALL_OFF},
    "samples: one cluster for all": {"shape": (2, 12, 24), "groups": 4, "slab": 2, "grid": 4},
    "samples: more channels than threads": {"shape": (2, 4, 160), "groups": 1},
    "samples: in place": {"shape": (2, 41, 24), "groups": 4, "slab": 2, "in_place": True},
    "samples: no parameters": {"shape": (2, 30, 8), "groups": 1, **NO_PARAMETERS},
    "samples: a constant far from zero": {"shape": (2, 40, 24), "groups": 2, "slab": 2, **FAR},
    "samples: an infinite mean": {"shape": (2, 21, 24), "groups": 4, "slab": 2, **INFINITE},
    "samples: NaN in a neighbour": {"shape": (2, 25, 24), "groups": 4, "slab": 2, "nan": (0, 2, 4)},
    "samples: dgamma alone": {"shape": (2, 21, 24), "groups": 4, "slab": 2, **MASKS["dgamma alone"]},
    "samples: dbeta alone": {"shape": (2, 21, 24), "groups": 4, "slab": 2, **MASKS["dbeta alone"]},
    "samples: no dx": {"shape": (2, 21, 24), "groups": 4, "slab": 2, **MASKS["no dx"]},
    "samples: 16 bits": {"shape": (2, 21, 80), "groups": 8, "slab": 4, "shifts": ALL_OFF, **MIXED},
}
#: The same for slabs in shared memory, of several groups, and channels-last.
GROUP_SLAB_SAMPLES: Named = {
    "samples: channels of one element": {"shape": (2, 180), "groups": 2},
    "samples: a group per channel": {"shape": (2, 4, 131), "groups": 4, "slab": 2, "shifts": ALL_OFF},
    "samples: more channels than threads": {"shape": (2, 280, 2), "groups": 2, "slab": 2},
    "samples: slabs of two groups": {"shape": (2, 12, 11), "groups": 4, "slab": 2, "grid": 4},
}
GROUP_SAMPLES_LAST: Named = {
    "samples: odd rows": {"shape": (2, 5, 6), "groups": 2, "shifts": ALL_OFF},
    "samples: more channels than threads": {"shape": (2, 3, 140), "groups": 2, "slab": 2},
    "samples: one cluster for all": {"shape": (2, 9, 12), "groups": 3, "grid": 4},
    "samples: in place": {"shape": (2, 37, 20), "groups": 2, "in_place": True},
    "samples: no parameters": {"shape": (2, 5, 6), "groups": 2, **NO_PARAMETERS},
}
GROUP_GRID: Named = {
    "short last chunks and tiles": {"shape": (2, 6, 35), "groups": 2, "shifts": SAME_OFF},
    "chunks shorter than a pack": {"shape": (2, 3, 7), "groups": 3, "chunk": 3, "shifts": ALL_OFF},
    "one tile": {"shape": (1, 2, 64), "groups": 1, "chunk": 64},
    "sums several teams ahead": {"shape": (3, 6, 40), "groups": 3, "prefetch_tiles": 7},
    "all sums before the first output": {"shape": (2, 4, 40), "groups": 2, "prefetch_tiles": 1000},
    "more channels than threads, many rows to fold": {"shape": (2, 70, 9), "groups": 1, "chunk": 2},
    "as many channels as threads": {"shape": (2, 64, 5), "groups": 1},
    "channels of one value each": {"shape": (3, 70, 3), "groups": 2, "flat": True},
    "an outlier that merges would keep": {"shape": (1, 2, 1100), "groups": 1, "outlier": (0, 1, 1020)},
    "two blocks": {"shape": (5, 6, 40), "groups": 2, "grid": 2},
    "one block": {"shape": (3, 6, 40), "groups": 2, "grid": 1},
    "rows of sums in slices": {"shape": (133, 3, 3), "groups": 1},
    "no parameters": {"shape": (1, 6, 18), "groups": 2, **NO_PARAMETERS},
    "one-element groups": {"shape": (2, 4, 2), "groups": 4, "chunk": 1},
}
GROUP_GRID_LAST: Named = {
    "all channels, rows of two packs and a tail": {"shape": (2, 35, 10), "groups": 5, "slab": 5, "shifts": ALL_OFF},
    "teams of two groups, idle threads": {"shape": (2, 37, 48), "groups": 4, "slab": 2},
    "one group per slab": {"shape": (2, 20, 32), "groups": 2, "prefetch_tiles": 3},
    "more channels than threads, short chunks": {"shape": (1, 9, 136), "groups": 2, "slab": 1, "chunk": 2},
    "two blocks": {"shape": (5, 40, 48), "groups": 3, "grid": 2},
    "no parameters": {"shape": (1, 18, 16), "groups": 2, "slab": 2, **NO_PARAMETERS},
}
#: Pieces in shared memory, channels-last, of 16 rows.
GROUP_GRID_KEPT: Named = {
    label: {"keep": "shared", **facts}
    for label, facts in {
        "odd rows, pieces of several samples": {"shape": (2, 35, 10), "groups": 5, "slab": 5, "shifts": ALL_OFF},
        "two slabs per sample": {"shape": (2, 37, 48), "groups": 4, "slab": 2},
        "packs of three groups": {"shape": (1, 21, 16), "groups": 8, "slab": 8},
        "a group per channel, whole packs": {"shape": (2, 9, 16), "groups": 16, "slab": 16},
        "groups end within packs": {"shape": (2, 19, 36), "groups": 3, "slab": 3},
        "as many columns as threads": {"shape": (1, 5, 256), "groups": 2, "slab": 2, "chunk": 2},
        "more rows than a thread loads at a time": {"shape": (1, 75, 128), "groups": 2, "slab": 2, "chunk": 40},
        "more groups than lanes of the block": {"shape": (2, 5, 132), "groups": 132, "slab": 132},
        "more pieces than lanes hold": {
            "shape": (1, 150, 12),
            "groups": 3,
            "slab": 3,
            "chunk": 1,
            "outlier": (0, 140, 5),
        },
        "more pieces than lanes": {"shape": (1, 75, 12), "groups": 3, "slab": 3, "chunk": 1, "outlier": (0, 40, 5)},
        "one piece": {"shape": (3, 16, 20), "groups": 2, "slab": 2},
        "a row per piece": {"shape": (2, 3, 20), "groups": 2, "slab": 2, "chunk": 1},
        "fewer rows than parts": {"shape": (2, 3, 8), "groups": 2, "slab": 2},
        "an outlier first": {"shape": (1, 70, 12), "groups": 1, "slab": 1, "outlier": (0, 0, 0)},
        "an outlier in the last piece": {"shape": (1, 70, 12), "groups": 1, "slab": 1, "outlier": (0, 69, 11)},
        "a constant far from zero": {"shape": (2, 90, 4), "groups": 2, "slab": 2, **FAR},
        "channels of one value each": {"shape": (2, 70, 6), "groups": 2, "slab": 2, "flat": True},
        "NaN in a neighbour": {"shape": (2, 25, 6), "groups": 3, "slab": 3, "nan": (0, 2, 4)},
        "two blocks": {"shape": (5, 40, 48), "groups": 3, "slab": 3, "grid": 2},
        "one block": {"shape": (3, 40, 10), "groups": 2, "slab": 2, "grid": 1, "shifts": ALL_OFF},
        "in place": {"shape": (2, 37, 20), "groups": 2, "slab": 2, "in_place": True},
        "no parameters": {"shape": (1, 18, 16), "groups": 2, "slab": 2, **NO_PARAMETERS},
        "16 bits": {"shape": (2, 65, 6), "groups": 2, "slab": 2, "shifts": ALL_OFF, **MIXED},
        "rows of 16-bit packs": {"shape": (2, 37, 48), "groups": 4, "slab": 4, **MIXED},
    }.items()
}


def _made(op: str, strategy: str, named: Named, **tile: int) -> Iterator[Case]:
    for label, facts in named.items():
        own = dict(facts)
        fields = {"groups": own.pop("slab", 1)} if strategy in ("block", "cluster", "grid") else {}
        fields |= {"chunk": own.pop("chunk", 16)} if strategy in ("split", "grid") else {}
        fields |= {"prefetch_tiles": own.pop("prefetch_tiles", 1)} if strategy == "grid" else {}
        fields |= {"keep": own.pop("keep", "l2")} if strategy == "grid" else {}
        yield Case(op, label, {"strategy": strategy, **tile, **fields}, **own)


def _layout(named: Named, label: str) -> Named:
    """Problems whose channels are innermost in memory."""
    return {f"{label}: {name}": {"last": True, **facts} for name, facts in named.items()}


def _warp_cases(op: str) -> Iterator[Case]:
    warp: Named = dict(GROUP_WARP)
    if op.endswith("backward"):
        warp["an infinite mean"] = {"shape": (3, 3, 21), "groups": 3, **INFINITE}
        warp["an infinite mean of small channels"] = {"shape": (3, 6, 3), "groups": 2, **INFINITE}
        warp |= masked(
            GROUP_WARP, "channels of one element", "one channel per group, misaligned", "channels end within packs"
        )
        many = GROUP_ROWS | masked(GROUP_ROWS, "samples kept, groups of different alignments")
        many["samples of an infinite mean"] = {"shape": (5, 12), "groups": 2, **INFINITE}
        in_memory = {
            f"sums in memory: {label}": facts
            for label, facts in GROUP_ROWS.items()
            if facts["groups"] in (1, 2, 5, 8) and "in place" not in label
        }
        yield from _made(op, "warp", in_memory, threads=64, lanes=8, packs_per_thread=16, samples_per_team=2)
    else:
        many = dict(GROUP_ROWS)
    yield from _made(op, "warp", warp, threads=64, lanes=8, packs_per_thread=2, samples_per_team=1)
    yield from _made(op, "warp", many, threads=64, lanes=8, packs_per_thread=2, samples_per_team=2)


def _register_cases(op: str) -> Iterator[Case]:
    held = dict(GROUP_BLOCK_REGISTERS)
    if op.endswith("backward"):
        held["an infinite mean"] = {"shape": (2, 6, 35), "groups": 2, **INFINITE}
        held |= masked(held, "channels end within packs", "one channel per group, misaligned")
    yield from _made(op, "block", held, threads=64, stages=1, load="registers", packs_per_thread=2)


def _column_cases(op: str) -> Iterator[Case]:
    columns, pieces = _layout(GROUP_COLUMNS, "NHWC"), _layout(GROUP_CLUSTER_COLUMNS, "NHWC")
    fields: dict[str, Any] = {"threads": 64, "stages": 1, "load": "registers"}
    if op.endswith("backward"):
        columns |= masked(columns, "NHWC: idle threads, groups end within packs", "NHWC: one column")
        pieces |= masked(pieces, "NHWC: columns: fewer rows in the last block")
        infinite = {"shape": (2, 21, 24), "groups": 4, "slab": 2, "last": True, **INFINITE}
        columns["NHWC: an infinite mean"] = pieces["NHWC: columns: an infinite mean"] = infinite
        warp = {f"{label}, a warp": columns[label] for label in ("NHWC: two positions", "NHWC: three blocks for ten")}
        yield from _made(op, "block", warp, **{**fields, "threads": 32}, packs_per_thread=6)
    one = {"cluster": 2, **({"samples": 1} if op.endswith("backward") else {})}
    yield from _made(op, "block", columns, **fields, packs_per_thread=5)
    yield from _made(op, "cluster", pieces, **fields, **one)


def _kept(backward: bool) -> Named:
    """Problems of `grid` with keep=shared. A backward has no moments that an outlier could spoil."""
    if not backward:
        return GROUP_GRID_KEPT
    kept = {label: facts for label, facts in GROUP_GRID_KEPT.items() if "outlier" not in facts}
    kept["many rows of channel sums"] = {"shape": (1, 150, 12), "groups": 3, "slab": 3, "chunk": 1, "keep": "shared"}
    kept["an infinite mean"] = kept["odd rows, pieces of several samples"] | {"shifts": {}, **INFINITE}
    for label, mask in {"dx alone": (True, False, False), "dx and dgamma": (True, True, False)}.items():
        kept[f"two slabs per sample, {label}"] = kept["two slabs per sample"] | {"mask": mask}
    return kept


def group_norm_cases(op: str) -> Iterator[Case]:
    backward = op.endswith("backward")

    made = functools.partial(_made, op)

    yield from _warp_cases(op)
    block = GROUP_BLOCK | {"16 bits": {"shape": (2, 6, 35), "groups": 2, "shifts": ALL_OFF, **MIXED}}
    block |= _layout(GROUP_BLOCK_LAST, "NHWC")
    split = GROUP_SPLIT | {"16 bits": {"shape": (2, 6, 35), "groups": 2, "shifts": ALL_OFF, **MIXED}}
    split |= _layout(GROUP_SPLIT_LAST, "NHWC")
    grid = GROUP_GRID | {"16 bits": {"shape": (2, 6, 35), "groups": 2, "shifts": ALL_OFF, **MIXED}}
    grid |= _layout(GROUP_GRID_LAST, "NHWC")
    cluster = GROUP_CLUSTER | {"16 bits": {"shape": (2, 6, 35), "groups": 2, "shifts": ALL_OFF, **MIXED}}
    last = _layout(GROUP_CLUSTER_LAST, "NHWC")
    for named in (block, cluster, last, split, grid):
        named["in place"] = {"shape": (3, 5, 37), "groups": 1, "in_place": True}
        named["NHWC: in place"] = {"shape": (3, 37, 20), "groups": 2, "last": True, "in_place": True}
        named["a constant far from zero"] = {"shape": (2, 4, 90), "groups": 2, **FAR}
        named["NaN in a neighbour"] = {"shape": (2, 6, 5), "groups": 6, "slab": 3, "nan": (0, 2, 4)}
        named["NHWC: NaN in a neighbour"] = {"shape": (2, 5, 6), "groups": 6, "slab": 3, "nan": (0, 4, 2), "last": True}
        if backward:
            named["an infinite mean"] = {"shape": (2, 6, 5), "groups": 2, **INFINITE}
    for label in [label for label in cluster if label.startswith("NHWC")]:
        last[label] = cluster.pop(label)
    for label in [label for label in last if not label.startswith("NHWC")]:
        del last[label]
    cluster["NaN in a neighbour"] = {"shape": (2, 6, 15), "groups": 6, "slab": 3, "nan": (0, 2, 4)}
    cluster["an infinite mean"] = {"shape": (2, 6, 15), "groups": 2, **INFINITE}
    for facts in split.values():
        facts.pop("slab", None)
    grid["NaN in a neighbour"].pop("slab")
    grid["NHWC: NaN in a neighbour"]["slab"] = 6
    grid["NHWC: in place"]["slab"] = 2
    if backward:
        block |= masked(block, "one part per channel", "NHWC: odd rows", "two blocks for ten")
        cluster |= masked(cluster, "a channel in both pieces")
        last |= masked(last, "NHWC: odd rows")
        split |= masked(split, "a short last chunk", "NHWC: idle threads")
        grid |= {
            f"{label}, dx alone": grid[label] | MASKS["dx alone"] for label in ("one tile", "NHWC: one group per slab")
        }
    yield from made("block", block, threads=64, stages=2, load="cp_async", packs_per_thread=1)
    yield from made("block", GROUP_BLOCK_BULK, threads=64, stages=2, load="bulk", packs_per_thread=1)
    yield from _register_cases(op)
    yield from _column_cases(op)
    yield from made("split", split, threads=64)
    yield from made("grid", grid, threads=64)
    yield from made("grid", _layout(_kept(backward), "NHWC: kept"), threads=64)
    one = {"cluster": 2, **({"samples": 1} if backward else {})}
    yield from made("cluster", cluster, threads=64, stages=2, load="bulk", **one)
    slices = dict(GROUP_CLUSTER_REGISTERS)
    if backward:
        slices["slices: an infinite mean"] = {"shape": (2, 6, 35), "groups": 2, **INFINITE}
        slices |= masked(slices, "slices: a channel in both", "slices: one channel per group, misaligned")
    yield from made("cluster", slices, threads=64, stages=1, load="registers", **one)
    yield from made("cluster", last, threads=64, stages=2, load="cp_async", **one)
    yield from _of_samples(op)


def _of_samples(op: str) -> Iterator[Case]:
    """Clusters that have the blocks of all samples, for the sums of a backward: one block or two for each."""
    if op == "group_norm":
        return
    slabs = GROUP_CLUSTER_SAMPLES | GROUP_SLAB_SAMPLES
    last = _layout(GROUP_SAMPLES_LAST, "NHWC")
    columns = _layout(GROUP_COLUMN_SAMPLES, "NHWC")
    four = {"shape": (4, 6, 37), "groups": 2}
    for cluster in (2, 4):
        tile: dict[str, Any] = {"threads": 64, "cluster": cluster, "samples": 2}

        yield from _made(op, "cluster", GROUP_CLUSTER_SAMPLES, stages=1, load="registers", **tile)
        yield from _made(op, "cluster", columns, stages=1, load="registers", **tile)
        yield from _made(op, "cluster", slabs, stages=2, load="bulk", **tile)
        yield from _made(op, "cluster", last, stages=2, load="cp_async", **tile)
    for cluster in (4, 8):
        fields = {"threads": 64, "cluster": cluster, "samples": 4, "stages": 1, "load": "registers"}
        yield from _made(op, "cluster", {f"samples: four, in a cluster of {cluster}": four}, **fields)
