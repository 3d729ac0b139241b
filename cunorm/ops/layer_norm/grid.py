"""LayerNorm's strategy `grid`: slabs of columns by ticket, sums first, outputs from what blocks have kept."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, by_name, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    LINE_WORDS,
    SECTOR_PACKS,
    WARP,
    WORD,
    blocks_for,
    clear_launch,
    pair_bytes,
    part_bytes,
    refuses_registers,
    refuses_shared,
    round_up,
    tensors_read,
    words_at,
)
from cunorm.ops.common.rows import ACCESS_BYTES, PACKS_IN_FLIGHT, parameters_given

from .split import gradient_arguments

#: Slabs: as many as the multiprocessors of some device, or somewhat fewer, so that nearly all have one. Keeps: KiB of a
#: block's shared memory for rows, what large, middle and small devices have beside what else a block needs.
GRID_SPACE = {
    "threads": (512, 256),
    "lanes": (32, 64, 128, 256, 512),
    "packs": (1, 2, 4),
    "slabs": (64, 108, 128, 144, 168),
    "keeps": (200, 128, 64),
}
KIB = 1024
#: As in row_slabs.cuh: bytes that a block has on their way, and how many turns they may be.
BYTES_AHEAD, FEWEST_AHEAD, MOST_AHEAD = 64 * KIB, 2, 8
#: Words behind the ticket's line: how many slabs' sums are stored.
WORDS = LINE_WORDS + 1
#: Turns that are worth trying: a thread adds what it has of a column one after another, so more would cost digits.
MOST_TURNS = 64
#: Slabs whose parts of a row the lanes of a warp fold: warp_size * lane_parts in row_slabs.cuh.
MOST_SLABS = 256
ADDRESS = 3  # registers for where a pack lies
#: How often a block waits with nothing on its way: for its first row, for the answer that counts its slab in, for what
#: the last of the blocks folds, for the word that says so, and for what it then reads.
PHASES = 5


# ---- sizes ----------------------------------------------------------------------------------------------------------


def _columns(problem: Problem, tile: Tile) -> int:
    """Columns of a slab."""
    return round_up(ceil_div(problem.C, tile.slabs), SECTOR_PACKS * problem.pack)


def _slabs(problem: Problem, tile: Tile) -> int:
    """RowSlabs::slabs in row_slabs.cuh."""
    return ceil_div(problem.C, _columns(problem, tile))


def _teams(tile: Tile) -> int:
    return tile.threads // tile.lanes


def _turns(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.N, _teams(tile))


def _turn_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory that keeps a turn."""
    return tensors_read(problem) * tile.packs * tile.threads * ACCESS_BYTES


def _ahead(problem: Problem, tile: Tile) -> int:
    """RoundSlots::ahead in row_slabs.cuh: rounds on their way."""
    return min(max(ceil_div(BYTES_AHEAD, _turn_bytes(problem, tile)), FEWEST_AHEAD), MOST_AHEAD)


