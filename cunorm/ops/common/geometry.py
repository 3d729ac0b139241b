"""What the host knows of slab.cuh and sweep.cuh: the packs, parts, blocks and bytes that a tile makes of a tensor."""

from __future__ import annotations

import math

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, ceil_div, refuses_threads

from .building_blocks import (
    RESIDENT_REGISTERS,
    WARP,
    gradient_registers,
    moments_bytes,
    refuses_registers,
    refuses_shared,
)

#: Positions in a chunk: counts of elements stay exact in float32, offsets in a chunk in 32 bits.
LARGEST_CHUNK = 2**20
#: line_packs and slots_at_once in slab.cuh.
LINE_PACKS, SLOTS_AT_ONCE = 8, 4


def slab_packs(layout: str, channels: int, HxW: int, pack: int) -> int:
    """Packs of a slab in shared memory: Slab::packs() in slab.cuh, for the worst alignment."""
    if layout == "NHWC":
        return HxW * ceil_div(channels, pack)
    return ceil_div(channels * HxW + pack - 1, pack)


def piece_packs(layout: str, channels: int, HxW: int, pack: int, pieces: int) -> int:
    """Packs of the largest of a slab's pieces: Slab's constructor in slab.cuh."""
    if pieces == 1:
        return slab_packs(layout, channels, HxW, pack)
    if layout == "NHWC":
        return ceil_div(HxW, pieces) * ceil_div(channels, pack)
    each = ceil_div(slab_packs(layout, channels, HxW, pack), pieces)
    return ceil_div(each, LINE_PACKS) * LINE_PACKS


def slab_partials(layout: str, HxW: int, pack: int, threads: int) -> int:
    """Slab::partial_sums() in slab.cuh."""
    if layout == "NHWC":
        return threads * min(pack, SLOTS_AT_ONCE)
    lanes = 1
    while lanes < WARP and lanes < HxW // pack + 2:
        lanes *= 2
    return threads // lanes


def sweep_blocks(layout: str, samples: int, C: int, chunks: int, pack: int, threads: int, most_columns: int = 0) -> int:
    """Sweep::items() in sweep.cuh; without a ``most_columns`` a channels-last block has a column for each thread."""
    if layout == "NCHW":
        return ceil_div(samples * C * chunks, threads // WARP)
    columns = ceil_div(C, pack)
    return samples * chunks * ceil_div(columns, min(columns, most_columns or threads))


def sweep_shared(layout: str, problem: Problem, tile: Tile, item_bytes: int) -> int:
    """Partial results of a channels-last block: an item for each thread and channel of its pack."""
    return tile.threads * problem.pack * item_bytes if layout == "NHWC" else 0


def groups_asked(layout: str, problem: Problem) -> int:
    """How often threads that meet each channel of a sample once ask for what belongs to its group.

    each_slot in sweep.cuh: for every channel; but channels-last once for each group of a pack, where groups
    are no shorter than packs.
    """
    of_group, pack = problem.group_channels, problem.pack
    if layout == "NCHW" or of_group < pack:
        return problem.C
    on_edges = (problem.group - 1) // (pack // math.gcd(of_group, pack))  # of the groups but the first: begin a pack
    return ceil_div(problem.C, pack) + problem.group - 1 - on_edges


def refuses_chunk(tile: Tile, unit: str = "positions") -> str | None:
    """Why a chunk is too long, or None."""
    if tile.chunk > LARGEST_CHUNK:
        return f"chunk is {tile.chunk}, expected at most {LARGEST_CHUNK} {unit}"
    return None


def refuses_sweep(layout: str, problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why kernels that sweep cannot run with that tile, or None; no problem is refused for its sizes."""
    if (sentence := refuses_threads(tile) or refuses_chunk(tile)) is not None:
        return sentence
    if (sentence := refuses_shared(sweep_shared(layout, problem, tile, moments_bytes(problem)), device)) is not None:
        return sentence
    needed = gradient_registers(problem, layout) if problem.is_backward else RESIDENT_REGISTERS
    return refuses_registers(needed, tile, device)
