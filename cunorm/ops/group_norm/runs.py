"""GroupNorm of groups in the registers of a team: the strategy `warp`, and `block` where its engine is registers.

Where a channel is one element (HxW = 1), a group is a row, as LayerNorm's are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    pair_bytes,
    parameter_workspace,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
)
from cunorm.ops.common.rows import (
    parameters_given,
    resident,
    row_phases,
    row_registers,
    row_streams,
    row_sums_shared,
    teams_of_block,
)

from .slab import IN_REGISTERS, SLAB_PHASES, one_sweep
from .slab import refuses_block as refuses_staged
from .slab import slab_launches as staged_launches

ACTIVATION_REGISTERS = 16


def _rows(problem: Problem) -> Problem:
    """The problem with a group of a sample for a row."""
    return replace(problem, N=problem.N * problem.group, C=problem.group_channels, group=1)


def _owners(problem: Problem, tile: Tile) -> int:
    """Teams that share out the samples of a group, `tile.samples` each, in turn: as many as make up whole blocks over
    all groups. Where a team has several samples, and those start off 16-byte boundaries, also a number that lets it
    cover all of them from the same place.
    """
    teams = teams_of_block(tile)
    step = teams // math.gcd(teams, problem.group)
    count = round_up(ceil_div(problem.N, tile.samples), step)
    if problem.C % problem.pack and count < problem.N:
        count = round_up(count, math.lcm(step, problem.pack))
    return count


def _partial_rows(problem: Problem, tile: Tile) -> int:
    """Rows of sums of the channels: one for each block whose teams have every group; else for each team of a group that
    has a sample.
    """
    copies, rest = divmod(teams_of_block(tile), problem.group)
    return ceil_div(min(problem.N, _owners(problem, tile)), 1 if rest else copies)


def _row_shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the sums that teams of one group hand on."""
    teams = teams_of_block(tile)
    return row_sums_shared(_rows(problem), tile, problem.group if teams % problem.group == 0 else teams)


def _row_registers(problem: Problem, tile: Tile) -> int:
    """As for LayerNorm's rows, and what an activation works with."""
    return row_registers(_rows(problem), tile) + (ACTIVATION_REGISTERS if problem.activation else 0)


