"""Strategies of LayerNorm, forward and backward. The kernels are in kernels_cu.

In a problem of LayerNorm, N is the number of rows, C is the length of a row, and HxW and group are 1.
"""

from __future__ import annotations

from cunorm.core.strategy import Strategy, Tile

from .grid import GRID_SPACE, LayerGrid
from .rows import (
    BLOCK_BACKWARD_SPACE,
    BLOCK_SPACE,
    CLUSTER_SPACE,
    WARP_BACKWARD_SPACE,
    WARP_SPACE,
    LayerBlock,
    LayerBlockBackward,
    LayerCluster,
    LayerWarp,
    LayerWarpBackward,
)
from .split import SPLIT_BACKWARD_SPACE, SPLIT_SPACE, LayerSplit, LayerSplitBackward

#: Compile-time constants of the kernels that hold rows in registers.
_HELD = ("threads", "lanes", "packs_per_thread", "cluster", "teams_per_block")


def _short_rows(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    return 256, 32, 1, 1


def _fills_cluster(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose rows fill a team of the cluster."""
    return 256, tile.cluster * tile.threads // tile.teams_per_block * tile.packs_per_thread * pack, 1, 1


def _fills_slabs(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose rows fill the teams of all slabs, with one row per team."""
    return max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * tile.packs_per_thread * pack, 1, 1


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    warp = (WARP_BACKWARD_SPACE, LayerWarpBackward) if backward else (WARP_SPACE, LayerWarp)
    block = (BLOCK_BACKWARD_SPACE, LayerBlockBackward) if backward else (BLOCK_SPACE, LayerBlock)
    split = (SPLIT_BACKWARD_SPACE, LayerSplitBackward) if backward else (SPLIT_SPACE, LayerSplit)
    made = (
        Strategy("warp", op, warp[0], _HELD, warp[1], _short_rows),
        Strategy("block", op, block[0], _HELD, block[1], _short_rows),
        Strategy("cluster", op, CLUSTER_SPACE, _HELD, LayerCluster, _fills_cluster),
        Strategy("grid", op, GRID_SPACE, ("threads", "lanes", "packs_per_thread"), LayerGrid, _fills_slabs),
        Strategy("split", op, split[0], ("threads", "packs_per_thread"), split[1], _short_rows),
    )
    return {strategy.name: strategy for strategy in made}


FORWARD: dict[str, Strategy] = _strategies("layer_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward", backward=True)