def _slots(problem: Problem, tile: Tile) -> int:
    """Turns that shared memory has room for."""
    return min(_turns(problem, tile), tile.keeps * KIB // _turn_bytes(problem, tile))


def _kept(problem: Problem, tile: Tile) -> int:
    """Turns that have a slot to themselves: all, or what the turns on their way leave."""
    slots, turns = _slots(problem, tile), _turns(problem, tile)
    return turns if slots == turns else slots - _ahead(problem, tile)


def _bytes_behind(problem: Problem, tile: Tile, turns: int) -> int:
    """Bytes of a tensor's rows behind so many turns."""
    return max(0, problem.N - turns * _teams(tile)) * problem.C * problem.itemsize


def _again(problem: Problem, tile: Tile) -> int:
    """Bytes of a tensor that are read a second time: of the turns between those that are kept and the last ones."""
    return (_turns(problem, tile) - _slots(problem, tile)) * _teams(tile) * problem.C * problem.itemsize


def reach(problem: Problem, tile: Tile) -> int:
    """Bytes that are touched between the two reads of a sector, for 19 of 20 sectors, if anything is read again.

    What is read behind it, and what is written before the second, were warps to keep step: a test allows a tenth more.
    """
    if _again(problem, tile) == 0:
        return 0
    return (tensors_read(problem) + 1) * _bytes_behind(problem, tile, max(0, _kept(problem, tile)))


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block, in the kernel's order, each array from a 16-byte boundary."""
    columns, rows, pair = _columns(problem, tile), problem.N, pair_bytes(problem)
    sizes = [(_slabs(problem, tile) + 1) * WORD, WORD]
    sizes += [rows * (tile.lanes // WARP) * part_bytes(problem), rows * pair]
    sizes += [columns * ITEMSIZE[dtype] for dtype in parameters_given(problem) if dtype is not None]
    if problem.wants_parameters:
        sizes.append(columns * pair)
    sizes.append(_slots(problem, tile) * _turn_bytes(problem, tile))
    return sum(round_up(size, ACCESS_BYTES) for size in sizes)


def _registers(problem: Problem, tile: Tile) -> int:
    """What a thread needs so as not to spill: the packs of a row, where they come from and go to; the parameters; and
    the sums of its columns, or the packs of y. The compile gate proves it.
    """
    words, widened = ACCESS_BYTES // 4, problem.pack * problem.sum_itemsize // 4
    tensors = tensors_read(problem)
    of_pack = tensors * words + ADDRESS * (tensors + 1)
    for dtype in parameters_given(problem):
        of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
    of_pack += 2 * widened if problem.is_backward else words
    pairs = 12 if problem.dtype == "float64" else 0  # of registers
    return (32 if problem.is_backward else 44) + pairs + 2 * widened + tile.packs * of_pack


# ---- legality -------------------------------------------------------------------------------------------------------


def refuses_grid(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.lanes % WARP or tile.threads % tile.lanes:
        return f"lanes is {tile.lanes}, expected a multiple of {WARP} that divides {tile.threads} threads"
    if problem.is_backward and "dx" not in problem.outputs:
        return "without dx no block waits for the sums of whole rows, and split keeps nothing"
    columns, capacity = _columns(problem, tile), tile.lanes * tile.packs * problem.pack
    if columns > capacity:
        return f"{tile.slabs} slabs are of {columns} columns, {tile.lanes} lanes of {tile.packs} packs hold {capacity}"
    if (slabs := _slabs(problem, tile)) > min(device.multiprocessors, MOST_SLABS):
        return f"{slabs} slabs, expected one for each of the {device.multiprocessors} multiprocessors of {device.name}"
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    if _kept(problem, tile) < 0:
        return f"{tile.keeps} KiB have no room for the rows of {_ahead(problem, tile)} turns on their way"
    if (between := reach(problem, tile)) > device.l2_bytes // 2:
        return f"{between} bytes lie between two reads, half the L2 cache of {device.name} is {device.l2_bytes // 2}"
    return refuses_registers(_registers(problem, tile), tile, device)


def worth_trying(problem: Problem, tile: Tile) -> bool:
    """Whether the slabs are as many as asked for, and the rows as many as teams; whether neither fewer packs nor half
    the lanes hold a slab, from the 16-byte boundary before it; whether that lies alike in all rows of a team; and
    whether the next smaller memory keeps less.
    """
    if tile.lanes > tile.threads or _turns(problem, tile) > MOST_TURNS:
        return False
    columns, teams = _columns(problem, tile), _teams(tile)
    alike = teams >= problem.N or teams * problem.C % problem.pack == 0
    ahead = problem.pack - 1 if problem.C % problem.pack else 0
    needed = ceil_div(columns + ahead, tile.lanes * problem.pack)
    if not alike or teams > max(problem.N, 1) or needed > tile.packs or 2 * needed <= tile.packs:
        return False
    if 2 * columns < tile.lanes * problem.pack or 10 * _slabs(problem, tile) < 9 * tile.slabs:
        return False
    smaller = max((size for size in GRID_SPACE["keeps"] if size < tile.keeps), default=0)
    return smaller * KIB // _turn_bytes(problem, tile) < _turns(problem, tile)


# ---- workspace ------------------------------------------------------------------------------------------------------


def _parts_bytes(problem: Problem, tile: Tile) -> int:
    return problem.N * _slabs(problem, tile) * part_bytes(problem)


def _words_at(problem: Problem, tile: Tile) -> int:
    return words_at(_parts_bytes(problem, tile) // pair_bytes(problem), pair_bytes(problem))


def grid_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the parts, one for each slab of a row, and of the words."""
    return _words_at(problem, tile) * pair_bytes(problem) + round_up(WORDS * WORD, ACCESS_BYTES)


def grid_workspace_traffic(problem: Problem, tile: Tile) -> int:
    """Bytes of the workspace that move, with P = rows * slabs parts.

    2 P: written by the slabs, read by the fold. Backward a pair a row more, written by the fold, and read for every
    slab. Then the words, 4 bytes a time: each zeroed; for each slab a ticket drawn, one more to find that there are
    none, its sums told, and the fold's end asked for, here once: a block that waits asks again; and that told.
    """
    slabs, rows = _slabs(problem, tile), problem.N
    means = (1 + slabs) * rows * pair_bytes(problem) if problem.is_backward else 0
    return 2 * _parts_bytes(problem, tile) + means + (WORDS + 4 * slabs + 1) * WORD


# ---- launches -------------------------------------------------------------------------------------------------------


def grid_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The launches in order: the words, the slabs."""
    backward, slabs, at = problem.is_backward, _slabs(problem, tile), _words_at(problem, tile)
    shape = {"rows": problem.N, "length": problem.C, "words": at}
    shape |= {"columns": _columns(problem, tile), "kept": _kept(problem, tile)}
    if backward:
        sums = problem.wants_parameters
        arguments = {**gradient_arguments(problem), **by_name("dx", "workspace", dgamma=sums, dbeta=sums), **shape}
    else:
        arguments = {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}
    entry, read = f"{problem.op}_grid", tensors_read(problem)
    parameters = sum(problem.C * ITEMSIZE[dtype] for dtype in parameters_given(problem) if dtype is not None)
    again = _again(problem, tile)
    share = min(1.0, _columns(problem, tile) / (tile.lanes * tile.packs * problem.pack))
    main = Launch(
        entry,
        entry,
        blocks_for(slabs),
        tile.threads,
        arguments,
        shared_bytes=_shared(problem, tile),
        traffic=(read + 1) * problem.nbytes + parameters,
        cached=read * again + grid_workspace_traffic(problem, tile),
        registers=_registers(problem, tile),
        phases=PHASES + (again > 0),
        streams=_ahead(problem, tile) * read * tile.packs * share / PACKS_IN_FLIGHT,
        roams=again > 0,
        tickets=at * pair_bytes(problem),
    )
    return (clear_launch(at, WORDS), main)
