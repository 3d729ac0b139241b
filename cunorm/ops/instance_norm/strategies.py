"""Strategies of InstanceNorm, forward and backward: those of GroupNorm with their kernels, for one channel per group.

A problem of InstanceNorm has as many groups as channels. Its tilings are those of the same problem of GroupNorm. The
costs of the cost model belong to the kernels, so GroupNorm's apply. The shortlist of tiles is InstanceNorm's own: its
groups are shorter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from cunorm.core.problem import Problem
from cunorm.core.strategy import Strategy, Tile, Tiling
from cunorm.ops.group_norm import strategies as group_norm

#: Example sizes: channels, and positions of a channel that a block or a cluster holds.
CHANNELS, OF_BLOCK, OF_CLUSTER = 64, 64, 512


@functools.lru_cache(maxsize=256)
def as_op(problem: Problem, op: str) -> Problem:
    """Return the same problem of another op. It is kept, because a ranking makes a thousand tilings of one problem."""
    return replace(problem, op=op)


def _tiling(strategy: Strategy, problem: Problem, tile: Tile) -> Tiling:
    """Tiling of the problem of GroupNorm. Its kernels have the name of that op."""
    return strategy.of(as_op(problem, strategy.op), tile)


def _fills_team(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose channels fill a team, with HxW = 1 if a team takes several samples."""
    HxW = 1 if tile.samples_per_team > 1 else tile.lanes * tile.packs_per_thread * pack
    return 256, CHANNELS, HxW, CHANNELS


def _of_block(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes for a block."""
    return 256, CHANNELS, OF_BLOCK, CHANNELS


def _of_cluster(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes for a cluster, with as many samples as the tile requires."""
    samples = tile.as_dict().get("samples", 1)
    return samples if samples > 1 else 256, CHANNELS, OF_CLUSTER, CHANNELS


_EXAMPLES = {"warp": _fills_team, "cluster": _of_cluster}


def _strategies(op: str, of_groups: Mapping[str, Strategy]) -> dict[str, Strategy]:
    return {
        name: replace(
            one,
            op=op,
            kernels_of=one.op,
            of=functools.partial(_tiling, one),
            example=_EXAMPLES.get(name, _of_block),
        )
        for name, one in of_groups.items()
    }


FORWARD: dict[str, Strategy] = _strategies("instance_norm", group_norm.FORWARD)
BACKWARD: dict[str, Strategy] = _strategies("instance_norm_backward", group_norm.BACKWARD)
