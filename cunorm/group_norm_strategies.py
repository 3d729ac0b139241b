"""The strategies of GroupNorm, forward and backward: tiles, legality, launches, workspace. No kernel text here."""

from __future__ import annotations

from .devices import Device
from .group_norm_grid import GRID_SPACE, grid_launches, grid_workspace, grid_workspace_traffic, refuses_grid
from .group_norm_slab import (
    BLOCK_SPACE,
    CLUSTER_SPACE,
    one_sweep,
    refuses_block,
    refuses_cluster,
    slab_launches,
    slab_workspace,
)
from .group_norm_split import refuses_split, split_launches, split_workspace, split_workspace_traffic
from .problem import Problem
from .strategy import Launch, Strategy, Tile, ceil_div, refuses_threads
from .strategy_common import blocks_for, is_backward, parameter_workspace, refuses_registers, written_and_read

__all__ = ["BACKWARD", "FORWARD"]

# ---- warp -----------------------------------------------------------------------------------------------------------


def _warp_capacity(problem: Problem, tile: Tile) -> int:
    return tile.lanes * tile.packs * problem.pack


def _samples(tile: Tile) -> int:
    return tile.as_dict().get("samples", 1)


def _warp_registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill, from above: addresses and statistics; then for each pack its data, its
    values widened, and the sums kept over samples. The compile gate proves it.
    """
    base = 64 if is_backward(problem) else 48
    base += 8 if problem.dtype == "float64" else 0
    widened = problem.pack * problem.sum_itemsize // 4
    each = 9 + widened if is_backward(problem) else 5 + 2 * widened
    kept = 2 * widened if _samples(tile) > 1 else 0
    return base + tile.packs * (each + kept)


def _refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if problem.layout != "NCHW":
        return "a group of channels-last data is not one run"
    capacity = _warp_capacity(problem, tile)
    if problem.group_length > capacity:
        return f"a group has {problem.group_length} elements, {tile.lanes} lanes of {tile.packs} packs hold {capacity}"
    if problem.wants_parameters and problem.HxW > 1 and problem.group_channels > 1:
        return f"dgamma and dbeta of channels of {problem.HxW} elements do not lie whole in a lane or a team"
    if _samples(tile) > 1 and not (problem.wants_parameters and problem.HxW == 1):
        return "more than one sample a team only serves dgamma and dbeta with HxW = 1"
    return refuses_registers(_warp_registers(problem, tile), tile, device)


def _warp_rows(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.N, _samples(tile))


def _warp_workspace(problem: Problem, tile: Tile) -> int:
    return parameter_workspace(problem, _warp_rows(problem, tile))


def _warp_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    rows = _warp_rows(problem, tile)
    items = ceil_div(rows * problem.group, tile.threads // tile.lanes)
    registers = _warp_registers(problem, tile)
    return one_sweep(problem, tile, rows, blocks_for(items), registers=registers, phases=_samples(tile))


#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
_WARP_SPACE = {"packs": (1, 2, 4, 8), "lanes": (1, 2, 4, 8, 16, 32), "threads": (128, 256)}
_SPLIT_SPACE = {"threads": (128, 256, 512), "chunk": (16, 64, 256, 1024, 4096, 16384, 65536)}


def _strategies(op: str) -> dict[str, Strategy]:
    backward = op.endswith("backward")
    samples = {"samples": (1, 8, 64)} if backward else {}
    warp = Strategy(
        name="warp",
        op=op,
        space={**_WARP_SPACE, **samples},
        constants=("threads", "lanes", "packs", "samples"),
        legality=_refuses_warp,
        launches=_warp_launches,
        workspace=_warp_workspace,
        workspace_traffic=written_and_read(_warp_workspace),
    )
    block = Strategy(
        name="block",
        op=op,
        space=BLOCK_SPACE,
        constants=("threads", "chunks", "engine"),
        legality=refuses_block,
        launches=slab_launches,
        workspace=slab_workspace,
        workspace_traffic=written_and_read(slab_workspace),
    )
    cluster = Strategy(
        name="cluster",
        op=op,
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
