"""Strategy `grid` of LayerNorm: slabs of columns by ticket, sums first, then outputs from rows in shared memory."""

from __future__ import annotations

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, PACK_BYTES
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.folds import ITEM_WORDS, WORD, clear_launch, item_words_moved, words_at
from cunorm.ops.common.limits import SECTOR_PACKS, blocks_for, refuses_registers, refuses_shared, round_up
from cunorm.ops.common.register_rows import PACKS_IN_FLIGHT, parameter_bytes, parameters_given, present
from cunorm.ops.common.strips import arguments_of_gradient

#: slabs: the number of multiprocessors of some device, or slightly fewer, so that nearly every multiprocessor has a
#: slab. smem_kib: KiB of shared memory per block for rows. Large, medium and small devices have this in addition to the
#: other shared memory of a block.
GRID_SPACE = {
    "threads": (512, 256),
    "lanes": (32, 64, 128, 256, 512),
    "packs_per_thread": (1, 2, 4),
    "slabs": (64, 108, 128, 144, 168),
    "smem_kib": (200, 128, 64),
}
KIB = 1024
#: Bytes in flight that a block should have: twice the bytes that DRAM delivers to a multiprocessor within its latency,
#: some 30 KB. Least and most rounds in flight: with two rounds, one is loaded while the other is processed.
BYTES_AHEAD, FEWEST_AHEAD, MOST_AHEAD = 64 * KIB, 2, 8
#: Most rounds that are worth trying. A thread adds its elements of a column one by one, so more rounds lose accuracy.
MOST_ROUNDS = 64
#: Most slabs whose partial sums of a row a warp can fold: warp_size * lane_parts in column_slabs.cuh.
MOST_SLABS = 256
SLOTS_AT_ONCE, MANY_TEAMS = 4, 8  # as in layer_norm_backward_grid.cu
ADDRESS = 3  # registers for the address of a pack
#: Exposed memory latencies per block: the first row, the counter of stored slabs, the fold by the last block, the
#: completion flag, and the folded statistics.
PHASES = 5