def refuses_group_rows(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why a tile of which a team holds a group is not legal, or None."""
    if problem.is_backward and tile.threads & (tile.threads - 1):
        return f"threads is {tile.threads}, expected a power of two: teams hand on their sums by halves"
    sentence = refuses_shared(_row_shared(problem, tile), device)
    return sentence or refuses_registers(_row_registers(problem, tile), tile, device)


def group_rows_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the rows of dgamma and dbeta: one for a block, or for each team of a group."""
    return parameter_workspace(problem, _partial_rows(problem, tile))


def _parameters_read(problem: Problem, tile: Tile) -> int:
    """Bytes of gamma and beta that are asked for: by each team once where they stay in registers; else for every row,
    and in a backward for the sums and for dx.
    """
    of_row = problem.N * (1 + ("dx" in problem.outputs))
    return sum(
        problem.C * ITEMSIZE[dtype] * (_owners(problem, tile) if resident(problem, tile, dtype) else of_row)
        for dtype in parameters_given(problem)
        if dtype is not None
    )


def group_rows_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The teams' kernel, and the parameter sums behind it."""
    owners, rows = _owners(problem, tile), _rows(problem)
    teams = owners * problem.group
    return one_sweep(
        problem,
        tile,
        _partial_rows(problem, tile),
        blocks_for(teams // teams_of_block(tile)),
        {"teams": teams},
        "_rows",
        registers=_row_registers(problem, tile),
        phases=row_phases(rows, tile, ceil_div(problem.N, max(1, owners))),
        shared_bytes=_row_shared(problem, tile),
        streams=row_streams(rows, tile),
        parameters=_parameters_read(problem, tile),
    )


#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
WARP_SPACE = {
    "packs": (1, 2, 4, 8),
    "lanes": (1, 2, 4, 8, 16, 32),
    "threads": (128, 256),
    "samples": (1, 4, 16, 64),
}
WORDS = 4  # registers of a pack


def _registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill, from above: addresses and statistics; then for each pack its data and its
    values widened. The compile gate proves it.
    """
    base = 64 if problem.is_backward else 48
    base += 8 if problem.dtype == "float64" else 0
    widened = problem.pack * problem.sum_itemsize // 4
    each = 9 + widened if problem.is_backward else 5 + 2 * widened
    return base + tile.packs * each


def _held(problem: Problem, tile: Tile) -> int:
    """The registers that a thread cannot do without: the packs as they are stored, and what it works with; more where a
    gradient comes back through an activation for eight elements a pack.
    """
    tensors, work = (2, 52) if problem.is_backward else (1, 48)
    wide = 20 if problem.dtype == "float64" else 0
    through = 14 if problem.is_backward and problem.activation is not None and problem.pack >= 8 else 0
    return work + wide + through + WORDS * tensors * tile.packs


def _lanes(tile: Tile) -> int:
    return tile.lanes if tile.strategy == "warp" else tile.threads


def _refuses_capacity(problem: Problem, tile: Tile) -> str | None:
    if problem.layout != "NCHW":
        return "a group of channels-last data is not one run"
    capacity = _lanes(tile) * tile.packs * problem.pack
    if problem.group_length > capacity:
        return (
            f"a group has {problem.group_length} elements, {_lanes(tile)} lanes of {tile.packs} packs hold {capacity}"
        )
    return None


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: a block's team has its sums there, and each team the parts of its channels' sums."""
    lanes, pair = _lanes(tile), pair_bytes(problem)
    sums = 2 * (tile.threads // WARP) * pair if lanes > WARP else 0
    if not problem.wants_parameters or problem.HxW == 1 or problem.group_channels == 1:
        return sums
    parts = tile.threads // lanes * (lanes * tile.packs + problem.group_channels - 1) * pair
    return round_up(sums, 16) + parts


def _launches(problem: Problem, tile: Tile, registers: int, phases: int) -> tuple[Launch, ...]:
    items = ceil_div(problem.N * problem.group, tile.threads // _lanes(tile))
    return one_sweep(
        problem,
        tile,
        problem.N,
        blocks_for(items),
        {},
        variant="_registers" if tile.strategy == "block" else "",
        registers=registers,
        phases=phases,
        shared_bytes=_shared(problem, tile),
    )


# ---- warp -----------------------------------------------------------------------------------------------------------


def refuses_warp(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes not in (1, 2, 4, 8, 16, 32):
        return f"lanes is {tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
    if (sentence := _refuses_capacity(problem, tile)) is not None:
        return sentence
    if problem.HxW == 1:
        return refuses_group_rows(problem, tile, device)
    if tile.samples > 1:
        return f"samples is {tile.samples}, expected 1: a team has more than one only where HxW = 1"
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(_registers(problem, tile), tile, device)


def warp_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the rows of dgamma and dbeta: one a sample, and fewer where HxW = 1."""
    return group_rows_workspace(problem, tile) if problem.HxW == 1 else parameter_workspace(problem, problem.N)


def warp_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The teams' kernel, and the parameter sums behind it."""
    if problem.HxW == 1:
        return group_rows_launches(problem, tile)
    return _launches(problem, tile, _registers(problem, tile), phases=1)


# ---- block ----------------------------------------------------------------------------------------------------------


def refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if tile.engine != IN_REGISTERS:
        if tile.packs > 1:
            return f"packs is {tile.packs}, expected 1: only engine {IN_REGISTERS} holds packs in registers"
        return refuses_staged(problem, tile, device)
    if tile.groups > 1 or tile.chunks > 1:
        return f"groups is {tile.groups}, chunks {tile.chunks}, expected 1: engine {IN_REGISTERS} takes a group whole"
    sentence = refuses_threads(tile) or _refuses_capacity(problem, tile)
    if sentence is None:
        sentence = refuses_shared(_shared(problem, tile), device)
    return sentence or refuses_resident(_held(problem, tile), tile, device)


def block_worth(problem: Problem, tile: Tile) -> bool:
    """Whether a tile's threads have packs for the group, and none to spare. Not for channels of one element where a
    warp holds a group: `warp` asks for their parameters once.
    """
    if problem.HxW == 1 and problem.group_length <= WARP * max(WARP_SPACE["packs"]) * problem.pack:
        return False
    if tile.engine != IN_REGISTERS:
        return tile.packs == 1
    half = tile.threads * tile.packs // 2 * problem.pack
    return tile.groups == tile.chunks == 1 and (tile.packs == 1 or problem.group_length > half)


def block_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The groups' kernel, and the parameter sums behind it.

    The model gives it the phases of what is staged: which of them is faster, and from where on, only the tuner knows.
    """
    if tile.engine != IN_REGISTERS:
        return staged_launches(problem, tile)
    return _launches(problem, tile, RESIDENT_REGISTERS, SLAB_PHASES)
