"""Tilings with rows in the registers of teams: `warp`, `block`, `cluster` of rows, GroupNorm's `warp` if HxW = 1.

In a problem of this file, N is the number of rows and C is the length of a row.
"""

from __future__ import annotations

import math

from cunorm.core.devices import PARTS, REGISTER_STEP, WARP
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, PACK_BYTES, Problem
from cunorm.core.strategy import Tiling, ceil_div, refuses_threads

from .limits import RESIDENT_REGISTERS, SECTOR_PACKS, blocks_for, round_up

# Of a multiprocessor: the fewest that any architecture of the compile gate has.
REGISTERS, RESIDENT_THREADS = 65536, 1536
SIDE_BY_SIDE = 64  # bytes per DRAM transfer
PACKS_IN_FLIGHT = 4  # per stream in the cost model
MOST_PACKS_ALONE = 8  # of a kernel without a loop over rows
MOST_STAGES = 4  # that are legal; the search space has fewer
#: Registers for the second half of the outputs of a pack, if y is wider than x.
WIDE_Y_REGISTERS = 16
#: Registers of a forward in float64 for the temporaries of its divisions and square roots, which are subroutines.
DOUBLE_REGISTERS = 24
#: Most packs per thread if y is wider than x: with more, the compiler spills the places of the outputs, however many
#: registers it has.
MOST_WIDE_PACKS = 8
#: Most packs of eight elements per thread in a forward with a mean: with more, the compiler spills the predicates of
#: the elements, however many registers it has.
MOST_PREDICATED_PACKS = 12
#: Memory latencies that an exchange between the blocks of a cluster takes in the cost model. On the simulated clock of
#: an H200, rows that one block holds take longer in clusters:
#: ``benchmarks/simulate.py layer_norm --shape 2048,32768 --dtype bfloat16 --strategy cluster``, and ``block``.
EXCHANGE = 0.8


def parameters_given(problem: Problem) -> tuple[str | None, ...]:
    """Dtypes of the parameters that a kernel reads; None for an absent parameter."""
    of_gradients = problem.is_backward and not problem.activation
    without_beta = of_gradients or "beta" not in problem.spec.inputs
    return (problem.gamma_dtype,) if without_beta else (problem.gamma_dtype, problem.beta_dtype)


def present(dtypes: tuple[str | None, ...]) -> list[str]:
    """Return the dtypes that are not None."""
    return [dtype for dtype in dtypes if dtype is not None]


def parameter_bytes(problem: Problem) -> int:
    """Return the bytes of the parameters that a kernel reads, each counted once."""
    return sum(problem.C * ITEMSIZE[dtype] for dtype in present(parameters_given(problem)))


