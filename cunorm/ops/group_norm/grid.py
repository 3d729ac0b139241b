"""GroupNorm's strategy `grid`: tiles by ticket, sums first, outputs while the data is in the L2 cache."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Tile, by_name, ceil_div
from cunorm.ops.common.building_blocks import (
    LINE_WORDS,
    RESIDENT_REGISTERS,
    WARP,
    WORD,
    blocks_for,
    clear_launch,
    gradient_registers,
    pair_bytes,
    parameter_launches,
    parameter_workspace,
    part_bytes,
    refuses_shared,
    round_up,
    tensors_read,
    words_at,
)
from cunorm.ops.common.geometry import groups_asked, refuses_sweep, sweep_shared

#: Of equals the model takes the first: two blocks of 256 threads on a multiprocessor wait less for each other than one,
#: and keep to the order of tickets more closely than four, so that more comes back from the cache.
GRID_SPACE = {
    "threads": (256, 128, 512),
    "chunk": (64, 120, 256, 1024, 2048, 4096),
    "groups": (1, 2, 4, 8, 16, 32),
    "lead": (1, 256),
}
#: Tickets are counted in 32 bits; blocks draw a few more than there are.
MOST_TICKETS = 2**32 - 2**22
#: Threads of a launch: as many as the largest device has resident, or more; blocks that find no ticket end at once.
RESIDENT_THREADS, MULTIPROCESSORS = 512, 192
#: Least bytes of a row of a team, channels-last: two sectors, which DRAM fetches together.
NARROWEST = 64


def _team(problem: Problem, tile: Tile) -> int:
    """Channels of a team."""
    return tile.groups * problem.group_channels


def _chunks(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.HxW, tile.chunk)


def _tiles(problem: Problem, tile: Tile) -> int:
    """Tiles of a team: Sweep::tiles() in sweep.cuh."""
    chunks = _chunks(problem, tile)
    return chunks if problem.layout == "NHWC" else ceil_div(_team(problem, tile) * chunks, tile.threads // WARP)


def _teams(problem: Problem, tile: Tile) -> int:
    return problem.N * (problem.group // tile.groups)


def _blocks(multiprocessors: int, tile: Tile) -> int:
    return max(1, multiprocessors * RESIDENT_THREADS // tile.threads)


def reach(problem: Problem, tile: Tile, device: Device) -> int:
    """Bytes that are touched between the two reads of a sector, for 19 of 20 sectors: fitted to what the CPU executor
    counts, and checked against that by a test.

    Outputs go backwards, so a team's last sector waits for nothing and its first for all that the team reads and
    writes. Blocks that wait for a team hold tiles of those behind it, where it is small; and each tile that sums run
    ahead comes with the outputs of one before it.
    """
    team = problem.nbytes // _teams(problem, tile)
    read = tensors_read(problem) * team
    both = read + team
    held = _blocks(device.multiprocessors, tile) * ceil_div(both, _tiles(problem, tile))
    ahead = tile.lead * ceil_div(read, _tiles(problem, tile))
    found = int(0.95 * both + 0.25 * held + max(0.0, 0.75 * held - 0.5 * read) + 2.5 * ahead)
    return min(found, both * _teams(problem, tile))


def _refuses_team(problem: Problem, tile: Tile) -> str | None:
    """Why a team cannot have so many groups, or None."""
    team = _team(problem, tile)
    if problem.layout == "NCHW":
        return "channels-first, a group is a team of its own: groups is 1" if tile.groups > 1 else None
    if team < problem.C:
        if team % problem.pack:
            return f"rows of {team} channels do not lie on 16-byte boundaries"
        if team * problem.itemsize < NARROWEST:
            return f"rows of {team * problem.itemsize} bytes are narrower than {NARROWEST}"
    if ceil_div(team, problem.pack) > tile.threads:
        return f"rows of {team} channels are more packs than {tile.threads} threads"
    return None


def refuses_grid(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_sweep(problem.layout, problem, tile, device)) is not None:
        return sentence
    if problem.is_backward and "dx" not in problem.outputs:
        return "without dx nothing is read twice, and split reads it once"
    if problem.HxW == 1:
        return "with HxW = 1 a warp would own one element"
    if problem.group % tile.groups:
        return f"teams of {tile.groups} groups do not divide {problem.group} groups"
    sentence = _refuses_team(problem, tile) or refuses_shared(_shared(problem, tile), device)
    if sentence is not None:
        return sentence
    tiles, teams = _tiles(problem, tile), _teams(problem, tile)
    if 2 * tiles * teams + tile.lead > MOST_TICKETS:
        return f"{tiles} tiles of {teams} teams, {tile.lead} ahead, are more than tickets can count"
    if (between := reach(problem, tile, device)) > device.l2_bytes // 2:
        return f"{between} bytes lie between two reads, half the L2 cache of {device.name} is {device.l2_bytes // 2}"
    return None


def _shared(problem: Problem, tile: Tile) -> int:
    item = part_bytes(problem)
    sizes = [4 * WORD, sweep_shared(problem.layout, problem, tile, item)]
    sizes += [tile.threads * item, _team(problem, tile) * item]
    return sum(round_up(size, 16) for size in sizes)


# ---- workspace ------------------------------------------------------------------------------------------------------


def _parts(problem: Problem, tile: Tile) -> int:
    """Pairs that the sums leave: one for each channel, sample and chunk; two, moments, in a forward."""
    return problem.N * _chunks(problem, tile) * problem.C * (part_bytes(problem) // pair_bytes(problem))


def _rows_bytes(problem: Problem) -> int:
    return parameter_workspace(problem, problem.N) if problem.is_backward else 0


def _words(problem: Problem, tile: Tile) -> int:
    return LINE_WORDS + _teams(problem, tile)


def _words_at(problem: Problem, tile: Tile) -> int:
    """The pair from which the counters stand."""
    pairs = _parts(problem, tile) + _rows_bytes(problem) // pair_bytes(problem)
    return words_at(pairs, pair_bytes(problem))


def grid_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the parts, of the rows of dgamma and dbeta, and of a counter a team and the tickets'."""
    return _words_at(problem, tile) * pair_bytes(problem) + round_up(_words(problem, tile) * WORD, 16)


