"""Strategies `block` and `cluster` of GroupNorm with channels-last slabs in registers.

A slab is some neighbouring groups of one sample. A thread holds packs of one column of it.
"""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Launch, ceil_div, refuses_threads
from cunorm.ops.common.limits import (
    RESIDENT_REGISTERS,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
    whole_clusters,
)

from .one_sweep import PHASES, REGISTERS, WORDS, Clustered, WholeGroups

WORD = 4  # bytes of a register
#: Groups of a slab, whose sums all threads hold. Each step of a warp's sum halves them, so they are powers of 2.
GROUPS = (1, 2, 4)
MOST_GROUPS = GROUPS[-1]
#: Working registers of a forward.
FORWARD_WORK = 61
#: The packs per thread that are worth trying.
PACKS = (1, 2, 3, 4, 6, 8, 12)
#: Most packs of dy and of x in a backward, as compiled; how many fewer for each demand on registers; from how many
#: threads per block on the launch bounds allow fewer registers in the generic text; working registers.
GRADIENT_PACKS, FEWER_PACKS, MANY_THREADS, GRADIENT_WORK = 8, 2, 512, 50


class Columns(WholeGroups):
    """Tiling of a forward with one block per slab."""

    variant = "_columns"

    @lazy
    def columns(self) -> int:
        """Columns of packs of a slab."""
        return max(1, self.channels // self.problem.pack)

    @lazy
    def parts(self) -> int:
        """Threads per column."""
        return max(1, self.tile.threads // self.columns)

    @lazy
    def rows(self) -> int:
        """Rows of the largest piece."""
        return ceil_div(self.problem.HxW, self.pieces)

    @lazy
    def needed(self) -> int:
        """Packs of a column that a thread holds at least, so that the threads of a column hold all its rows."""
        return ceil_div(self.rows, self.parts)

    @lazy
    def packs(self) -> int:
        """Packs per thread."""
        return self.tile.packs_per_thread

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the sums of its team, for each group of the slab."""
        return int(self.tile.groups) * self.team_sums(self.tile.threads)

    @lazy
    def held(self) -> int:
        """Registers that a thread needs at least: its packs, the sums of its channels and of the slab's groups."""
        words, groups = self.problem.sum_itemsize // WORD, int(self.tile.groups)
        sums = words * (2 * self.problem.pack + 3 * groups + 6 * (groups > 1))
        work = FORWARD_WORK + 4 * (words - 1) + 4 * (self.pieces > 1)
        return work + sums + WORDS * self.packs

    @lazy
    def registers(self) -> int:
        """Registers per thread as compiled for sm_90, for the cost model: fewer if no pack has two groups."""
        return self.held - (12 if self.problem.group_channels % self.problem.pack else 30)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        tile = self.tile
        if tile.stages > 1:
            return f"stages is {tile.stages}, expected 1: load={REGISTERS} loads the whole slab"
        if tile.groups not in GROUPS:
            return f"groups is {tile.groups}, expected one of {', '.join(map(str, GROUPS))} with load={REGISTERS}"
        if (sentence := self.refuses_groups() or refuses_threads(tile) or self._refuses_columns()) is not None:
            return sentence
        if self.needed > self.packs:
            hold = f"{tile.threads} threads with packs_per_thread={self.packs} hold {self.parts * self.packs}"
            return f"a slab has {self.rows} rows of {self.columns} packs, but {hold}"
        return refuses_shared(self.shared, device) or self.refuses_packs(device)

    def refuses_packs(self, device: Device) -> str | None:
        """Return the error message if the packs of a thread do not fit into its registers, or None."""
        return refuses_resident(self.held, self.tile, device)

    def _refuses_columns(self) -> str | None:
        """Return the error message if rows are not whole packs of at most two groups each, or None."""
        tile, pack = self.tile, self.problem.pack
        if self.problem.group_channels < pack:
            return f"a group has {self.problem.group_channels} channels, load={REGISTERS} expects at least {pack}"
        if self.channels % pack:
            return f"{tile.groups} groups have {self.channels} channels, load={REGISTERS} expects a multiple of {pack}"
        if self.columns > tile.threads:
            return f"a row of {tile.groups} groups has {self.columns} packs, but a block has {tile.threads} threads"
        return None

    @lazy
    def worth(self) -> bool:
        """Whether no smaller value of the search space holds the slab, and the unused field has its first value."""
        fits = (packs for packs in PACKS if packs >= self.needed)
        return bool(self.tile.stages == 1 and self.packs == next(fits, None))

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the kernel."""
        slabs = self.problem.N * (self.problem.group // self.tile.groups)
        grid = whole_clusters(slabs * self.pieces, self.cluster)
        return self.one_sweep(
            grid,
            {},
            packs=grid * self.tile.threads * self.packs,
            uneven=self.problem.group_channels % self.problem.pack > 0,
            registers=self.registers,
            phases=PHASES,
            shared_bytes=self.shared,
            cluster=self.cluster,
            constants={"packs_per_thread": self.packs, "slab_groups": self.tile.groups},
        )


class ClusterColumns(Clustered, Columns):
    """Tiling of a forward with one cluster of blocks per slab."""

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if (sentence := self.refuses_cluster(device)) is not None:
            return sentence
        if (self.pieces - 1) * self.rows >= self.problem.HxW:
            return f"{self.problem.HxW} rows are too few for {self.pieces} pieces"
        return super().refuses(device)

    @lazy
    def packs(self) -> int:
        """Packs per thread: as few as hold the rows of a piece."""
        return self.needed

    @lazy
    def worth(self) -> bool:
        """Whether the unused field has its first value."""
        return bool(self.tile.stages == 1)


class GradientColumns(Columns):
    """Tiling of a backward with one block per slab."""

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: also the sums of the slab's channels.

        They are a pair per thread and element of a pack, and a pair per block of a cluster and channel.
        """
        problem, sums = self.problem, super().shared
        if not problem.wants_parameters:
            return sums
        slices = self.cluster * self.channels * problem.pair if self.cluster > 1 else 0
        return round_up(sums, 16) + self.tile.threads * problem.pack * problem.pair + slices

    @lazy
    def registers(self) -> int:
        """Registers per thread as compiled for sm_90, for the cost model."""
        problem, groups, words = self.problem, int(self.tile.groups), self.problem.sum_itemsize // WORD
        sums = words * (2 * problem.pack + 9 * (groups > 1) + 3 * (groups == MOST_GROUPS))
        through = 12 if problem.activation is not None else 0
        return min(RESIDENT_REGISTERS, GRADIENT_WORK + sums + through + 2 * WORDS * self.packs)

    def refuses_packs(self, device: Device) -> str | None:
        """Return the error message if the packs of a thread do not fit into its registers, or None."""
        problem, many = self.problem, self.tile.threads >= MANY_THREADS
        wide = problem.sum_itemsize > WORD
        demands = (
            problem.activation is not None,
            wide,
            many,
            many and device.compute_capability < (9, 0),
            self.tile.groups == MOST_GROUPS and (wide or many),
        )
        most = GRADIENT_PACKS - FEWER_PACKS * sum(demands)
        if self.packs > most:
            return f"a thread holds {self.packs} packs of dy and as many of x, expected at most {most} each"
        return refuses_registers(RESIDENT_REGISTERS, self.tile, device)


class ClusterGradientColumns(ClusterColumns, GradientColumns):
    """Tiling of a backward with one cluster of blocks per slab of one sample, or of all samples."""
