"""The strategies of GroupNorm, forward and backward: tiles, legality, launches, workspace. No kernel text here."""

from __future__ import annotations

from cunorm.core.strategy import Strategy, Tile
from cunorm.ops.common.building_blocks import written_and_read

from .grid import GRID_SPACE, grid_launches, grid_workspace, grid_workspace_traffic, refuses_grid
from .runs import WARP_SPACE, block_launches, block_worth, refuses_block, refuses_warp, warp_launches, warp_workspace
from .slab import BLOCK_SPACE, CLUSTER_SPACE, refuses_cluster, slab_launches, slab_workspace
from .split import refuses_split, split_launches, split_workspace, split_workspace_traffic

_SPLIT_SPACE = {"threads": (128, 256, 512), "chunk": (16, 64, 256, 1024, 4096, 16384, 65536)}


def _middling(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """A group of eight channels."""
    return 256, 8 * 32, 64, 32


def _fills_team(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """As large a group as a team holds, of channels of one element where it takes several samples."""
    HxW, group = 1 if tile.samples > 1 else 2, 4
    return 256, tile.lanes * tile.packs * pack // HxW * group, HxW, group


def _strategies(op: str) -> dict[str, Strategy]:
    warp = Strategy(
        name="warp",
        op=op,
        example=_fills_team,
        space=WARP_SPACE,
        constants=("threads", "lanes", "packs"),
        legality=refuses_warp,
        launches=warp_launches,
        workspace=warp_workspace,
        workspace_traffic=written_and_read(warp_workspace),
    )
    block = Strategy(
        name="block",
        op=op,
        example=_middling,
        space=BLOCK_SPACE,
        constants=("threads", "chunks", "engine", "packs"),
        legality=refuses_block,
        launches=block_launches,
        workspace=slab_workspace,
        workspace_traffic=written_and_read(slab_workspace),
        worth=block_worth,
    )
    cluster = Strategy(
        name="cluster",
        op=op,
        example=_middling,
        space=CLUSTER_SPACE,
        constants=("threads", "chunks", "engine", "cluster"),
        legality=refuses_cluster,
        launches=slab_launches,
        workspace=slab_workspace,
        workspace_traffic=written_and_read(slab_workspace),
    )
    split = Strategy(
        name="split",
        op=op,
        example=_middling,
        space=_SPLIT_SPACE,
        constants=("threads",),
        legality=refuses_split,
        launches=split_launches,
        workspace=split_workspace,
        workspace_traffic=split_workspace_traffic,
    )
    grid = Strategy(
        name="grid",
        op=op,
        example=_middling,
        space=GRID_SPACE,
        constants=("threads",),
        legality=refuses_grid,
        launches=grid_launches,
        workspace=grid_workspace,
        workspace_traffic=grid_workspace_traffic,
    )
    return {strategy.name: strategy for strategy in (warp, block, cluster, grid, split)}


FORWARD: dict[str, Strategy] = _strategies("group_norm")
BACKWARD: dict[str, Strategy] = _strategies("group_norm_backward")
