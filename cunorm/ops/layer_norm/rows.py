"""LayerNorm's strategies that hold rows in registers, `warp`, `block` and `cluster`: legality, launches, workspace."""

from __future__ import annotations

from typing import Any

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, by_name, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (  # fmt: skip
    WARP,
    blocks_for,
    pair_bytes,
    parameter_launches,
    parameter_workspace,
    refuses_cluster_size,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
    tensors_read,
)
from cunorm.ops.common.rows import (  # fmt: skip
    ACCESS_BYTES,
    columns_of,
    lanes_of,
    merged_of,
    most_packs_ahead,
    parameters_given,
    reads_ahead,
    refuses_capacity,
    resident,
    row_phases,
    row_registers,
    row_streams,
    row_sums_shared,
    slices_of,
    teams_of_block,
)

from .split import gradient_arguments, owners

# ---- teams ----------------------------------------------------------------------------------------------------------


def _teams(problem: Problem, tile: Tile) -> int:
    return owners(problem, tile, teams_of_block(tile) * merged_of(tile))


def _partial_rows(problem: Problem, tile: Tile) -> int:
    """Rows of sums of the columns: one for each block, or for the blocks of a cluster."""
    return _teams(problem, tile) // (teams_of_block(tile) * merged_of(tile))


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the sums, and the parameters that several teams share."""
    sums = row_sums_shared(problem, tile)
    if teams_of_block(tile) == 1:
        return sums
    given = [dtype for dtype in parameters_given(problem) if dtype is not None]
    return sums + sum(round_up(columns_of(problem, tile) * ITEMSIZE[dtype], ACCESS_BYTES) for dtype in given)


# ---- legality -------------------------------------------------------------------------------------------------------


def refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if problem.is_backward and tile.threads & (tile.threads - 1):
        return f"threads is {tile.threads}, expected a power of two: teams hand on their sums by halves"
    if (sentence := refuses_capacity(problem, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(row_registers(problem, tile), tile, device)


def _refuses_blocks(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.block_teams not in (1, 2, 4, 8):
        return f"block_teams is {tile.block_teams}, expected 1, 2, 4 or 8"
    if tile.block_teams > 1 and problem.dtype == "float64":
        return f"block_teams is {tile.block_teams}, expected 1: float64 leaves no registers for several teams"
    if tile.block_teams > 1 and not reads_ahead(problem, tile):
        return (
            f"packs is {tile.packs}, expected at most {most_packs_ahead(problem, tile)} for {tile.block_teams} "
            f"block_teams: they wait for each other, so each must have its next row on its way"
        )
    if lanes_of(tile) % WARP or lanes_of(tile) == WARP:
        least = f"a multiple of {WARP * tile.block_teams} from {2 * WARP * tile.block_teams} up"
        return f"threads is {tile.threads}, expected {least}: a row of one warp is strategy warp's"
    if (sentence := refuses_capacity(problem, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_resident(row_registers(problem, tile), tile, device)


def refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if merged_of(tile) > 1 and (sentence := refuses_cluster_size(tile, device)) is not None:
        return sentence
    if merged_of(tile) > 1 and not problem.wants_parameters:
        return f"cluster is {tile.cluster}, expected 1: no dgamma and no dbeta to put together"
    return _refuses_blocks(problem, tile, device)


def refuses_cluster(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_cluster_size(tile, device)) is not None:
        return sentence
    if (tile.cluster - 1) * columns_of(problem, tile) >= problem.C:
        return f"a row of {problem.C} elements is too short for {tile.cluster} slices"
    if tile.block_teams > 1 and problem.C % problem.pack:
        return (
            f"block_teams is {tile.block_teams}, expected 1: rows of {problem.C} elements begin at different places of "
            f"16 bytes, so their slices have different columns"
        )
    return _refuses_blocks(problem, tile, device)


def worth_trying(problem: Problem, tile: Tile, packs: tuple[int, ...]) -> bool:
    """Whether no fewer of the space's packs hold a row, from the 16-byte boundary before it; whether at least half of
    the threads have a part of a slice; and whether the teams of a block have something to share and a row each.
    """
    if tile.strategy != "warp" and tile.block_teams > 1:
        shared = problem.wants_parameters or any(dtype is not None for dtype in parameters_given(problem))
        if not shared or tile.block_teams > problem.N:
            return False
    ahead = problem.pack - 1 if problem.C % problem.pack else 0
    needed = ceil_div(problem.C + ahead, lanes_of(tile) * slices_of(tile) * problem.pack)
    enough = min((count for count in packs if count >= needed), default=max(packs))
    return tile.packs == enough and (
        slices_of(tile) == 1 or 2 * columns_of(problem, tile) >= lanes_of(tile) * problem.pack
    )


# ---- launches -------------------------------------------------------------------------------------------------------


def rows_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the rows of sums of the columns."""
    return parameter_workspace(problem, _partial_rows(problem, tile))


def _parameters_read(problem: Problem, tile: Tile) -> int:
    """Bytes of gamma and beta that are asked for: by each block once where its teams share them or where they stay in
    registers; else by a block for every row, and in a backward for the sums and for dx.
    """
    blocks, of_row = _teams(problem, tile) // teams_of_block(tile), 1 + ("dx" in problem.outputs)
    return sum(
        problem.C
        * ITEMSIZE[dtype]
        * (blocks if teams_of_block(tile) > 1 or resident(problem, tile, dtype) else of_row * problem.N)
        for dtype in parameters_given(problem)
        if dtype is not None
    )


def rows_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The kernel that reads every byte once, and the parameter sums behind it."""
    entry, teams, partial_rows = f"{problem.op}_{tile.strategy}", _teams(problem, tile), _partial_rows(problem, tile)
    blocks, cluster = teams // teams_of_block(tile) * slices_of(tile), slices_of(tile) * merged_of(tile)
    shape = {"rows": problem.N, "length": problem.C, "teams": teams}
    traffic = (tensors_read(problem) + ("y" in problem.outputs or "dx" in problem.outputs)) * problem.nbytes
    # All blocks ask the same few places of the L2 cache for their parameters: no faster than DRAM gives what is apart.
    traffic += _parameters_read(problem, tile)
    if not problem.is_backward:
        arguments = {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "eps"), **shape}
    else:
        direct = problem.wants_parameters and partial_rows == 1
        kept = by_name("dx", workspace=problem.wants_parameters and not direct, dgamma=direct, dbeta=direct)
        arguments = {**gradient_arguments(problem), **kept, **shape}
        traffic += partial_rows * problem.C * pair_bytes(problem) * problem.wants_parameters
    facts: dict[str, Any] = {
        "registers": row_registers(problem, tile),
        "shared_bytes": _shared(problem, tile),
        "phases": row_phases(problem, tile, ceil_div(problem.N, _teams(problem, tile))),
        "streams": row_streams(problem, tile),
        "cluster": cluster,
        "abreast": merged_of(tile) * (1 if tile.strategy == "warp" else teams_of_block(tile)),
    }
    grid = max(1, blocks_for(blocks) // cluster) * cluster
    main = Launch(entry, entry, grid, tile.threads, arguments, traffic=traffic, **facts)
    second = problem.wants_parameters and partial_rows > 1
    return (main, *parameter_launches(problem, partial_rows)) if second else (main,)
