"""Strategies of GroupNorm, forward and backward. The kernels are in kernels_cu."""

from __future__ import annotations

from cunorm.core.strategy import Strategy, Tile

from .block import BLOCK_SPACE, CLUSTER_BACKWARD_SPACE, CLUSTER_SPACE, group_block, group_cluster
from .grid import GRID_SPACE, L2
from .grid_kept import group_grid
from .split import SPLIT_SPACE, GroupSplit
from .warp import WARP_SPACE, group_warp


def _middling(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes with eight channels per group."""
    return 256, 8 * 32, 64, 32


def _of_samples(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes with eight channels per group, and as many samples as the tile requires."""
    samples = tile.as_dict().get("samples", 1)
    return samples if samples > 1 else 256, 8 * 32, 64, 32


def _fills_team(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose groups fill a team, with HxW = 1 if a team takes several samples."""
    HxW, group = 1 if tile.samples_per_team > 1 else 2, 4
    return 256, tile.lanes * tile.packs_per_thread * pack // HxW * group, HxW, group


def _kept(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes. If blocks keep pieces, they are few, and a pack has channels of two groups of ten."""
    return _middling(tile, pack) if tile.as_dict()["keep"] == L2 else (2, 10 * 32, 64, 32)


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    staged = ("threads", "stages", "load")
    clusters = CLUSTER_BACKWARD_SPACE if backward else CLUSTER_SPACE
    divided = ("cluster", "samples") if backward else ("cluster",)
    made = (
        Strategy("warp", op, WARP_SPACE, ("threads", "lanes", "packs_per_thread"), group_warp, _fills_team),
        Strategy("block", op, BLOCK_SPACE, (*staged, "packs_per_thread"), group_block, _middling),
        Strategy("cluster", op, clusters, (*staged, *divided), group_cluster, _of_samples),
        Strategy("grid", op, GRID_SPACE, ("threads", "keep"), group_grid, _kept),
        Strategy("split", op, SPLIT_SPACE, ("threads",), GroupSplit, _middling),
    )
    return {strategy.name: strategy for strategy in made}


FORWARD: dict[str, Strategy] = _strategies("group_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("group_norm_backward", backward=True)
