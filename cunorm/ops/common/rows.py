"""What teams that hold rows in registers need: LayerNorm's `warp`, `block`, `cluster`, GroupNorm's `warp` with HxW = 1.

A problem here has its rows as samples, and the length of a row as channels.
"""

from __future__ import annotations

from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Tile, ceil_div

from .building_blocks import SECTOR_PACKS, WARP, pair_bytes, round_up, tensors_read

ACCESS_BYTES = 16
SIDE_BY_SIDE = 64  # bytes that DRAM gives at a time
PACKS_IN_FLIGHT = 4  # of a stream, as the cost model counts them


def slices_of(tile: Tile) -> int:
    """Blocks that share a row."""
    return tile.cluster if tile.strategy == "cluster" else 1


def merged_of(tile: Tile) -> int:
    """Blocks that put the sums of their rows together."""
    return tile.as_dict().get("cluster", 1) if tile.strategy == "block" else 1


def lanes_of(tile: Tile) -> int:
    """Threads of a block that share a row."""
    return tile.lanes if tile.strategy == "warp" else tile.threads // tile.block_teams


def teams_of_block(tile: Tile) -> int:
    """Teams of a block."""
    return tile.threads // lanes_of(tile)


def most_packs_ahead(problem: Problem, tile: Tile) -> int:
    """Packs of a lane with which it reads its next row while it works on this one, at most."""
    return (8 if tile.strategy == "warp" else 4) // _tensors(problem)


def reads_ahead(problem: Problem, tile: Tile) -> bool:
    """reads_ahead in rows.cuh."""
    return tile.packs <= most_packs_ahead(problem, tile)


def _tensors(problem: Problem) -> int:
    """Tensors that a kernel has registers for."""
    return 2 if problem.is_backward else 1


def parameters_given(problem: Problem) -> tuple[str | None, ...]:
    """Dtypes of the parameters that a kernel reads; None of one that is absent."""
    of_gradients = problem.is_backward and not problem.activation
    return (problem.gamma_dtype,) if of_gradients else (problem.gamma_dtype, problem.beta_dtype)


def resident(problem: Problem, tile: Tile, dtype: str) -> bool:
    """RowParameters::resident in rows.cuh: whether a parameter of that dtype stays in registers from row to row."""
    return tile.packs * problem.pack * ITEMSIZE[dtype] <= (128 if tile.strategy == "warp" else 64)


def sums_in_registers(problem: Problem, tile: Tile) -> bool:
    """sums_in_registers in row_gradients.cuh."""
    return tile.packs * problem.pack * pair_bytes(problem) <= (256 if tile.strategy == "warp" else 128)


def row_registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill: the tensors' packs as they are stored, twice where a row is read ahead;
    the parameters and the sums that stay from row to row; and for a forward y's packs. The compile gate proves it.
    """
    words, widened = ACCESS_BYTES // 4, problem.pack * problem.sum_itemsize // 4
    of_pack = _tensors(problem) * words * (2 if reads_ahead(problem, tile) else 1)
    for dtype in parameters_given(problem):  # one that is absent is held as constants
        if resident(problem, tile, dtype or problem.stats_dtype):
            of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
    if not problem.is_backward:
        return 40 + tile.packs * (of_pack + words)
    if sums_in_registers(problem, tile):
        of_pack += 2 * widened
    # What the sums of several warps need besides, in pairs of registers.
    pairs = 12 if problem.dtype == "float64" and tile.strategy != "warp" else 0
    return 32 + pairs + 2 * widened + tile.packs * of_pack


def columns_of(problem: Problem, tile: Tile) -> int:
    """Columns of a block's slice of a row, at most."""
    slices = slices_of(tile)
    if slices == 1:
        return problem.C
    return round_up(ceil_div(problem.C + problem.pack - 1, slices), SECTOR_PACKS * problem.pack)


def row_sums_shared(problem: Problem, tile: Tile, kinds: int = 1) -> int:
    """Shared memory of a block for sums, in the kernel's order: two rows of its warps', and of its teams what a cluster
    reads; the columns' sums, where ``kinds`` neighbouring teams have columns of their own. Each array is from a 16-byte
    boundary.
    """
    pair, teams = pair_bytes(problem), teams_of_block(tile)
    told = teams if slices_of(tile) > 1 else 0
    sizes = [0 if tile.strategy == "warp" else 2 * (tile.threads // WARP + told) * pair]
    if problem.wants_parameters:
        rows = teams if not sums_in_registers(problem, tile) else teams // 2 if kinds < teams else 0
        sizes.append(max(rows, merged_of(tile) > 1) * round_up(columns_of(problem, tile), problem.pack) * pair)
    return sum(round_up(size, ACCESS_BYTES) for size in sizes)


def row_phases(problem: Problem, tile: Tile, rows: int) -> int:
    """How often a team of ``rows`` rows waits with nothing on its way: for its first row alone, if it reads the others
    ahead; else for each. And for the sums of a row, which a block puts together itself and a cluster once more; and for
    the columns' sums where those are in shared memory: reading and writing them takes about as long.
    """
    sums = 0 if tile.strategy == "warp" else 1 + (slices_of(tile) > 1)
    sums += problem.wants_parameters and not sums_in_registers(problem, tile)
    return 1 + (sums if reads_ahead(problem, tile) else (1 + sums) * rows)


def row_streams(problem: Problem, tile: Tile) -> float:
    """Loads that a thread has on their way: its packs of a row, less where those of few lanes share what DRAM gives,
    and where lanes have none.
    """
    lanes = lanes_of(tile)
    of_row, threads = ceil_div(problem.C, problem.pack), lanes * slices_of(tile)
    packs = min(tile.packs, ceil_div(of_row, threads))
    shared = 1.0 if packs == 1 else min(1.0, lanes * ACCESS_BYTES / SIDE_BY_SIDE)
    return tensors_read(problem) * packs * shared * min(1.0, of_row / threads) / PACKS_IN_FLIGHT


def refuses_capacity(problem: Problem, tile: Tile) -> str | None:
    """Why a row does not fit into the registers of its team, or None."""
    threads = lanes_of(tile) * slices_of(tile)
    capacity = threads * tile.packs * problem.pack
    if capacity < problem.C:
        return f"a row has {problem.C} elements, {threads} threads of {tile.packs} packs hold {capacity}"
    return None
