"""Strategies of LayerNorm, forward and backward. The kernels are in kernels_cu.

In a problem of LayerNorm, N is the number of rows, C is the length of a row, and HxW and group are 1.
"""

from __future__ import annotations

from cunorm.core.strategy import Strategy, Tile
from cunorm.ops.common.rows import held_strategies, short_rows
from cunorm.ops.common.strips import STRIPS_SPACE, StripGradients

from .grid import GRID_SPACE, LayerGrid
from .split import SPLIT_SPACE, LayerSplit


def _fills_slabs(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose rows fill the teams of all slabs, with one row per team."""
    return max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * tile.packs_per_thread * pack, 1, 1


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    space = STRIPS_SPACE if backward else SPLIT_SPACE
    split = StripGradients if backward else LayerSplit
    made = (
        *held_strategies(op, backward),
        Strategy("grid", op, GRID_SPACE, ("threads", "lanes", "packs_per_thread"), LayerGrid, _fills_slabs),
        Strategy("split", op, space, ("threads", "packs_per_thread"), split, short_rows),
    )
    return {strategy.name: strategy for strategy in made}


FORWARD: dict[str, Strategy] = _strategies("layer_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward", backward=True)
