"""Strategy `grid` of GroupNorm with keep=shared: blocks keep pieces of the tensors in shared memory."""

from __future__ import annotations

import math

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import PACK_BYTES, Problem
from cunorm.core.strategy import Arguments, Launch, Tile, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.folds import ITEM_WORDS, WORD, clear_launch, item_words_moved, words_at
from cunorm.ops.common.limits import (
    ACTIVATED_REGISTERS,
    RESIDENT_REGISTERS,
    SECTOR_PACKS,
    blocks_for,
    bound_registers,
    refuses_registers,
    refuses_shared,
    round_up,
)
from cunorm.ops.common.slab_sweep import Sweep, refuses_chunk

from .grid import GRID_SPACE, SHARED, GroupGrid, GroupSlabs

#: Moments that a lane holds, by bytes of a sum: held_pieces in group_norm_grid_kept.cu.
HELD = {4: 8, 8: 4}
#: Bytes of a row that is worth keeping without its neighbours. On an H100, `cluster` takes longer for shorter rows than
#: its bytes and instructions explain: the L2 cache has more requests, and sectors are written in parts.
LONG_ROW = 256
#: Exposed memory latencies per block: the ticket, the piece, the counter of stored pieces, the sums of all pieces. The
#: sums of dgamma and dbeta are one more.
PHASES = 4


