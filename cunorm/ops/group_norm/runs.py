"""GroupNorm of groups in the registers of a team: the strategy `warp`, and `block` where its engine is registers."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Tile, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    is_backward,
    pair_bytes,
    parameter_workspace,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
)

from .rows import group_rows_launches, group_rows_workspace, refuses_group_rows
from .slab import IN_REGISTERS, SLAB_PHASES, one_sweep
from .slab import refuses_block as refuses_staged
from .slab import slab_launches as staged_launches

__all__ = [
    "WARP_SPACE",
    "block_launches",
    "block_worth",
    "refuses_block",
    "refuses_warp",
    "warp_launches",
    "warp_workspace",
]

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
    base = 64 if is_backward(problem) else 48
    base += 8 if problem.dtype == "float64" else 0
    widened = problem.pack * problem.sum_itemsize // 4
    each = 9 + widened if is_backward(problem) else 5 + 2 * widened
    return base + tile.packs * each


def _held(problem: Problem, tile: Tile) -> int:
    """The registers that a thread cannot do without: the packs as they are stored, and what it works with; more where a
    gradient comes back through an activation for eight elements a pack.
    """
    tensors, work = (2, 52) if is_backward(problem) else (1, 48)
    wide = 20 if problem.dtype == "float64" else 0
    through = 14 if is_backward(problem) and problem.activation is not None and problem.pack >= 8 else 0
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
