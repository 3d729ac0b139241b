"""LayerNorm's strategies that hold rows in registers, `warp`, `block` and `cluster`: legality, launches, workspace."""

from __future__ import annotations

from typing import Any

from .devices import Device
from .layer_norm_split import gradient_arguments, owners
from .problem import ITEMSIZE, Problem
from .strategy import Launch, Tile, ceil_div, refuses_threads
from .strategy_common import (
    SECTOR_PACKS,
    WARP,
    blocks_for,
    is_backward,
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

__all__ = ["refuses_block", "refuses_cluster", "refuses_warp", "rows_launches", "rows_workspace", "worth_trying"]

ACCESS_BYTES = 16
SIDE_BY_SIDE = 64  # bytes that DRAM gives at a time
PACKS_IN_FLIGHT = 4  # of a stream, as the cost model counts them


# ---- what a team holds ----------------------------------------------------------------------------------------------


def _slices(tile: Tile) -> int:
    """Blocks that share a row."""
    return tile.cluster if tile.strategy == "cluster" else 1


def _merged(tile: Tile) -> int:
    """Blocks that put the sums of their rows together."""
    return tile.as_dict().get("cluster", 1) if tile.strategy == "block" else 1


def _lanes(tile: Tile) -> int:
    """Threads of a block that share a row."""
    return tile.lanes if tile.strategy == "warp" else tile.threads // tile.block_teams


def _in_block(tile: Tile) -> int:
    """Teams of a block."""
    return tile.threads // _lanes(tile)


def _teams(problem: Problem, tile: Tile) -> int:
    return owners(problem, tile, _in_block(tile) * _merged(tile))


def _partial_rows(problem: Problem, tile: Tile) -> int:
    """Rows of sums of the columns: one for each block, or for the blocks of a cluster."""
    return _teams(problem, tile) // (_in_block(tile) * _merged(tile))


def _reads_ahead(problem: Problem, tile: Tile) -> bool:
    """reads_ahead in rows.cuh."""
    return _tensors(problem) * tile.packs <= (8 if tile.strategy == "warp" else 4)


def _tensors(problem: Problem) -> int:
    """Tensors that a kernel has registers for."""
    return 2 if is_backward(problem) else 1


def _given(problem: Problem) -> tuple[str | None, ...]:
    """Dtypes of the parameters that a kernel reads; None of one that is absent."""
    return (problem.gamma_dtype,) if is_backward(problem) else (problem.gamma_dtype, problem.beta_dtype)


def _resident(problem: Problem, tile: Tile, dtype: str) -> bool:
    """RowParameters::resident in rows.cuh: whether a parameter of that dtype stays in registers from row to row."""
    return tile.packs * problem.pack * ITEMSIZE[dtype] <= (128 if tile.strategy == "warp" else 64)


def _sums_in_registers(problem: Problem, tile: Tile) -> bool:
    """sums_in_registers in row_gradients.cuh."""
    return tile.packs * problem.pack * pair_bytes(problem) <= (256 if tile.strategy == "warp" else 128)


def _registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill: the tensors' packs as they are stored, twice where a row is read ahead;
    the parameters and the sums that stay from row to row; and for a forward y's packs. The compile gate proves it.
    """
    words, widened = ACCESS_BYTES // 4, problem.pack * problem.sum_itemsize // 4
    of_pack = _tensors(problem) * words * (2 if _reads_ahead(problem, tile) else 1)
    for dtype in _given(problem):  # one that is absent is held as constants
        if _resident(problem, tile, dtype or problem.stats_dtype):
            of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
    if not is_backward(problem):
        return 40 + tile.packs * (of_pack + words)
    if _sums_in_registers(problem, tile):
        of_pack += 2 * widened
    # What a cluster's sums need besides, in pairs of registers.
    pairs = 12 if problem.dtype == "float64" and _slices(tile) > 1 else 0
    return 32 + pairs + 2 * widened + tile.packs * of_pack


def _columns(problem: Problem, tile: Tile) -> int:
    """Columns of a block's slice of a row, at most."""
    slices = _slices(tile)
    if slices == 1:
        return problem.C
    return round_up(ceil_div(problem.C + problem.pack - 1, slices), SECTOR_PACKS * problem.pack)


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block, in the kernel's order: two rows of sums of its warps, and of its teams what a cluster
    reads; the columns' sums; the parameters that several teams share. Each array is from a 16-byte boundary.
    """
    pair, teams = pair_bytes(problem), _in_block(tile)
    told = teams if _slices(tile) > 1 else 0
    sizes = [0 if tile.strategy == "warp" else 2 * (tile.threads // WARP + told) * pair]
    if problem.wants_parameters:
        rows = teams // 2 if _sums_in_registers(problem, tile) else teams
        sizes.append(max(rows, _merged(tile) > 1) * round_up(_columns(problem, tile), problem.pack) * pair)
    if teams > 1:
        sizes += [_columns(problem, tile) * ITEMSIZE[dtype] for dtype in _given(problem) if dtype is not None]
    return sum(round_up(size, ACCESS_BYTES) for size in sizes)


# ---- legality -------------------------------------------------------------------------------------------------------


def _refuses_capacity(problem: Problem, tile: Tile) -> str | None:
    threads = _lanes(tile) * _slices(tile)
    capacity = threads * tile.packs * problem.pack
    if capacity < problem.C:
        return f"a row has {problem.C} elements, {threads} threads of {tile.packs} packs hold {capacity}"
    return None


def refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if is_backward(problem) and tile.threads & (tile.threads - 1):
        return f"threads is {tile.threads}, expected a power of two: teams hand on their sums by halves"
    if (sentence := _refuses_capacity(problem, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(_registers(problem, tile), tile, device)


def _refuses_blocks(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.block_teams not in (1, 2, 4, 8):
        return f"block_teams is {tile.block_teams}, expected 1, 2, 4 or 8"
    if _lanes(tile) % WARP or _lanes(tile) == WARP:
        least = f"a multiple of {WARP * tile.block_teams} from {2 * WARP * tile.block_teams} up"
        return f"threads is {tile.threads}, expected {least}: a row of one warp is strategy warp's"
    if (sentence := _refuses_capacity(problem, tile)) is not None:
        return sentence
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_resident(_registers(problem, tile), tile, device)


def refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if _merged(tile) > 1 and (sentence := refuses_cluster_size(tile, device)) is not None:
        return sentence
    if _merged(tile) > 1 and not problem.wants_parameters:
        return f"cluster is {tile.cluster}, expected 1: no dgamma and no dbeta to put together"
    return _refuses_blocks(problem, tile, device)


def refuses_cluster(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_cluster_size(tile, device)) is not None:
        return sentence
    if (tile.cluster - 1) * _columns(problem, tile) >= problem.C:
        return f"a row of {problem.C} elements is too short for {tile.cluster} slices"
    if tile.block_teams > 1 and problem.C % problem.pack:
        return (
            f"block_teams is {tile.block_teams}, expected 1: rows of {problem.C} elements begin at different places of "
            f"16 bytes, so their slices have different columns"
        )
    return _refuses_blocks(problem, tile, device)


def worth_trying(problem: Problem, tile: Tile, packs: tuple[int, ...]) -> bool:
    """Whether no fewer of the space's packs hold a row, from the 16-byte boundary before it; whether at least half of
    the threads have a part of a slice; and whether the teams of a block have something to share, a row each, and the
    next one on its way while all of them wait for the sums of this one.
    """
    if tile.strategy != "warp" and tile.block_teams > 1:
        shared = problem.wants_parameters or any(dtype is not None for dtype in _given(problem))
        if not shared or tile.block_teams > problem.N or not _reads_ahead(problem, tile):
            return False
    ahead = problem.pack - 1 if problem.C % problem.pack else 0
    needed = ceil_div(problem.C + ahead, _lanes(tile) * _slices(tile) * problem.pack)
    enough = min((count for count in packs if count >= needed), default=max(packs))
    return tile.packs == enough and (_slices(tile) == 1 or 2 * _columns(problem, tile) >= _lanes(tile) * problem.pack)


# ---- launches -------------------------------------------------------------------------------------------------------


def rows_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the rows of sums of the columns."""
    return parameter_workspace(problem, _partial_rows(problem, tile))


def _phases(problem: Problem, tile: Tile) -> int:
    """How often a team waits with nothing on its way: for its first row alone, if it reads the others ahead; else for
    each. And for the sums of a row, which a block puts together itself and a cluster once more; and for the columns'
    sums where those are in shared memory: reading and writing them takes about as long.
    """
    sums = 0 if tile.strategy == "warp" else 1 + (_slices(tile) > 1)
    sums += problem.wants_parameters and not _sums_in_registers(problem, tile)
    rows = ceil_div(problem.N, _teams(problem, tile))
    return 1 + (sums if _reads_ahead(problem, tile) else (1 + sums) * rows)


def _streams(problem: Problem, tile: Tile) -> float:
    """Loads that a thread has on their way: its packs of a row, less where those of few lanes share what DRAM gives."""
    lanes = _lanes(tile)
    packs = min(tile.packs, ceil_div(problem.C, lanes * _slices(tile) * problem.pack))
    shared = 1.0 if packs == 1 else min(1.0, lanes * ACCESS_BYTES / SIDE_BY_SIDE)
    return tensors_read(problem) * packs * shared / PACKS_IN_FLIGHT


def _parameters_read(problem: Problem, tile: Tile) -> int:
    """Bytes of gamma and beta that are asked for: by each block once where its teams share them or where they stay in
    registers; else by a block for every row, and in a backward for the sums and for dx.
    """
    blocks, of_row = _teams(problem, tile) // _in_block(tile), 1 + ("dx" in problem.outputs)
    return sum(
        problem.C
        * ITEMSIZE[dtype]
        * (blocks if _in_block(tile) > 1 or _resident(problem, tile, dtype) else of_row * problem.N)
        for dtype in _given(problem)
        if dtype is not None
    )


def rows_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The kernel that reads every byte once, and the parameter sums behind it."""
    entry, teams, partial_rows = f"{problem.op}_{tile.strategy}", _teams(problem, tile), _partial_rows(problem, tile)
    blocks, cluster = teams // _in_block(tile) * _slices(tile), _slices(tile) * _merged(tile)
    shape = (problem.N, problem.C, teams)
    traffic = (tensors_read(problem) + ("y" in problem.outputs or "dx" in problem.outputs)) * problem.nbytes
    # All blocks ask the same few places of the L2 cache for their parameters: no faster than DRAM gives what is apart.
    traffic += _parameters_read(problem, tile)
    if not is_backward(problem):
        arguments: tuple[str | int, ...] = ("x", "gamma", "beta", "y", "mean", "rstd", *shape, "eps")
    else:
        direct = problem.wants_parameters and partial_rows == 1
        arguments = (
            *gradient_arguments(problem),
            "dx",
            "workspace" if problem.wants_parameters and not direct else 0,
            *(("dgamma", "dbeta") if direct else (0, 0)),
            *shape,
        )
        traffic += partial_rows * problem.C * pair_bytes(problem) * problem.wants_parameters
    facts: dict[str, Any] = {
        "registers": _registers(problem, tile),
        "shared_bytes": _shared(problem, tile),
        "phases": _phases(problem, tile),
        "streams": _streams(problem, tile),
        "cluster": cluster,
        "abreast": _merged(tile) * (1 if tile.strategy == "warp" else _in_block(tile)),
    }
    grid = max(1, blocks_for(blocks) // cluster) * cluster
    main = Launch(entry, entry, grid, tile.threads, arguments, traffic=traffic, **facts)
    second = problem.wants_parameters and partial_rows > 1
    return (main, *parameter_launches(problem, partial_rows)) if second else (main,)
