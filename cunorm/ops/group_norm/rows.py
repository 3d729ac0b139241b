"""GroupNorm's strategy `warp` where a channel is one element (HxW = 1): a group is a row, as LayerNorm's are."""

from __future__ import annotations

import math
from dataclasses import replace

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, ceil_div
from cunorm.ops.common.building_blocks import (
    blocks_for,
    is_backward,
    parameter_workspace,
    refuses_registers,
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

from .slab import one_sweep

__all__ = ["group_rows_launches", "group_rows_workspace", "refuses_group_rows"]

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


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the sums that teams of one group hand on."""
    teams = teams_of_block(tile)
    return row_sums_shared(_rows(problem), tile, problem.group if teams % problem.group == 0 else teams)


def _registers(problem: Problem, tile: Tile) -> int:
    """As for LayerNorm's rows, and what an activation works with."""
    return row_registers(_rows(problem), tile) + (ACTIVATION_REGISTERS if problem.activation else 0)


def refuses_group_rows(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why a tile of which a team holds a group is not legal, or None."""
    if is_backward(problem) and tile.threads & (tile.threads - 1):
        return f"threads is {tile.threads}, expected a power of two: teams hand on their sums by halves"
    sentence = refuses_shared(_shared(problem, tile), device)
    return sentence or refuses_registers(_registers(problem, tile), tile, device)


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
        (teams,),
        "_rows",
        registers=_registers(problem, tile),
        phases=row_phases(rows, tile, ceil_div(problem.N, max(1, owners))),
        shared_bytes=_shared(problem, tile),
        streams=row_streams(rows, tile),
        parameters=_parameters_read(problem, tile),
    )
