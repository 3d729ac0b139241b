"""LayerNorm's strategy `grid`: slabs of columns by ticket, sums first, outputs from what blocks have kept."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    LINE_WORDS,
    SECTOR_PACKS,
    WARP,
    WORD,
    blocks_for,
    clear_launch,
    refuses_registers,
    refuses_shared,
    round_up,
    words_at,
)
from cunorm.ops.common.rows import ACCESS_BYTES, PACKS_IN_FLIGHT, parameters_given, present

from .split import gradient_arguments

#: Slabs: as many as the multiprocessors of some device, or somewhat fewer, so that nearly all have one. Keeps: KiB of a
#: block's shared memory for rows, what large, middle and small devices have beside what else a block needs.
GRID_SPACE = {
    "threads": (512, 256),
    "lanes": (32, 64, 128, 256, 512),
    "packs_per_thread": (1, 2, 4),
    "slabs": (64, 108, 128, 144, 168),
    "smem_kib": (200, 128, 64),
}
KIB = 1024
#: Bytes that a block should have on their way: twice what DRAM gives a multiprocessor in its latency, some 30 KB. And
#: rounds that make them up, at least and at most: with two, one is on its way while another is worked on.
BYTES_AHEAD, FEWEST_AHEAD, MOST_AHEAD = 64 * KIB, 2, 8
#: Words behind the ticket's line: how many slabs' sums are stored.
WORDS = LINE_WORDS + 1
#: Rounds that are worth trying: a thread adds what it has of a column one after another, so more would cost digits.
MOST_ROUNDS = 64
#: Slabs whose parts of a row the lanes of a warp fold: warp_size * lane_parts in row_slabs.cuh.
MOST_SLABS = 256
ADDRESS = 3  # registers for where a pack lies
#: How often a block waits with nothing on its way: for its first row, for the answer that counts its slab in, for what
#: the last of the blocks folds, for the word that says so, and for what it then reads.
PHASES = 5


class LayerGrid(Tiling):
    """Slabs of columns of all rows, a block each, in rounds of a row for each team."""

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @lazy
    def columns(self) -> int:
        """Columns of a slab."""
        return round_up(ceil_div(self.problem.C, self.tile.slabs), SECTOR_PACKS * self.problem.pack)

    @lazy
    def slabs(self) -> int:
        """Slabs of a row."""
        return ceil_div(self.problem.C, self.columns)

    @lazy
    def teams(self) -> int:
        """Teams of a block."""
        return self.tile.threads // self.tile.lanes

    @lazy
    def rounds(self) -> int:
        """Rounds in which the teams of a block have all rows."""
        return ceil_div(self.problem.N, self.teams)

    @lazy
    def round_bytes(self) -> int:
        """Shared memory that keeps a round."""
        return self.problem.read * self.tile.packs_per_thread * self.tile.threads * ACCESS_BYTES

    @lazy
    def ahead(self) -> int:
        """Rounds on their way."""
        return min(max(ceil_div(BYTES_AHEAD, self.round_bytes), FEWEST_AHEAD), MOST_AHEAD)

    @lazy
    def slots(self) -> int:
        """Rounds that shared memory has room for."""
        return min(self.rounds, self.tile.smem_kib * KIB // self.round_bytes)

    @lazy
    def kept(self) -> int:
        """Rounds that have a slot to themselves: all, or what the rounds on their way leave."""
        return self.rounds if self.slots == self.rounds else self.slots - self.ahead

    @lazy
    def again(self) -> int:
        """Bytes of a tensor that are read a second time: of the rounds between those kept and the last ones."""
        return (self.rounds - self.slots) * self.teams * self.problem.C * self.problem.itemsize

    @lazy
    def reach(self) -> int:
        """Bytes that are touched between the two reads of a sector, for 19 of 20 sectors, if anything is read again.

        What is read behind it, and what is written before the second, were warps to keep step: a test allows a tenth
        more.
        """
        if self.again == 0:
            return 0
        rows_behind = max(0, self.problem.N - max(0, self.kept) * self.teams)
        return (self.problem.read + 1) * rows_behind * self.problem.C * self.problem.itemsize

    @lazy
    def given(self) -> tuple[str | None, ...]:
        """Dtypes of the parameters that the kernel reads; None of one that is absent."""
        return parameters_given(self.problem)

    @lazy
    def shared(self) -> int:
        """Shared memory of a block, in the kernel's order, each array from a 16-byte boundary."""
        rows = self.problem.N
        sizes = [(self.slabs + 1) * WORD, WORD]
        sizes += [rows * (self.tile.lanes // WARP) * self.problem.part, rows * self.problem.pair]
        sizes += [self.columns * ITEMSIZE[dtype] for dtype in present(self.given)]
        if self.problem.wants_parameters:
            sizes.append(self.columns * self.problem.pair)
        sizes.append(self.slots * self.round_bytes)
        return sum(round_up(size, ACCESS_BYTES) for size in sizes)

    @lazy
    def registers(self) -> int:
        """What a thread needs so as not to spill: the packs of a row, where they come from and go to; the parameters;
        and the sums of its columns, or the packs of y. The compile gate proves it.
        """
        problem = self.problem
        words, widened = ACCESS_BYTES // 4, problem.pack * problem.sum_itemsize // 4
        of_pack = self.problem.read * words + ADDRESS * (self.problem.read + 1)
        for dtype in self.given:
            of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
        of_pack += 2 * widened if problem.is_backward else words
        pairs = 12 if problem.dtype == "float64" else 0  # of registers
        return (32 if problem.is_backward else 44) + pairs + 2 * widened + self.tile.packs_per_thread * of_pack

    # ---- legality ---------------------------------------------------------------------------------------------------

    def refuses(self, device: Device) -> str | None:
        """As `Tiling.refuses`."""
        tile, problem = self.tile, self.problem
        if (sentence := refuses_threads(tile)) is not None:
            return sentence
        if tile.lanes % WARP or tile.threads % tile.lanes:
            return f"lanes is {tile.lanes}, expected a multiple of {WARP} that divides {tile.threads} threads"
        if problem.is_backward and "dx" not in problem.outputs:
            return "without dx no block waits for the sums of whole rows, and split keeps nothing"
        capacity = tile.lanes * tile.packs_per_thread * problem.pack
        if self.columns > capacity:
            packs = f"{tile.lanes} lanes of {tile.packs_per_thread} packs hold {capacity}"
            return f"{tile.slabs} slabs are of {self.columns} columns, {packs}"
        if self.slabs > min(device.multiprocessors, MOST_SLABS):
            most = f"one for each of the {device.multiprocessors} multiprocessors of {device.name}"
            return f"{self.slabs} slabs, expected {most}"
        if (sentence := refuses_shared(self.shared, device)) is not None:
            return sentence
        if self.kept < 0:
            return f"{tile.smem_kib} KiB have no room for the rows of {self.ahead} rounds on their way"
        if self.reach > device.l2_bytes // 2:
            half = f"half the L2 cache of {device.name} is {device.l2_bytes // 2}"
            return f"{self.reach} bytes lie between two reads, {half}"
        return refuses_registers(self.registers, tile, device)

    @lazy
    def worth(self) -> bool:
        """Whether the slabs are as many as asked for, and the rows as many as teams; whether neither fewer packs nor
        half the lanes hold a slab, from the 16-byte boundary before it; whether that lies alike in all rows of a team;
        and whether the next smaller memory keeps less.
        """
        problem, tile = self.problem, self.tile
        if tile.lanes > tile.threads or self.rounds > MOST_ROUNDS:
            return False
        alike = self.teams >= problem.N or self.teams * problem.C % problem.pack == 0
        ahead = problem.pack - 1 if problem.C % problem.pack else 0
        needed = ceil_div(self.columns + ahead, tile.lanes * problem.pack)
        packs = tile.packs_per_thread
        if not alike or self.teams > max(problem.N, 1) or needed > packs or 2 * needed <= packs:
            return False
        if 2 * self.columns < tile.lanes * problem.pack or 10 * self.slabs < 9 * tile.slabs:
            return False
        smaller = max((size for size in GRID_SPACE["smem_kib"] if size < tile.smem_kib), default=0)
        return smaller * KIB // self.round_bytes < self.rounds

    # ---- workspace --------------------------------------------------------------------------------------------------

    @lazy
    def _parts_bytes(self) -> int:
        return self.problem.N * self.slabs * self.problem.part

    @lazy
    def words_at(self) -> int:
        """The pair from which the words stand."""
        return words_at(self._parts_bytes // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """The parts, one for each slab of a row, and the words."""
        return self.words_at * self.problem.pair + round_up(WORDS * WORD, ACCESS_BYTES)

    @lazy
    def workspace_traffic(self) -> int:
        """With P = rows * slabs parts, 2 P: written by the slabs, read by the fold. Backward a pair a row more, written
        by the fold, and read for every slab. Then the words, 4 bytes a time: each zeroed; for each slab a ticket drawn,
        one more to find that there are none, its sums told, and the fold's end asked for, here once: a block that waits
        asks again; and that told.
        """
        means = (1 + self.slabs) * self.problem.N * self.problem.pair if self.problem.is_backward else 0
        return 2 * self._parts_bytes + means + (WORDS + 4 * self.slabs + 1) * WORD

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def _arguments(self) -> Arguments:
        problem, sums = self.problem, self.problem.wants_parameters
        shape = {"rows": problem.N, "length": problem.C, "words": self.words_at}
        shape |= {"columns": self.columns, "slabs": self.slabs, "kept": self.kept}
        if problem.is_backward:
            return {**gradient_arguments(problem), **by_name("dx", "workspace", dgamma=sums, dbeta=sums), **shape}
        return {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """The words, the slabs."""
        problem, tile, entry = self.problem, self.tile, f"{self.problem.op}_grid"
        parameters = sum(problem.C * ITEMSIZE[dtype] for dtype in present(self.given))
        share = min(1.0, self.columns / (tile.lanes * tile.packs_per_thread * problem.pack))
        main = Launch(
            entry,
            entry,
            blocks_for(self.slabs),
            tile.threads,
            self._arguments,
            shared_bytes=self.shared,
            traffic=(self.problem.read + 1) * problem.nbytes + parameters,
            cached=self.problem.read * self.again + self.workspace_traffic,
            registers=self.registers,
            phases=PHASES + (self.again > 0),
            streams=self.ahead * self.problem.read * tile.packs_per_thread * share / PACKS_IN_FLIGHT,
            roams=self.again > 0,
            tickets=self.words_at * self.problem.pair,
            constants={"ahead": self.ahead},
        )
        return (clear_launch(self.words_at, WORDS), main)
