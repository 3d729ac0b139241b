"""Partition of tensors in slab.cuh and sweep.cuh: packs, pieces, chunks, work items and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, ceil_div, refuses_threads

from .limits import bound_registers, refuses_registers, refuses_shared, round_up

#: Most positions in a chunk: element counts stay exact in float32, and offsets in a chunk fit in 32 bits.
LARGEST_CHUNK = 2**20
#: Packs per line of the L2 cache. A run is cut into pieces of whole lines.
LINE_PACKS = 8
#: Channels of its pack whose sums a thread of a channels-last block folds at a time.
SLOTS_AT_ONCE = 4


def channel_lanes(HxW: int, pack: int) -> int:
    """Lanes that sum one channel of a channels-first run: a power of two with at most one pack per lane, or a warp."""
    lanes = 1
    while lanes < WARP and lanes < HxW // pack + 2:
        lanes *= 2
    return lanes


@dataclass(eq=False)  # not frozen, to be fast: ranking tiles creates thousands
class Slab:
    """Neighbouring channels of one sample in shared memory: one piece, or one piece per block of a cluster.

    Attributes
    ----------
    layout : str
    channels, HxW : int
    pack : int
        Elements per pack.
    threads : int
        Threads per block.
    pieces : int
        Number of pieces.
    """

    layout: str
    channels: int
    HxW: int
    pack: int
    threads: int
    pieces: int = 1

    @lazy
    def packs(self) -> int:
        """Packs of the whole slab, for the worst alignment; see Slab::packs() in slab.cuh."""
        if self.layout == "NHWC":
            return self.HxW * ceil_div(self.channels, self.pack)
        return ceil_div(self.channels * self.HxW + self.pack - 1, self.pack)

    @lazy
    def piece_packs(self) -> int:
        """Packs of the largest piece, for the worst alignment. Pieces begin at multiples of this number."""
        if self.pieces == 1:
            return self.packs
        if self.layout == "NHWC":
            return ceil_div(self.HxW, self.pieces) * ceil_div(self.channels, self.pack)
        return ceil_div(ceil_div(self.packs, self.pieces), LINE_PACKS) * LINE_PACKS

    @lazy
    def places(self) -> int:
        """Items of an array in shared memory with one item per channel; see Slab::place in slab.cuh."""
        return self.channels + (self.channels // self.pack if self.layout == "NHWC" else 0)

    @lazy
    def processed(self) -> int:
        """Packs that the threads of a block process to sweep its piece once, idle lanes of their warps counted."""
        if self.layout == "NCHW":
            return round_up(self.piece_packs, self.threads)
        columns = ceil_div(self.channels, self.pack)
        parts = self.threads // min(columns, self.threads)
        rows = ceil_div(ceil_div(self.HxW, self.pieces), parts)
        return rows * ceil_div(columns, self.threads) * self.threads

    @lazy
    def rounds(self) -> float:
        """Reductions that a warp makes one after another to add up the sums of the channels."""
        if self.layout == "NCHW":
            lanes = self.channels / self.pieces * channel_lanes(self.HxW, self.pack)
            return max(1.0, lanes / self.threads)
        return ceil_div(ceil_div(self.channels, self.pack), self.threads)

    @lazy
    def partial_sums(self) -> int:
        """Partial sums that a block folds at a time; see Slab::add_sums in slab.cuh."""
        if self.layout == "NHWC":
            return self.threads * min(self.pack, SLOTS_AT_ONCE)
        return self.threads // channel_lanes(self.HxW, self.pack)

    @lazy
    def constants(self) -> dict[str, int]:
        """Compile-time constants of the kernels."""
        return {"partial_sums": self.partial_sums}


@dataclass(eq=False)  # not frozen, to be fast: ranking tiles creates thousands
class Sweep:
    """A tensor that blocks sweep: HxW is cut into chunks, and channels-last also C into columns of packs.

    Attributes
    ----------
    layout : str
    N, C, HxW : int
    chunk : int
        Positions per chunk.
    pack : int
        Elements per pack.
    threads : int
        Threads per block.
    most_columns : int
        Most columns of packs per channels-last block; 0 means one column per thread.
    """

    layout: str
    N: int
    C: int
    HxW: int
    chunk: int
    pack: int
    threads: int
    most_columns: int = 0

    @classmethod
    def of(cls, problem: Problem, tile: Tile, layout: str) -> Sweep:
        """Sweep of a problem's tensors."""
        return cls(layout, problem.N, problem.C, problem.HxW, tile.chunk, problem.pack, tile.threads)

    @lazy
    def chunks(self) -> int:
        """Chunks per channel of one sample."""
        return ceil_div(self.HxW, self.chunk)

    @lazy
    def items(self) -> int:
        """Work items for blocks."""
        if self.layout == "NCHW":
            return ceil_div(self.N * self.C * self.chunks, self.threads // WARP)
        return self.N * self.chunks * ceil_div(ceil_div(self.C, self.pack), self.columns)

    @lazy
    def columns(self) -> int:
        """Channels-last: columns of packs per block."""
        return min(ceil_div(self.C, self.pack), self.most_columns or self.threads)

    @lazy
    def processed(self) -> int:
        """Packs that the threads process, idle lanes of their warps counted."""
        positions = min(self.chunk, self.HxW)
        if self.layout == "NCHW":
            packs = ceil_div(positions, self.pack) + (self.HxW % self.pack > 0)
            return self.N * self.C * self.chunks * round_up(packs, WARP)
        return self.items * self.threads * ceil_div(positions, self.parts)

    @lazy
    def parts(self) -> int:
        """Channels-last: parts of a block's threads that sweep the same columns."""
        return self.threads // self.columns

    @lazy
    def rounds(self) -> int:
        """Reductions that a warp makes one after another; channels-last, the sums of all parts are merged by halves."""
        return self.parts.bit_length() if self.layout == "NHWC" else 1

    @lazy
    def arguments(self) -> dict[str, int]:
        """Arguments of the kernels that describe the sweep."""
        return {"N": self.N, "C": self.C, "HxW": self.HxW, "chunk": self.chunk, "chunks": self.chunks}

    def shared(self, item_bytes: int) -> int:
        """Bytes of shared memory for partial results: channels-last, one item per thread and channel of its pack."""
        return self.threads * self.pack * item_bytes if self.layout == "NHWC" else 0


def groups_asked(layout: str, problem: Problem) -> int:
    """Loads of per-group values by threads that together process each channel of one sample once.

    each_slot in sweep.cuh loads once per channel. Channels-last, if a group has at least as many channels as a pack,
    it loads once per group of each pack.
    """
    of_group, pack = problem.group_channels, problem.pack
    if layout == "NCHW" or of_group < pack:
        return problem.C
    on_edges = (problem.group - 1) // (pack // math.gcd(of_group, pack))  # groups after the first that start a pack
    return ceil_div(problem.C, pack) + problem.group - 1 - on_edges


def refuses_chunk(tile: Tile, unit: str = "positions") -> str | None:
    """Return the error message if a chunk is too long, or None."""
    if tile.chunk > LARGEST_CHUNK:
        return f"chunk is {tile.chunk}, expected at most {LARGEST_CHUNK} {unit}"
    return None


def refuses_sweep(sweep: Sweep, problem: Problem, tile: Tile, device: Device) -> str | None:
    """Return the error message if a sweep cannot run with the tile, or None. No problem is refused for its sizes."""
    if (sentence := refuses_threads(tile) or refuses_chunk(tile)) is not None:
        return sentence
    if (sentence := refuses_shared(sweep.shared(problem.moments), device)) is not None:
        return sentence
    return refuses_registers(bound_registers(problem, sweep.layout), tile, device)