class WarpRows(Tiling):
    """Tiling with teams of a warp or a part of a warp."""

    #: Whether a team is at most one warp.
    of_warp = True
    #: Most packs per lane, of all tensors, for which a lane loads its next row ahead; most bytes of a parameter, and
    #: most bytes of column sums, that a lane keeps in registers.
    most_ahead, most_resident, most_sums = 8, 128, 256
    #: Most registers of a thread.
    most_registers = 255

    @lazy
    def lanes(self) -> int:
        """Threads of a block that share a row."""
        return self.tile.lanes

    @lazy
    def slices(self) -> int:
        """Blocks that share a row."""
        return 1

    @lazy
    def merged(self) -> int:
        """Blocks that fold their column sums together."""
        return 1

    @lazy
    def teams_of_block(self) -> int:
        """Teams per block."""
        return self.tile.threads // self.lanes

    @lazy
    def given(self) -> tuple[str | None, ...]:
        """Dtypes of the parameters that a kernel reads; None for an absent parameter."""
        return parameters_given(self.problem)

    @lazy
    def _tensors(self) -> int:
        """Tensors whose packs a thread holds in registers."""
        return (2 if self.problem.is_backward else 1) + len(self.problem.extras)

    @lazy
    def most_packs_ahead(self) -> int:
        """Most packs per lane of one tensor for which a lane loads its next row ahead."""
        return self.most_ahead // self._tensors

    @lazy
    def stages(self) -> int:
        """Rows of a team that are in shared memory, or on their way there. 1: rows are in registers."""
        return int(self.tile.as_dict().get("stages", 1))

    @lazy
    def staged(self) -> bool:
        """Whether rows are in shared memory."""
        return self.stages > 1

    @lazy
    def staged_bytes(self) -> int:
        """Bytes of shared memory for the rows of a block."""
        if not self.staged:
            return 0
        return self.stages * self._tensors * self.tile.packs_per_thread * self.tile.threads * PACK_BYTES

    @lazy
    def reads_ahead(self) -> bool:
        """Whether a lane loads its next row while it processes the current one, with the packs of both in registers."""
        few = self.tile.packs_per_thread <= self.most_packs_ahead
        return few and self.rows_of_team > 1 and not self.staged

    def refuses_stages(self) -> str | None:
        """Return the error message if rows cannot be copied to shared memory, or None."""
        if not self.staged:
            return None
        if self.problem.C % self.problem.pack:
            return f"stages is {self.stages}, expected 1: rows of {self.problem.C} elements are not whole packs"
        if self.stages > MOST_STAGES:
            return f"stages is {self.stages}, expected at most {MOST_STAGES}"
        return None

    @lazy
    def rows_of_team(self) -> int:
        """Most rows that a team processes."""
        fields = self.tile.as_dict()
        return int(fields.get("rows_per_team", fields.get("samples_per_team", 1)))

    @lazy
    def single_row(self) -> bool:
        """Whether a forward's kernel has no loop over rows: every team has one row, and the grid has all teams.

        With many packs per thread the loop costs little, and without it the compiler spills.
        """
        blocks = self.problem.N * self.slices  # at most
        alone = self.rows_of_team == 1 and blocks_for(blocks) == blocks
        return alone and not self.problem.is_backward and self.tile.packs_per_thread <= MOST_PACKS_ALONE

    @lazy
    def shares_parameters(self) -> bool:
        """Whether the teams of a block read the parameters from shared memory."""
        return False

    @lazy
    def most_parameter_bytes(self) -> int:
        """Most bytes of a parameter that a lane keeps in registers.

        0 if the teams share the parameters, in a forward or with staged rows: more resident warps are worth more
        than the loads.
        """
        keeps = self.problem.is_backward and not self.staged
        return self.most_resident if keeps or not self.shares_parameters else 0

    def resident(self, dtype: str) -> bool:
        """Whether a parameter of this dtype stays in registers from row to row (RowParameters in forward_rows.cuh)."""
        return self.tile.packs_per_thread * self.problem.pack * ITEMSIZE[dtype] <= self.most_parameter_bytes

    @lazy
    def sums_in_registers(self) -> bool:
        """Whether the sums of a lane's columns stay in registers, in addition to its packs of the tensors."""
        few = self.tile.packs_per_thread * self.problem.pack * self.problem.row_sums <= self.most_sums
        return few and self._registers(sums_in_registers=True) <= self.most_registers

    @lazy
    def constants(self) -> dict[str, int]:
        """Compile-time constants of forward_rows.cuh and backward_rows.cuh."""
        found = {
            "reads_ahead": int(self.reads_ahead),
            "most_parameter_bytes": self.most_parameter_bytes,
            "resident_blocks": self.resident_blocks,
            "addend": len(self.problem.extras),
            "single_row": int(self.single_row),
        }
        if not self.problem.is_backward:
            return found
        staged = self.stages if self.staged else 0
        return found | {"sums_in_registers": int(self.sums_in_registers), "staged_rows": staged}

    @lazy
    def resident_blocks(self) -> int:
        """Blocks per multiprocessor in the launch bounds: as many as the registers of their threads allow.

        The warps of a multiprocessor are spread over its partitions, which have their own registers. With 9 blocks of
        two warps a partition has up to 5 warps, and the compiler allows as many registers as for 10 blocks.
        """
        threads = self.tile.threads
        warps = REGISTERS // PARTS // (round_up(self.registers, REGISTER_STEP) * WARP) * PARTS
        return max(1, min(warps * WARP // threads, RESIDENT_THREADS // threads))

    @lazy
    def registers(self) -> int:
        """Registers that a thread needs without spilling; the compile gate proves the number."""
        kept = self.problem.is_backward and self.sums_in_registers
        return self._registers(kept) + (self._ragged_registers() if kept and self.of_warp else 0)

    def _ragged_registers(self) -> int:
        """Additional registers of rows that are not whole packs, if a parameter passes that is wider than x.

        The compiler of the specialised text then widens the elements of all packs at once. The generic text needs none
        of these registers.
        """
        problem = self.problem
        wide = (ITEMSIZE[dtype] > problem.itemsize and not self.resident(dtype) for dtype in present(self.given))
        if problem.C % problem.pack == 0 or not any(wide):
            return 0
        return self.tile.packs_per_thread * problem.pack

    def _registers(self, sums_in_registers: bool) -> int:
        """The registers of a thread.

        They hold the packs of the tensors in the stored dtype (twice if a row is loaded ahead), and the parameters and
        the sums that stay from row to row.
        """
        problem, packs = self.problem, self.tile.packs_per_thread
        words, widened = PACK_BYTES // 4, problem.pack * problem.sum_itemsize // 4
        of_pack = 0 if self.staged else self._tensors * words * (2 if self.reads_ahead else 1)
        passing = 0  # parameters that do not stay: those of the current pack and of the next one
        for dtype in self.given:  # an absent parameter is held as constants
            # Elements of a narrower dtype than x take as many registers as its own: they are unpacked.
            of_parameter = problem.pack * max(problem.itemsize, ITEMSIZE[dtype or problem.stats_dtype]) // 4
            if self.resident(dtype or problem.stats_dtype):
                of_pack += of_parameter
            else:
                passing += 2 * of_parameter
        added = self._added_registers(sums_in_registers) if problem.extras else 0
        if not problem.is_backward:
            base = self.base_registers
            base += WIDE_Y_REGISTERS * problem.wide_y + DOUBLE_REGISTERS * (problem.dtype == "float64")
            # registers per pack for the places of many packs
            many = 0 if packs <= 8 else 1 if problem.pack >= 8 else 2 if problem.pack >= 4 else 3
            return base + added + passing + packs * (of_pack + many)
        if sums_in_registers:
            of_pack += problem.pack * problem.row_sums // 4
        current = self._staging_registers(sums_in_registers) if self.staged else 0
        return 32 + added + self._pair_registers() + passing + current + 2 * widened + packs * of_pack

    @lazy
    def base_registers(self) -> int:
        """Registers of a forward for all but packs and parameters."""
        return 32 if self.shares_parameters else 48

    def _added_registers(self, sums_in_registers: bool) -> int:
        """Registers for the places of a residual and of h, or of dh."""
        of_slice, packs = 4 * (self.slices > 1), self.tile.packs_per_thread
        if self.problem.is_backward:
            return of_slice + 8 * (self.slices > 1 and not sums_in_registers)
        return of_slice + 8 * self.shares_parameters + 4 * (packs >= 8) + 3 * packs * (packs > 8)

    def _pair_registers(self) -> int:
        """Additional registers of a backward in float64, whose values take aligned pairs of registers."""
        if self.problem.dtype != "float64":
            return 0
        if self.of_warp:
            return 24 if self.problem.extras else 12  # dh has places of its own
        many = self.slices > 1 and self.problem.has_mean and self.tile.packs_per_thread >= 8
        return 20 if many else 12

    def _staging_registers(self, sums_in_registers: bool) -> int:
        """Registers for staged rows: the packs in use, and addresses, also of sums in shared memory."""
        of_sums = 0 if sums_in_registers else 16
        return self._tensors * PACK_BYTES // 4 + 4 * self.tile.packs_per_thread + of_sums

    @lazy
    def columns(self) -> int:
        """Most columns of a row per block."""
        problem = self.problem
        if self.slices == 1:
            return problem.C
        return round_up(ceil_div(problem.C + problem.pack - 1, self.slices), SECTOR_PACKS * problem.pack)

    def sums_shared(self, kinds: int = 1) -> int:
        """Bytes of shared memory per block for sums, if ``kinds`` neighbouring teams have different columns.

        In the kernel's order, each array from a 16-byte boundary: two buffers with the sums of the warps and, in a
        cluster, the sums of the teams that other blocks read; the column sums.
        """
        teams = self.teams_of_block
        read = teams if self.slices > 1 else 0
        sizes = [0 if self.of_warp else 2 * (self.tile.threads // WARP + read) * self.problem.row_sums]
        if self.problem.wants_parameters:
            rows = teams if not self.sums_in_registers else teams // 2 if kinds < teams else 0
            packs = ceil_div(self.columns, self.problem.pack)
            apart = 2 * self.problem.pair // self.problem.row_sums  # SpreadColumnSums in column_sums.cuh
            stride = packs + (apart - packs) % (2 * apart)
            sizes.append(max(rows, self.merged > 1) * stride * self.problem.pack * self.problem.row_sums)
        return sum(round_up(size, PACK_BYTES) for size in sizes)

    def phases(self, rows: int) -> int:
        """Exposed memory latencies of a team with ``rows`` rows.

        They are the first row, and every row if rows are not loaded ahead. Sums add latencies: one if several warps
        share a row, one more in a cluster, and one if the column sums are in shared memory, because reading and writing
        them takes about as long. The sums count once if rows are loaded ahead, otherwise once per row. In a forward,
        the two exchanges of a row between the blocks of a cluster are never hidden.
        """
        if self.slices > 1 and not self.problem.is_backward:
            return 1 + math.ceil(2 * EXCHANGE * rows)
        sums = 0 if self.of_warp else 1 + (self.slices > 1)
        sums += self.problem.wants_parameters and not self.sums_in_registers
        return 1 + (sums if self.reads_ahead or self.staged else (1 + sums) * rows)

    @lazy
    def streams(self) -> float:
        """Streams of loads in flight per thread: its packs of a row, in units of `PACKS_IN_FLIGHT`.

        The number is smaller if the packs of few lanes share a DRAM transfer, and if some lanes have no packs.
        """
        of_row, threads = ceil_div(self.problem.C, self.problem.pack), self.lanes * self.slices
        packs = min(self.tile.packs_per_thread, ceil_div(of_row, threads))
        shared = 1.0 if packs == 1 else min(1.0, self.lanes * PACK_BYTES / SIDE_BY_SIDE)
        ahead = self.stages - 1 if self.staged else 1
        return self.problem.read * packs * ahead * shared * min(1.0, of_row / threads) / PACKS_IN_FLIGHT

    def refuses_capacity(self) -> str | None:
        """Return the error message if a row does not fit into the registers of its team, or None."""
        if self.problem.wide_y and self.tile.packs_per_thread > MOST_WIDE_PACKS:
            expected = f"expected at most {MOST_WIDE_PACKS}, because y is wider than x"
            return f"packs_per_thread is {self.tile.packs_per_thread}, {expected}"
        if self.problem.pack >= 8 and self.problem.has_mean and self.tile.packs_per_thread > MOST_PREDICATED_PACKS:
            expected = f"expected at most {MOST_PREDICATED_PACKS} of 16-bit data with a mean"
            return f"packs_per_thread is {self.tile.packs_per_thread}, {expected}"
        threads = self.lanes * self.slices
        capacity = threads * self.tile.packs_per_thread * self.problem.pack
        if capacity < self.problem.C:
            packs = f"{threads} threads with packs_per_thread={self.tile.packs_per_thread} hold {capacity}"
            return f"a row has {self.problem.C} elements, but {packs}"
        return None

    def refuses_team(self) -> str | None:
        """Return the error message if the tile's teams are not legal, or None."""
        if (sentence := refuses_threads(self.tile)) is not None:
            return sentence
        if self.tile.lanes not in (1, 2, 4, 8, 16, 32):
            return f"lanes is {self.tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
        return None

    def refuses_halves(self) -> str | None:
        """Return the error message if teams cannot fold their column sums, or None."""
        if self.problem.is_backward and self.tile.threads & (self.tile.threads - 1):
            return f"threads is {self.tile.threads}, expected a power of two: teams fold their column sums by halves"
        return None


class BlockRows(WarpRows):
    """Tiling with teams of several warps of one block."""

    of_warp = False
    most_ahead, most_resident, most_sums = 4, 64, 128
    most_registers = RESIDENT_REGISTERS

    @lazy
    def lanes(self) -> int:
        """Threads of a block that share a row."""
        return self.tile.threads // self.tile.teams_per_block


class ClusterRows(BlockRows):
    """Tiling with teams across the blocks of a cluster."""

    @lazy
    def slices(self) -> int:
        """Blocks that share a row."""
        return self.tile.cluster