class GroupPieces(GroupSlabs):
    """Tiling with one block per piece of a slab. A piece is a chunk of rows of some groups of one sample."""

    @lazy
    def pieces(self) -> int:
        """Pieces per slab."""
        return self.sweep.chunks

    @lazy
    def items(self) -> int:
        """Pieces of all slabs."""
        return self.slabs * self.pieces

    @lazy
    def columns(self) -> int:
        """Packs in a row of a piece."""
        return ceil_div(self.slab_channels, self.problem.pack)

    @lazy
    def kept(self) -> int:
        """Bytes of a piece of one tensor."""
        return min(self.tile.chunk, self.problem.HxW) * self.columns * PACK_BYTES

    @property
    def arrays(self) -> tuple[int, ...]:
        """Bytes of the arrays in shared memory, in the kernel's order, after those of DrawnItems in kept_items.cuh."""
        raise NotImplementedError

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block, each array from a 16-byte boundary."""
        drawn = (self.items + 1) * WORD
        return sum(round_up(size, PACK_BYTES) for size in (drawn, *self.arrays))

    @property
    def registers(self) -> int:
        """Registers per thread at most if the launch bound asks for several blocks; one block may use more."""
        raise NotImplementedError

    @lazy
    def slab_sweep(self) -> Sweep:
        """Sweep of a piece's columns: those of a slab."""
        problem = self.problem
        N = problem.N * (problem.group // self.tile.groups)
        return Sweep("NHWC", N, self.slab_channels, problem.HxW, self.tile.chunk, problem.pack, self.tile.threads)

    # ---- legality ---------------------------------------------------------------------------------------------------

    def _resident(self, device: Device) -> int:
        """Blocks that are resident on the device together."""
        blocks = device.fitting_blocks(self.tile.threads, self.registers, self.shared)
        return blocks * device.multiprocessors

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        problem, tile = self.problem, self.tile
        if problem.layout != "NHWC" and problem.HxW > 1:
            return f"keep={SHARED}: {problem.layout} data, expected NHWC; for NCHW, use keep=l2"
        if tile.prefetch_tiles > 1:
            return f"prefetch_tiles is {tile.prefetch_tiles}, expected 1: keep={SHARED} does not use it"
        sentence = refuses_threads(tile) or refuses_chunk(tile) or refuses_registers(self.registers, tile, device)
        if sentence is not None:
            return sentence
        if (sentence := self.refuses_groups()) is not None:
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

    # ---- launches ---------------------------------------------------------------------------------------------------

    @property
    def partials(self) -> int:
        """Bytes of the sums or moments that the pieces store."""
        raise NotImplementedError

    @property
    def parts_moved(self) -> int:
        """Bytes of these sums or moments that are written and read."""
        raise NotImplementedError

    @lazy
    def words_at(self) -> int:
        """Index of the pair at which the counters begin."""
        return words_at(self.partials // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """Bytes of the sums or moments of the pieces, and of the counters."""
        return self.words_at * self.problem.pair + round_up(ITEM_WORDS * WORD, PACK_BYTES)

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`. The counters are accessed too."""
        return self.parts_moved + item_words_moved(self.items)

    def launches_of(
        self, arguments: Arguments, phases: int, constants: dict[str, int] | None = None
    ) -> tuple[Launch, ...]:
        """Launches that clear the counters and process the pieces."""
        problem, entry = self.problem, f"{self.problem.op}_grid_kept"
        sizes = {"groups": problem.group, "slab_channels": self.slab_channels, "words": self.words_at}
        main = Launch(
            entry,
            entry,
            blocks_for(self.items),
            self.tile.threads,
            {**arguments, **self.sweep.arguments, **sizes},
            shared_bytes=self.shared,
            traffic=problem.read * problem.nbytes + problem.written,
            cached=self.parts_moved,
            packs=self.slab_sweep.processed,
            rounds=self.slab_sweep.rounds,
            registers=self.registers,
            phases=phases,
            streams=problem.read,
            tickets=self.words_at * problem.pair,
            constants=constants or {},
        )
        return (clear_launch(self.words_at, ITEM_WORDS), main)


class GroupGridKept(GroupPieces):
    """Tiling of a forward."""

    @lazy
    def pack_groups(self) -> int:
        """Most groups of which a pack has channels."""
        pack, of_group = self.problem.pack, self.problem.group_channels
        return ceil_div(pack + of_group - math.gcd(pack, of_group), of_group)

    @lazy
    def arrays(self) -> tuple[int, ...]:
        """See `GroupPieces.arrays`."""
        problem, tile = self.problem, self.tile
        return tile.threads * self.pack_groups * problem.part, tile.groups * problem.pair, self.kept

    @lazy
    def registers(self) -> int:
        """Registers per thread: resident_threads in group_norm_grid_kept.cu."""
        return RESIDENT_REGISTERS if self.problem.activation is None else ACTIVATED_REGISTERS

    @lazy
    def partials(self) -> int:
        """Bytes of the moments, one per group of a piece."""
        return self.items * self.tile.groups * self.problem.part

    @lazy
    def _reads(self) -> int:
        """Loads of moments by which a piece merges those of a group: fold_groups in group_norm_grid_kept.cu.

        The lanes for a group hold `HELD` moments each. They load further ones twice. Lanes with fewer moments load the
        first one instead.
        """
        width = 1
        while width < WARP and width * (self.tile.threads // WARP) < self.tile.groups:
            width *= 2
        held, lanes = HELD[self.problem.sum_itemsize], WARP // width
        instead = sum(lanes * (own + 1) > self.pieces for own in range(1, held))
        return self.pieces + max(0, self.pieces - held * lanes) + instead

    @lazy
    def parts_moved(self) -> int:
        """Bytes of moments that are written, and read by every piece of their slab."""
        return (1 + self._reads) * self.partials

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """See `GroupPieces.launches_of`."""
        arguments = by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps")
        return self.launches_of(arguments, PHASES, {"pack_groups": self.pack_groups})


class GroupGridKeptBackward(GroupPieces):
    """Tiling of a backward: a block keeps a piece of dy and one of x."""

    @lazy
    def arrays(self) -> tuple[int, ...]:
        """See `GroupPieces.arrays`."""
        pair = self.problem.pair
        return self.tile.threads * self.problem.pack * pair, self.slab_channels * pair, 2 * self.kept

    @lazy
    def registers(self) -> int:
        """Registers per thread: gradient_threads in backward_sweep.cuh."""
        return bound_registers(self.problem, self.problem.layout)

    @lazy
    def channel_sums(self) -> int:
        """Pairs of sums, one per channel of a piece, for dgamma and dbeta."""
        return self.problem.N * self.pieces * self.problem.C if self.problem.wants_parameters else 0

    @lazy
    def fold_channels(self) -> int:
        """Channels whose dgamma and dbeta an item computes. Their sums fill whole sectors."""
        return round_up(ceil_div(self.problem.C, self.items), SECTOR_PACKS * PACK_BYTES // self.problem.pair)

    @lazy
    def partials(self) -> int:
        """Bytes of the sums, per channel and per group of a piece."""
        return (self.channel_sums + self.items * self.tile.groups) * self.problem.pair

    @lazy
    def parts_moved(self) -> int:
        """Bytes of sums that are written and read. Those of a group are read by every piece of their slab."""
        of_groups = (1 + self.pieces) * self.items * self.tile.groups
        return (2 * self.channel_sums + of_groups) * self.problem.pair

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """See `GroupPieces.launches_of`."""
        wanted = {
            "beta": self.problem.activation is not None,
            **dict.fromkeys(("dgamma", "dbeta"), self.problem.wants_parameters),
        }
        arguments = by_name("dy", "x", "mean", "rstd", "gamma", "dx", "workspace", **wanted)
        sums = {"fold_channels": self.fold_channels, "group_sums_at": self.channel_sums}
        return self.launches_of({**arguments, **sums}, PHASES + self.problem.wants_parameters)


def group_grid(problem: Problem, tile: Tile) -> Tiling:
    """Tiling of a tile of `grid`."""
    if tile.as_dict()["keep"] != SHARED:
        return GroupGrid(problem, tile)
    return GroupGridKeptBackward(problem, tile) if problem.is_backward else GroupGridKept(problem, tile)
