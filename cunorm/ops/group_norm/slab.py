"""GroupNorm's strategies `block` and `cluster`, and the launch that `warp`, which reads every byte once too, shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, by_name, refuses_threads
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    blocks_for,
    gradient_registers,
    pair_bytes,
    parameter_launches,
    parameter_workspace,
    refuses_cluster_size,
    refuses_registers,
    refuses_shared,
    round_up,
    tensors_read,
)
from cunorm.ops.common.geometry import piece_packs, slab_partials
from cunorm.ops.common.rows import parameters_given

SECTOR_BYTES = 32  # what DRAM and L2 move at least
MOST_CHUNKS = 8
BY_THREADS, BY_BULK = 1, 2  # Tile::engine in stage.cuh
IN_REGISTERS = 3  # not staged at all: runs.py
SLAB_PHASES = 3  # its loads, its sums, what it writes: for the model
#: What reads a slab once: its groups; how many chunks it comes in, and who copies them. The model cannot tell these
#: apart, and takes the first that is legal.
_SLABS = {"groups": (1, 2, 4, 8, 16, 32), "chunks": (4, 1), "engine": (BY_BULK, BY_THREADS)}
BLOCK_SPACE = {
    "threads": (32, 64, 128, 256, 512),
    **_SLABS,
    "engine": (BY_BULK, BY_THREADS, IN_REGISTERS),
    "packs": (1, 2, 4, 8),
}
CLUSTER_SPACE = {"threads": (128, 256, 512), "cluster": (2, 4, 8, 16), **_SLABS, "chunks": (4,)}


def _sector_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of the 32-byte sectors that reading x once touches: rows of few channels share sectors with neighbours.

    Rows begin anywhere at a multiple of `step` in a sector, as often here as there.
    """
    if problem.layout == "NCHW" or tile.groups == problem.group:
        return problem.nbytes
    row = tile.groups * problem.group_channels * problem.itemsize
    step = math.gcd(row, problem.C * problem.itemsize, SECTOR_BYTES)
    return problem.nbytes * (row + SECTOR_BYTES - step) // row


def one_sweep(
    problem: Problem,
    tile: Tile,
    rows: int,
    grid: int,
    extra: Mapping[str, int],
    variant: str = "",
    parameters: int | None = None,
    **facts: Any,
) -> tuple[Launch, ...]:
    """The launches of a strategy that reads every byte once: one kernel, and the parameter sums behind it.

    ``parameters`` are bytes of gamma and beta that are asked for: by default once for each sample.
    """
    shape = {"N": problem.N, "C": problem.C, "HxW": problem.HxW, "groups": problem.group, **extra}
    tensors = problem.nbytes if tile.strategy == "warp" else _sector_bytes(problem, tile)
    if not problem.is_backward:
        entry = f"group_norm_{tile.strategy}{variant}"
        arguments = {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "eps"), **shape}
        traffic = 2 * tensors
    else:
        entry = f"group_norm_backward_{tile.strategy}{variant}"
        direct = problem.wants_parameters and rows == 1
        given = by_name("dy", "mean", "rstd", "gamma", "dx", x=problem.reads_x, beta=problem.activation is not None)
        kept = by_name(workspace=problem.wants_parameters and not direct, dgamma=direct, dbeta=direct)
        arguments = {**given, **kept, **shape}
        traffic = (tensors_read(problem) + ("dx" in problem.outputs)) * tensors
        traffic += rows * problem.C * pair_bytes(problem) * problem.wants_parameters
    if parameters is None:
        dtypes = [dtype for dtype in parameters_given(problem) if dtype is not None]
        parameters = sum(problem.N * problem.C * ITEMSIZE[dtype] for dtype in dtypes)
    traffic += parameters
    facts.setdefault("streams", tensors_read(problem))
    main = Launch(entry, entry, grid, tile.threads, arguments, traffic=traffic, **facts)
    second = problem.wants_parameters and rows > 1
    return (main, *parameter_launches(problem, rows)) if second else (main,)


# ---- slabs ----------------------------------------------------------------------------------------------------------


def _pieces(tile: Tile) -> int:
    return tile.cluster if tile.strategy == "cluster" else 1


def _piece(problem: Problem, tile: Tile) -> int:
    """Packs of a block's piece of a slab, at most."""
    return piece_packs(problem.layout, tile.groups * problem.group_channels, problem.HxW, problem.pack, _pieces(tile))


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the arrays in the order of the kernel, each from a 16-byte boundary."""
    channels, sums, pair = tile.groups * problem.group_channels, problem.sum_itemsize, pair_bytes(problem)
    sizes = [8 * tile.chunks if tile.engine == BY_BULK else 0, channels * pair]
    if problem.is_backward and tile.strategy == "cluster":
        sizes.append(channels * pair)
    sizes += [channels * 4 * sums, tile.groups * 4 * sums]
    sizes += [16 * _piece(problem, tile)] * tensors_read(problem)
    sizes += [slab_partials(problem.layout, problem.HxW, problem.pack, tile.threads) * pair]
    return sum(round_up(size, 16) for size in sizes)


def refuses_block(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if problem.group % tile.groups:
        return f"slabs of {tile.groups} groups do not divide {problem.group} groups"
    if tile.chunks > MOST_CHUNKS:
        return f"chunks is {tile.chunks}, expected at most {MOST_CHUNKS}"
    if tile.engine not in (BY_THREADS, BY_BULK):
        own = f", or {IN_REGISTERS}, in registers" if tile.strategy == "block" else ""
        return f"engine is {tile.engine}, expected {BY_THREADS}, copies by threads, {BY_BULK}, bulk copies{own}"
    if tile.engine == BY_BULK:
        if device.compute_capability < (9, 0):
            return f"{device.name} has no bulk copies"
        if problem.layout != "NCHW":
            return "channels-last rows are no run to copy in bulk"
    if (sentence := refuses_shared(_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(_registers(problem), tile, device)


def refuses_cluster(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None."""
    if (sentence := refuses_cluster_size(tile, device)) is not None:
        return sentence
    last = (tile.cluster - 1) * _piece(problem, tile)
    if last >= piece_packs(problem.layout, tile.groups * problem.group_channels, problem.HxW, problem.pack, 1):
        return f"a slab of {tile.groups} groups is too small for {tile.cluster} pieces"
    return refuses_block(problem, tile, device)


def _registers(problem: Problem) -> int:
    """Registers of a thread that its launch bound leaves it."""
    return gradient_registers(problem, problem.layout) if problem.is_backward else RESIDENT_REGISTERS


def slab_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of the rows of dgamma and dbeta: one a sample."""
    return parameter_workspace(problem, problem.N)


def slab_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The slabs' kernel, and the parameter sums behind it."""
    blocks = problem.N * (problem.group // tile.groups) * _pieces(tile)
    grid = max(1, blocks_for(blocks) // _pieces(tile)) * _pieces(tile)
    facts: dict[str, Any] = {
        "shared_bytes": _shared(problem, tile),
        "registers": _registers(problem),
        "cluster": _pieces(tile),
    }
    extra = {"slab_groups": tile.groups, "piece_packs": _piece(problem, tile)}
    return one_sweep(problem, tile, problem.N, grid, extra, phases=SLAB_PHASES, **facts)