class LayerGrid(Tiling):
    """Tiling with one block per slab of columns of all rows. A block processes rounds of one row per team."""

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @lazy
    def columns(self) -> int:
        """Columns per slab."""
        return round_up(ceil_div(self.problem.C, self.tile.slabs), SECTOR_PACKS * self.problem.pack)

    @lazy
    def slabs(self) -> int:
        """Slabs per row."""
        return ceil_div(self.problem.C, self.columns)

    @lazy
    def teams(self) -> int:
        """Teams per block."""
        return self.tile.threads // self.tile.lanes

    @lazy
    def rounds(self) -> int:
        """Rounds in which the teams of a block process all rows."""
        return ceil_div(self.problem.N, self.teams)

    @lazy
    def round_bytes(self) -> int:
        """Bytes of shared memory per round."""
        return self.problem.read * self.tile.packs_per_thread * self.tile.threads * PACK_BYTES

    @lazy
    def ahead(self) -> int:
        """Rounds in flight."""
        return min(max(ceil_div(BYTES_AHEAD, self.round_bytes), FEWEST_AHEAD), MOST_AHEAD)

    @lazy
    def slots(self) -> int:
        """Rounds that have a slot in shared memory at a time."""
        return min(self.rounds, self.tile.smem_kib * KIB // self.round_bytes)

    @lazy
    def kept(self) -> int:
        """Rounds that keep a slot of their own: all rounds, or the number of slots minus the rounds in flight."""
        return self.rounds if self.slots == self.rounds else self.slots - self.ahead

    @lazy
    def again(self) -> int:
        """Bytes of one tensor that are read twice: those of the rounds between the kept rounds and the last rounds."""
        return (self.rounds - self.slots) * self.teams * self.problem.C * self.problem.itemsize

    @lazy
    def reach(self) -> int:
        """Bytes that are accessed between the two reads of a sector, for 19 of 20 sectors; 0 without second reads.

        They are the bytes that are read after the sector, and the bytes that are written before its second read, if all
        warps proceed at the same rate. A test allows a tenth more.
        """
        if self.again == 0:
            return 0
        problem = self.problem
        rows_behind = max(0, problem.N - max(0, self.kept) * self.teams)
        return (problem.read * problem.nbytes + problem.written) // problem.N * rows_behind

    @lazy
    def given(self) -> tuple[str | None, ...]:
        """Dtypes of the parameters that the kernel reads; None for an absent parameter."""
        return parameters_given(self.problem)

    @lazy
    def of_teams(self) -> int:
        """Bytes of shared memory for sums of columns of all teams; 0 if the teams add theirs in turn."""
        at_once = self.teams >= MANY_TEAMS and self.problem.C % self.problem.pack == 0
        return self.tile.threads * min(self.problem.pack, SLOTS_AT_ONCE) * self.problem.pair if at_once else 0

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the arrays in the kernel's order, each from a 16-byte boundary."""
        rows = self.problem.N
        sizes = [(self.slabs + 1) * WORD, WORD]
        sizes += [rows * (self.tile.lanes // WARP) * self.problem.part, rows * self.problem.pair]
        sizes += [self.columns * ITEMSIZE[dtype] for dtype in present(self.given)]
        if self.problem.wants_parameters:
            sizes += [self.columns * self.problem.pair, self.of_teams]
        sizes.append(self.slots * self.round_bytes)
        return sum(round_up(size, PACK_BYTES) for size in sizes)

    @lazy
    def registers(self) -> int:
        """Registers that a thread needs without spilling; the compile gate proves the number.

        They hold the packs of a row, the addresses of their sources and destinations, the parameters, and the sums of
        the columns (backward) or the packs of y (forward).
        """
        problem = self.problem
        words, widened = PACK_BYTES // 4, problem.pack * problem.sum_itemsize // 4
        of_pack = self.problem.read * words + ADDRESS * (self.problem.read + 1)
        for dtype in self.given:
            of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
        of_pack += 2 * widened if problem.is_backward else words
        pairs = 12 if problem.dtype == "float64" else 0  # float64 values take pairs of registers
        return (32 if problem.is_backward else 44) + pairs + 2 * widened + self.tile.packs_per_thread * of_pack

    # ---- legality ---------------------------------------------------------------------------------------------------

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        tile, problem = self.tile, self.problem
        if (sentence := refuses_threads(tile)) is not None:
            return sentence
        if problem.extras:
            return f"expected no {problem.extras[0]}: a slab keeps no third tensor in shared memory"
        if tile.lanes % WARP or tile.threads % tile.lanes:
            return f"lanes is {tile.lanes}, expected a multiple of {WARP} that divides {tile.threads} threads"
        if problem.is_backward and "dx" not in problem.outputs:
            return "expected output dx: without dx no block waits for the sums of whole rows, and split keeps no rows"
        capacity = tile.lanes * tile.packs_per_thread * problem.pack
        if self.columns > capacity:
            packs = f"{tile.lanes} lanes with packs_per_thread={tile.packs_per_thread} hold {capacity}"
            return f"{tile.slabs} slabs have {self.columns} columns each, but {packs}"
        if self.slabs > min(device.multiprocessors, MOST_SLABS):
            most = f"at most {MOST_SLABS}, and one for each of {device.name}'s {device.multiprocessors} multiprocessors"
            return f"{self.slabs} slabs, expected {most}"
        if (sentence := refuses_shared(self.shared, device)) is not None:
            return sentence
        if self.kept < 0:
            return f"smem_kib is {tile.smem_kib}, too small for the rows of {self.ahead} rounds in flight"
        if self.reach > device.l2_bytes // 2:
            half = f"half the L2 cache of {device.name} is {device.l2_bytes // 2}"
            return f"{self.reach} bytes are accessed between two reads of a sector, {half}"
        return refuses_registers(self.registers, tile, device)

    @lazy
    def worth(self) -> bool:
        """See `Tiling.worth`.

        There are at least nine tenths of the tile's slabs, at most `MOST_ROUNDS` rounds, and at most as many teams as
        rows. The packs hold a slab, counted from the 16-byte boundary before it, and half of them would not. This
        boundary is at the same place in all rows of a team. At least half the lanes have elements. The next smaller
        memory would not hold all rounds.
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
        """Index of the pair at which the counters begin."""
        return words_at(self._parts_bytes // self.problem.pair, self.problem.pair)

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial sums, one per slab of a row, and of the counters."""
        return self.words_at * self.problem.pair + round_up(ITEM_WORDS * WORD, PACK_BYTES)

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        The P = rows * slabs partial sums are written once, and read once by the fold: 2 P. In a backward, the fold also
        writes one pair per row, and every slab reads it. The counters are accessed too.
        """
        means = (1 + self.slabs) * self.problem.N * self.problem.pair if self.problem.is_backward else 0
        return 2 * self._parts_bytes + means + item_words_moved(self.slabs, folds=1)

    # ---- launches ---------------------------------------------------------------------------------------------------

    @lazy
    def _arguments(self) -> Arguments:
        problem, sums = self.problem, self.problem.wants_parameters
        shape = {"rows": problem.N, "length": problem.C, "words": self.words_at}
        shape |= {"columns": self.columns, "slabs": self.slabs, "kept": self.kept}
        if problem.is_backward:
            return {**arguments_of_gradient(problem), **by_name("dx", "workspace", dgamma=sums, dbeta=sums), **shape}
        return {**by_name("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps"), **shape}

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches that clear the counters and process the slabs."""
        problem, tile, entry = self.problem, self.tile, f"{self.problem.op}_grid"
        share = min(1.0, self.columns / (tile.lanes * tile.packs_per_thread * problem.pack))
        main = Launch(
            entry,
            entry,
            blocks_for(self.slabs),
            tile.threads,
            self._arguments,
            shared_bytes=self.shared,
            traffic=problem.read * problem.nbytes + problem.written + parameter_bytes(problem),
            cached=self.problem.read * self.again + self.workspace_traffic,
            registers=self.registers,
            phases=PHASES + (self.again > 0),
            streams=self.ahead * self.problem.read * tile.packs_per_thread * share / PACKS_IN_FLIGHT,
            roams=self.again > 0,
            tickets=self.words_at * self.problem.pair,
            constants={"ahead": self.ahead},
        )
        return (clear_launch(self.words_at, ITEM_WORDS), main)
