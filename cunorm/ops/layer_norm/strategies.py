"""The strategies of LayerNorm, forward and backward: their tiles. No kernel text here.

A problem of LayerNorm has its rows as samples, the length of a row as channels, one position and one group.
"""

from __future__ import annotations

from cunorm.core.strategy import Strategy, Tile

from .grid import GRID_SPACE, LayerGrid
from .rows import (
    BLOCK_BACKWARD_SPACE,
    BLOCK_SPACE,
    CLUSTER_SPACE,
    WARP_SPACE,
    LayerBlock,
    LayerBlockBackward,
    LayerCluster,
    LayerWarp,
)
from .split import SPLIT_BACKWARD_SPACE, SPLIT_SPACE, LayerSplit, LayerSplitBackward

#: What a kernel that holds rows in registers knows at compile time.
_HELD = ("threads", "lanes", "packs", "cluster", "block_teams")


def _short_rows(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    return 256, 32, 1, 1


def _fills_cluster(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """As long rows as a team of the cluster holds."""
    return 256, tile.cluster * tile.threads // tile.block_teams * tile.packs * pack, 1, 1


def _fills_slabs(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """As long rows as the teams of all slabs hold: these have a row each."""
    return max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * tile.packs * pack, 1, 1


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    block = (BLOCK_BACKWARD_SPACE, LayerBlockBackward) if backward else (BLOCK_SPACE, LayerBlock)
    split = (SPLIT_BACKWARD_SPACE, LayerSplitBackward) if backward else (SPLIT_SPACE, LayerSplit)
    made = (
        Strategy("warp", op, WARP_SPACE, _HELD, LayerWarp, _short_rows),
        Strategy("block", op, block[0], _HELD, block[1], _short_rows),
        Strategy("cluster", op, CLUSTER_SPACE, _HELD, LayerCluster, _fills_cluster),
        Strategy("grid", op, GRID_SPACE, ("threads", "lanes", "packs"), LayerGrid, _fills_slabs),
        Strategy("split", op, split[0], ("threads", "packs"), split[1], _short_rows),
    )
    return {strategy.name: strategy for strategy in made}


FORWARD: dict[str, Strategy] = _strategies("layer_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward", backward=True)