def _parts_moved(problem: Problem, tile: Tile) -> int:
    parts, pair = _parts(problem, tile), pair_bytes(problem)
    if not problem.is_backward:
        return 2 * parts * pair
    columns = ceil_div(_team(problem, tile), problem.pack)
    readers = tile.threads // columns if problem.layout == "NHWC" else 1
    asked = readers * problem.N * _chunks(problem, tile) * groups_asked(problem.layout, problem)
    return (2 * parts + problem.N * problem.group + asked) * pair


def grid_workspace_traffic(problem: Problem, tile: Tile) -> int:
    """Bytes of the workspace that move, with P = N * chunks * C parts and R bytes of rows of dgamma and dbeta.

    2 P: written by the sums, read by the fold. Backward N * groups pairs more, written by the fold, and what the
    outputs read: the pair of its group for every channel (channels-last for every group of a pack), chunk and sample,
    channels-last for every part of a block's threads that sweeps the same columns; and 2 R. Then the counters, 4 bytes
    a time: each zeroed; a ticket drawn for each turn of a tile, for those that are nobody's, and by every block to find
    that there are no more; a tile's sums told, a team's fold told, and asked for by each tile, here once: a tile that
    waits asks again.
    """
    moved = _parts_moved(problem, tile) + 2 * _rows_bytes(problem)
    of_team, teams = _tiles(problem, tile), _teams(problem, tile)
    tiles = of_team * teams
    tickets = min(of_team + tile.lead, tiles) + 2 * tiles - of_team + _grid(problem, tile)
    return moved + (_words(problem, tile) + tickets + 2 * tiles + teams) * WORD


def _grid(problem: Problem, tile: Tile) -> int:
    tiles = _tiles(problem, tile) * _teams(problem, tile)
    return blocks_for(min(_blocks(MULTIPROCESSORS, tile), tiles))


# ---- launches -------------------------------------------------------------------------------------------------------


def grid_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The launches in order: the counters, the tiles, the rows of dgamma and dbeta."""
    backward, rows = problem.is_backward, _rows_bytes(problem)
    at, parts = _words_at(problem, tile), _parts(problem, tile)
    words, tiles = _words(problem, tile), _tiles(problem, tile) * _teams(problem, tile)
    grid = _grid(problem, tile)
    shape = {"N": problem.N, "C": problem.C, "HxW": problem.HxW, "groups": problem.group}
    shape |= {"chunk": tile.chunk, "chunks": _chunks(problem, tile), "team": _team(problem, tile)}
    shape |= {"lead": tile.lead, "words": at}
    if backward:
        direct = problem.wants_parameters and not rows
        wanted = {"beta": problem.activation is not None, "dgamma": direct, "dbeta": direct}
        given = by_name("dy", "x", "mean", "rstd", "gamma", "dx", "workspace", **wanted)
        arguments = {**given, **shape, "rows": parts if rows else 0}
    else:
        arguments = {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}
    entry, read = f"{problem.op}_grid", tensors_read(problem) * problem.nbytes
    main = Launch(
        entry,
        entry,
        grid,
        tile.threads,
        arguments,
        shared_bytes=_shared(problem, tile),
        traffic=read + problem.nbytes,
        cached=read + _parts_moved(problem, tile),
        registers=gradient_registers(problem, problem.layout) if backward else RESIDENT_REGISTERS,
        phases=ceil_div(3 * tiles, grid),  # twice of each tile its data, and its parameters, which are in the L2 cache
        streams=tensors_read(problem),
        tickets=at * pair_bytes(problem),
    )
    return (clear_launch(at, words), main, *(parameter_launches(problem, problem.N, parts) if rows else ()))
