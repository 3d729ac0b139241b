"""What teams that hold rows in registers need: LayerNorm's `warp`, `block`, `cluster`, GroupNorm's `warp` with HxW = 1.

A problem here has its rows as samples, and the length of a row as channels.
"""

from __future__ import annotations

from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Tiling, ceil_div, refuses_threads

from .building_blocks import SECTOR_PACKS, WARP, round_up

ACCESS_BYTES = 16
SIDE_BY_SIDE = 64  # bytes that DRAM gives at a time
PACKS_IN_FLIGHT = 4  # of a stream, as the cost model counts them


def parameters_given(problem: Problem) -> tuple[str | None, ...]:
    """Dtypes of the parameters that a kernel reads; None of one that is absent."""
    of_gradients = problem.is_backward and not problem.activation
    return (problem.gamma_dtype,) if of_gradients else (problem.gamma_dtype, problem.beta_dtype)


def present(dtypes: tuple[str | None, ...]) -> list[str]:
    """Those that are not absent."""
    return [dtype for dtype in dtypes if dtype is not None]


class WarpRows(Tiling):
    """Rows of teams that are a warp or a part of one."""

    #: Whether a team is no more than a warp.
    of_warp = True
    #: Packs of all tensors with which a lane reads its next row while it works on this one, at most; bytes of a
    #: parameter, and of the columns' sums, that a lane keeps in registers.
    most_ahead, most_resident, most_sums = 8, 128, 256

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
        """Blocks that put the sums of their rows together."""
        return 1

    @lazy
    def teams_of_block(self) -> int:
        """Teams of a block."""
        return self.tile.threads // self.lanes

    @lazy
    def given(self) -> tuple[str | None, ...]:
        """Dtypes of the parameters that a kernel reads; None of one that is absent."""
        return parameters_given(self.problem)

    @lazy
    def _tensors(self) -> int:
        """Tensors that a kernel has registers for."""
        return 2 if self.problem.is_backward else 1

    @lazy
    def most_packs_ahead(self) -> int:
        """Packs of a lane with which it reads its next row while it works on this one, at most."""
        return self.most_ahead // self._tensors

    @lazy
    def reads_ahead(self) -> bool:
        """Whether a lane reads its next row while it works on this one: where its packs fit into registers twice."""
        return self.tile.packs_per_thread <= self.most_packs_ahead

    def resident(self, dtype: str) -> bool:
        """Whether a parameter of that dtype stays in registers from row to row: RowParameters in rows.cuh."""
        return self.tile.packs_per_thread * self.problem.pack * ITEMSIZE[dtype] <= self.most_resident

    @lazy
    def sums_in_registers(self) -> bool:
        """Whether the sums of a lane's columns stay in registers, beside its part of dy and x."""
        return self.tile.packs_per_thread * self.problem.pack * self.problem.pair <= self.most_sums

    @lazy
    def constants(self) -> dict[str, int]:
        """What rows.cuh and row_gradients.cuh know at compile time."""
        found = {"reads_ahead": int(self.reads_ahead), "most_parameter_bytes": self.most_resident}
        return found | ({"sums_in_registers": int(self.sums_in_registers)} if self.problem.is_backward else {})

    @lazy
    def registers(self) -> int:
        """What a thread needs so as not to spill: the tensors' packs as they are stored, twice where a row is read
        ahead; the parameters and the sums that stay from row to row; and for a forward y's packs. The compile gate
        proves it.
        """
        problem, packs = self.problem, self.tile.packs_per_thread
        words, widened = ACCESS_BYTES // 4, problem.pack * problem.sum_itemsize // 4
        of_pack = self._tensors * words * (2 if self.reads_ahead else 1)
        for dtype in self.given:  # one that is absent is held as constants
            if self.resident(dtype or problem.stats_dtype):
                of_pack += problem.pack * ITEMSIZE[dtype or problem.stats_dtype] // 4
        if not problem.is_backward:
            return 40 + packs * (of_pack + words)
        if self.sums_in_registers:
            of_pack += 2 * widened
        # What the sums of several warps need besides, in pairs of registers.
        pairs = 12 if problem.dtype == "float64" and not self.of_warp else 0
        return 32 + pairs + 2 * widened + packs * of_pack

    @lazy
    def columns(self) -> int:
        """Columns of a block's slice of a row, at most."""
        problem = self.problem
        if self.slices == 1:
            return problem.C
        return round_up(ceil_div(problem.C + problem.pack - 1, self.slices), SECTOR_PACKS * problem.pack)

    def sums_shared(self, kinds: int = 1) -> int:
        """Shared memory of a block for sums, in the kernel's order: two rows of its warps', and of its teams what a
        cluster reads; the columns' sums, where ``kinds`` neighbouring teams have columns of their own. Each array is
        from a 16-byte boundary.
        """
        teams = self.teams_of_block
        read = teams if self.slices > 1 else 0
        sizes = [0 if self.of_warp else 2 * (self.tile.threads // WARP + read) * self.problem.pair]
        if self.problem.wants_parameters:
            rows = teams if not self.sums_in_registers else teams // 2 if kinds < teams else 0
            sizes.append(max(rows, self.merged > 1) * round_up(self.columns, self.problem.pack) * self.problem.pair)
        return sum(round_up(size, ACCESS_BYTES) for size in sizes)

    def phases(self, rows: int) -> int:
        """How often a team of ``rows`` rows waits with nothing on its way: for its first row alone, if it reads the
        others ahead; else for each. And for the sums of a row, which a block puts together itself and a cluster once
        more; and for the columns' sums where those are in shared memory: reading and writing them takes about as long.
        """
        sums = 0 if self.of_warp else 1 + (self.slices > 1)
        sums += self.problem.wants_parameters and not self.sums_in_registers
        return 1 + (sums if self.reads_ahead else (1 + sums) * rows)

    @lazy
    def streams(self) -> float:
        """Loads that a thread has on their way: its packs of a row, less where those of few lanes share what DRAM
        gives, and where lanes have none.
        """
        of_row, threads = ceil_div(self.problem.C, self.problem.pack), self.lanes * self.slices
        packs = min(self.tile.packs_per_thread, ceil_div(of_row, threads))
        shared = 1.0 if packs == 1 else min(1.0, self.lanes * ACCESS_BYTES / SIDE_BY_SIDE)
        return self.problem.read * packs * shared * min(1.0, of_row / threads) / PACKS_IN_FLIGHT

    def refuses_capacity(self) -> str | None:
        """Why a row does not fit into the registers of its team, or None."""
        threads = self.lanes * self.slices
        capacity = threads * self.tile.packs_per_thread * self.problem.pack
        if capacity < self.problem.C:
            packs = f"{threads} threads of {self.tile.packs_per_thread} packs hold {capacity}"
            return f"a row has {self.problem.C} elements, {packs}"
        return None

    def refuses_team(self) -> str | None:
        """Why a block has no such teams, or None."""
        if (sentence := refuses_threads(self.tile)) is not None:
            return sentence
        if self.tile.lanes not in (1, 2, 4, 8, 16, 32):
            return f"lanes is {self.tile.lanes}, expected 1, 2, 4, 8, 16 or 32"
        return None

    def refuses_halves(self) -> str | None:
        """Why teams cannot hand on their sums of columns, or None."""
        if self.problem.is_backward and self.tile.threads & (self.tile.threads - 1):
            return f"threads is {self.tile.threads}, expected a power of two: teams hand on their sums by halves"
        return None


class BlockRows(WarpRows):
    """Rows of teams of several warps of a block."""

    of_warp = False
    most_ahead, most_resident, most_sums = 4, 64, 128

    @lazy
    def lanes(self) -> int:
        """Threads of a block that share a row."""
        return self.tile.threads // self.tile.teams_per_block


class ClusterRows(BlockRows):
    """Rows of teams across the blocks of a cluster."""

    @lazy
    def slices(self) -> int:
        """Blocks that share a row."""
        return self.tile.cluster
