"""The strategies of LayerNorm, forward and backward: their tiles. No kernel text here.

A problem of LayerNorm has its rows as samples, the length of a row as channels, one position and one group.
"""

from __future__ import annotations

from typing import Any

from cunorm.core.strategy import Strategy, Tile
from cunorm.ops.common.building_blocks import written_and_read

from .grid import GRID_SPACE, grid_launches, grid_workspace, grid_workspace_traffic, refuses_grid
from .grid import worth_trying as worth_trying_grid
from .rows import refuses_block, refuses_cluster, refuses_warp, rows_launches, rows_workspace, worth_trying
from .split import refuses_split, split_launches, split_workspace, split_workspace_traffic

#: Rows an owner takes in turn. It adds them one after another, so more of them would cost digits of dgamma and dbeta.
_ROWS = {"rows": (1, 2, 4, 8, 16, 32, 64)}
#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
_WARP_SPACE = {"packs": (1, 2, 4, 8), "lanes": (1, 2, 4, 8, 16, 32), "threads": (128, 256), **_ROWS}
#: Teams of a block that share its parameters and, in a backward, put their sums together.
_TEAMS = {"block_teams": (1, 2, 4)}
_BLOCK_SPACE = {"threads": (64, 128, 256, 512), "packs": (1, 2, 3, 4, 6), **_ROWS, **_TEAMS}
_CLUSTER_SPACE = {"threads": (256, 512), "packs": (1, 2, 3, 4, 6, 8), "cluster": (2, 4, 8, 16), **_ROWS, **_TEAMS}
_SPLIT_SPACE = {"threads": (128, 256), "packs": (1, 2, 4), **_ROWS}
#: Blocks of a backward that put their sums together.
_MERGED = {"cluster": (1, 2, 4, 8)}


def _short_rows(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    return 256, 32, 1, 1


def _fills_cluster(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """As long rows as a team of the cluster holds."""
    return 256, tile.cluster * tile.threads // tile.block_teams * tile.packs * pack, 1, 1


def _fills_slabs(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """As long rows as the teams of all slabs hold: these have a row each."""
    return max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * tile.packs * pack, 1, 1


def _held(op: str, name: str, space: dict[str, tuple[int, ...]], legality: Any) -> Strategy:
    """A strategy that holds rows in registers."""
    packs = space["packs"]
    return Strategy(
        name=name,
        op=op,
        space=space,
        constants=("threads", "lanes", "packs", "cluster", "block_teams"),
        legality=legality,
        launches=rows_launches,
        workspace=rows_workspace,
        workspace_traffic=written_and_read(rows_workspace),
        example=_fills_cluster if name == "cluster" else _short_rows,
        worth=lambda problem, tile: worth_trying(problem, tile, packs),
    )


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    block = {**_BLOCK_SPACE, **_MERGED} if backward else {**_BLOCK_SPACE, "packs": (1, 2, 3, 4, 6, 8)}
    split = Strategy(
        name="split",
        op=op,
        space=_SPLIT_SPACE if backward else {**_SPLIT_SPACE, "chunk": (1024, 4096, 16384, 65536)},
        constants=("threads", "packs"),
        legality=refuses_split,
        launches=split_launches,
        workspace=split_workspace,
        workspace_traffic=split_workspace_traffic,
        example=_short_rows,
    )
    grid = Strategy(
        name="grid",
        op=op,
        space=GRID_SPACE,
        constants=("threads", "lanes", "packs"),
        legality=refuses_grid,
        launches=grid_launches,
        workspace=grid_workspace,
        workspace_traffic=grid_workspace_traffic,
        example=_fills_slabs,
        worth=worth_trying_grid,
    )
    return {
        "warp": _held(op, "warp", _WARP_SPACE, refuses_warp),
        "block": _held(op, "block", block, refuses_block),
        "cluster": _held(op, "cluster", _CLUSTER_SPACE, refuses_cluster),
        "grid": grid,
        "split": split,
    }


FORWARD: dict[str, Strategy] = _strategies("layer_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward", backward=True)
