"""Strategy `grid` of GroupNorm's forward with keep=shared: blocks keep pieces of x in shared memory."""

from __future__ import annotations

import math

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, Tile, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.folds import ITEM_WORDS, WORD, clear_launch, item_words_moved, words_at
from cunorm.ops.common.limits import (
    ACTIVATED_REGISTERS,
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    refuses_registers,
    refuses_shared,
    round_up,
)
from cunorm.ops.common.register_rows import ACCESS_BYTES
from cunorm.ops.common.slab_sweep import Sweep, refuses_chunk

from .grid import GRID_SPACE, SHARED, GroupGrid

#: Moments that a lane holds, by bytes of a sum: held_pieces in group_norm_grid_kept.cu.
HELD = {4: 8, 8: 4}
#: Bytes of a row that is worth keeping without its neighbours. On an H100, `cluster` takes longer for shorter rows than
#: its bytes and instructions explain: the L2 cache has more requests, and sectors are written in parts.
LONG_ROW = 256
#: Exposed memory latencies per block: the piece, the counter of stored pieces, the completion flag, the moments of all
#: pieces, gamma and beta.
PHASES = 5


class GroupGridKept(GroupGrid):
    """Tiling with one block per piece of a slab. A piece is a chunk of rows of some groups of one sample."""

    @lazy
    def items(self) -> int:
        """Pieces of all slabs."""
        return self.slabs * self.tiles

    @lazy
    def columns(self) -> int:
        """Packs in a row of a piece."""
        return ceil_div(self.slab_channels, self.problem.pack)

    @lazy
    def pack_groups(self) -> int:
        """Most groups of which a pack has channels."""
        pack, of_group = self.problem.pack, self.problem.group_channels
        return ceil_div(pack + of_group - math.gcd(pack, of_group), of_group)

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the arrays in the kernel's order, each from a 16-byte boundary."""
        problem, threads = self.problem, self.tile.threads
        sizes = [(self.items + 1) * WORD, WORD, threads * self.pack_groups * problem.part]
        sizes.append(self.tile.groups * problem.pair)
        sizes.append(min(self.tile.chunk, problem.HxW) * self.columns * ACCESS_BYTES)
        return sum(round_up(size, ACCESS_BYTES) for size in sizes)

    @lazy
    def registers(self) -> int:
        """Registers per thread that the launch bound allows: resident_threads in group_norm_grid_kept.cu."""
        return RESIDENT_REGISTERS if self.problem.activation is None else ACTIVATED_REGISTERS

    @lazy
    def slab_sweep(self) -> Sweep:
        """Sweep of a piece's columns: those of a slab."""
        problem = self.problem
        N = problem.N * (problem.group // self.tile.groups)
        return Sweep("NHWC", N, self.slab_channels, problem.HxW, self.tile.chunk, problem.pack, self.tile.threads)

    # ---- legality ---------------------------------------------------------------------------------------------------

    def _resident(self, device: Device) -> int:
        """Blocks that are resident on the device together."""
        of_memory = device.shared_memory_per_multiprocessor // (self.shared + device.shared_memory_reserved)
        of_registers = device.registers_per_multiprocessor // (self.registers * self.tile.threads)
        return min(of_memory, of_registers) * device.multiprocessors

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        if problem.HxW == 1:
            return "HxW is 1, expected more: a channel would have one element"
        if problem.layout != "NHWC":
            return f"keep={SHARED} needs channels-last data"
        if tile.prefetch_tiles > 1:
            return f"prefetch_tiles is {tile.prefetch_tiles}, expected 1: keep={SHARED} does not use it"
        sentence = refuses_threads(tile) or refuses_chunk(tile) or refuses_registers(self.registers, tile, device)
        if sentence is not None:
            return sentence
        if problem.group % tile.groups:
            return f"groups is {tile.groups}, expected a divisor of the number of groups, {problem.group}"
        if (sentence := self.refuses_slab()) is not None:
            return sentence
        if self.items > (most := device.multiprocessors * device.blocks_per_multiprocessor):
            return f"{self.items} pieces, but {device.name} holds at most {most} blocks at a time"
        if (sentence := refuses_shared(self.shared, device)) is not None:
            return sentence
        if self.items > (most := self._resident(device)):
            return f"{self.items} pieces, but {device.name} holds {most} blocks of this tile at a time"
        return None

    @lazy
    def worth(self) -> bool:
        """Whether the rows of a piece have all channels or are long, and as long as the threads allow."""
        problem, groups = self.problem, self.tile.groups
        wider = 2 * groups in GRID_SPACE["groups"] and problem.group % (2 * groups) == 0
        if wider and 2 * self.columns <= self.tile.threads:
            return False
        return groups == problem.group or self.slab_channels * problem.itemsize >= LONG_ROW

    # ---- workspace --------------------------------------------------------------------------------------------------

    @lazy
    def _moments_bytes(self) -> int:
        return self.items * self.tile.groups * self.problem.part

    @lazy
    def words_at(self) -> int:
        """Index of the pair at which the counters begin."""
        return words_at(self._moments_bytes // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """Bytes of the moments, one per group of a piece, and of the counters."""
        return self.words_at * self.problem.pair + round_up(ITEM_WORDS * WORD, ACCESS_BYTES)

    @lazy
    def _reads(self) -> int:
        """Loads of moments by which a piece merges those of a group: fold_groups in group_norm_grid_kept.cu.

        The lanes for a group hold `HELD` moments each. They load further ones twice.
        """
        width = 1
        while width < WARP and width * (self.tile.threads // WARP) < self.tile.groups:
            width *= 2
        held = HELD[self.problem.sum_itemsize] * (WARP // width)
        return self.tiles + max(0, self.tiles - held)

    @lazy
    def parts_moved(self) -> int:
        """Bytes of moments that are written, and read by every piece of their slab."""
        return (1 + self._reads) * self._moments_bytes

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        The moments are written once, and each piece reads those of its slab. The counters are accessed too.
        """
        return self.parts_moved + item_words_moved(self.items)

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def _arguments(self) -> Arguments:
        sizes = {"groups": self.problem.group, "slab_channels": self.slab_channels, "words": self.words_at}
        given = by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps")
        return {**given, **self.sweep.arguments, **sizes}

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches that clear the counters and process the pieces."""
        problem, entry = self.problem, f"{self.problem.op}_grid_kept"
        main = Launch(
            entry,
            entry,
            blocks_for(self.items),
            self.tile.threads,
            self._arguments,
            shared_bytes=self.shared,
            traffic=problem.read * problem.nbytes + problem.written,
            cached=self.parts_moved,
            packs=self.slab_sweep.processed,
            rounds=self.slab_sweep.rounds,
            registers=self.registers,
            phases=PHASES,
            tickets=self.words_at * problem.pair,
            constants={"pack_groups": self.pack_groups},
        )
        return (clear_launch(self.words_at, ITEM_WORDS), main)


def group_grid(problem: Problem, tile: Tile) -> Tiling:
    """Tiling of a tile of a forward's `grid`."""
    return GroupGridKept(problem, tile) if tile.as_dict()["keep"] == SHARED else GroupGrid(problem, tile)
