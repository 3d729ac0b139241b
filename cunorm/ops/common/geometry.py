"""How slab.cuh and sweep.cuh cut a tensor: packs, parts, blocks and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, ceil_div, refuses_threads

from .building_blocks import WARP, bound_registers, refuses_registers, refuses_shared

#: Positions in a chunk: counts of elements stay exact in float32, offsets in a chunk in 32 bits.
LARGEST_CHUNK = 2**20
#: Packs of a line of the L2 cache: the pieces of a run are cut there.
LINE_PACKS = 8
#: Of the channels of its pack, a thread of a channels-last block puts sums together for so many at a time.
SLOTS_AT_ONCE = 4


def channel_lanes(HxW: int, pack: int) -> int:
    """Lanes that sum a channel of a channels-first run together: a power of two, a pack or less for each, or a warp."""
    lanes = 1
    while lanes < WARP and lanes < HxW // pack + 2:
        lanes *= 2
    return lanes


@dataclass(eq=False)  # not frozen: a ranking makes thousands
class Slab:
    """Neighbouring channels of a sample in shared memory, in one piece or a piece for each block of a cluster.

    Attributes
    ----------
    layout : str
    channels, HxW : int
    pack : int
        Elements of one.
    threads : int
        Of a block.
    pieces : int
    """

    layout: str
    channels: int
    HxW: int
    pack: int
    threads: int
    pieces: int = 1

    @lazy
    def packs(self) -> int:
        """Packs of all of it: Slab::packs() in slab.cuh, for the worst alignment."""
        if self.layout == "NHWC":
            return self.HxW * ceil_div(self.channels, self.pack)
        return ceil_div(self.channels * self.HxW + self.pack - 1, self.pack)

    @lazy
    def piece_packs(self) -> int:
        """Packs of the largest piece, for the worst alignment: pieces begin at multiples of it."""
        if self.pieces == 1:
            return self.packs
        if self.layout == "NHWC":
            return ceil_div(self.HxW, self.pieces) * ceil_div(self.channels, self.pack)
        return ceil_div(ceil_div(self.packs, self.pieces), LINE_PACKS) * LINE_PACKS

    @lazy
    def partial_sums(self) -> int:
        """Sums that the threads of a block put together at a time: Slab::add_sums in slab.cuh."""
        if self.layout == "NHWC":
            return self.threads * min(self.pack, SLOTS_AT_ONCE)
        return self.threads // channel_lanes(self.HxW, self.pack)

    @lazy
    def constants(self) -> dict[str, int]:
        """What kernels know of it at compile time."""
        return {"partial_sums": self.partial_sums}


@dataclass(eq=False)  # not frozen: a ranking makes thousands
class Sweep:
    """A tensor that blocks sweep: HxW in chunks, and channels-last also C in columns of packs.

    Attributes
    ----------
    layout : str
    N, C, HxW : int
    chunk : int
        Positions of a chunk.
    pack : int
        Elements of one.
    threads : int
        Of a block.
    most_columns : int
        Columns that a channels-last block takes at most; 0: one for each thread.
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
        """The sweep of a problem's tensors."""
        return cls(layout, problem.N, problem.C, problem.HxW, tile.chunk, problem.pack, tile.threads)

    @lazy
    def chunks(self) -> int:
        """Chunks of a channel of one sample."""
        return ceil_div(self.HxW, self.chunk)

    @lazy
    def items(self) -> int:
        """Pieces of work for blocks."""
        if self.layout == "NCHW":
            return ceil_div(self.N * self.C * self.chunks, self.threads // WARP)
        columns = ceil_div(self.C, self.pack)
        return self.N * self.chunks * ceil_div(columns, min(columns, self.most_columns or self.threads))

    @lazy
    def arguments(self) -> dict[str, int]:
        """What kernels are told of it."""
        return {"N": self.N, "C": self.C, "HxW": self.HxW, "chunk": self.chunk, "chunks": self.chunks}

    def shared(self, item_bytes: int) -> int:
        """Partial results of a channels-last block: an item for each thread and channel of its pack."""
        return self.threads * self.pack * item_bytes if self.layout == "NHWC" else 0


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


def refuses_sweep(sweep: Sweep, problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why kernels that sweep cannot run with that tile, or None; no problem is refused for its sizes."""
    if (sentence := refuses_threads(tile) or refuses_chunk(tile)) is not None:
        return sentence
    if (sentence := refuses_shared(sweep.shared(problem.moments), device)) is not None:
        return sentence
    return refuses_registers(bound_registers(problem, sweep.layout), tile, device)
