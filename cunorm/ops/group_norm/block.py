"""Strategies `block` and `cluster` of GroupNorm.

`block` holds a slab, some groups of one sample, in the shared memory of a block, or in its registers. `cluster` holds
one piece of a slab in the shared memory or in the registers of each block of a cluster. A channels-first slab in
registers is one group.
"""

from __future__ import annotations

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Tile, Tiling, ceil_div, refuses_threads
from cunorm.ops.common.limits import (
    RESIDENT_REGISTERS,
    SECTOR_PACKS,
    bound_registers,
    refuses_registers,
    refuses_resident,
    refuses_shared,
    round_up,
    whole_clusters,
)
from cunorm.ops.common.slab_sweep import Slab

from .columns import PACKS, ClusterColumns, ClusterGradientColumns, Columns, GradientColumns
from .one_sweep import BULK, CP_ASYNC, PHASES, REGISTERS, WORDS, Clustered, Runs, WholeGroups
from .warp import WARP_SPACE

MOST_STAGES = 8
#: A thread that holds at most FEW_PACKS packs, or half of it if blocks share a group, uses about LEAN_REGISTERS
#: registers, as compiled for 16-bit data on sm_90; the launch bounds allow more. Only the cost model uses it, for the
#: number of resident blocks.
FEW_PACKS, LEAN_REGISTERS = 4, 80
#: Fields of a slab in shared memory: its groups, the stages of its copies, and the kind of copies. The cost model does
#: not distinguish stages and kinds of loads, and selects the first legal tile: registers need no copy in shared memory.
_SLABS = {"groups": (1, 2, 4, 8, 16, 32), "stages": (1, 4), "load": (BULK, CP_ASYNC)}
#: The packs per thread of a channels-first run that are worth trying: more than eight of it spill.
RUN_PACKS = (1, 2, 4, 8)
BLOCK_SPACE = {
    "threads": (32, 64, 128, 256, 512),
    **_SLABS,
    "load": (REGISTERS, BULK, CP_ASYNC),
    "packs_per_thread": PACKS,
}
CLUSTER_SPACE = {"threads": (128, 256, 512), "cluster": (2, 4, 8, 16), **_SLABS, "load": (REGISTERS, BULK, CP_ASYNC)}
#: `samples` is the number of samples whose blocks are in one cluster: 1, or all.
CLUSTER_BACKWARD_SPACE = {**CLUSTER_SPACE, "samples": (1, 2, 4, 8)}


def load_of(tile: Tile) -> str:
    """Value of ``load``."""
    return str(tile.load)


class _Slabs(WholeGroups):
    """Tiling with slabs of groups that are copied asynchronously to shared memory."""

    @lazy
    def slab(self) -> Slab:
        """Slab of the tile's groups, cut into pieces."""
        problem = self.problem
        return Slab(problem.layout, self.channels, problem.HxW, problem.pack, self.tile.threads, self.pieces)

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the arrays in the kernel's order, each from a 16-byte boundary."""
        places, tile, sums = self.slab.places, self.tile, self.problem.sum_itemsize
        sizes = [8 * tile.stages if load_of(tile) == BULK else 0, places * self.problem.pair]
        if self.problem.is_backward and self.cluster > 1:
            sizes.append(places * self.problem.pair)
        sizes += [places * 4 * sums, tile.groups * 4 * sums]
        sizes += [16 * self.slab.piece_packs] * self.problem.read
        sizes += [self.slab.partial_sums * self.problem.pair]
        return sum(round_up(size, 16) for size in sizes)

    @lazy
    def registers(self) -> int:
        """Registers per thread that the launch bounds allow."""
        return bound_registers(self.problem, self.problem.layout)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        tile = self.tile
        if (sentence := refuses_threads(tile)) is not None:
            return sentence
        if (sentence := self.refuses_groups()) is not None:
            return sentence
        if tile.stages > MOST_STAGES:
            return f"stages is {tile.stages}, expected at most {MOST_STAGES}"
        if load_of(tile) == BULK:
            if device.compute_capability < (9, 0):
                return f"load is bulk, but {device.name} has no bulk copies"
            if self.problem.layout != "NCHW":
                return f"load={BULK} needs channels-first data"
        return refuses_shared(self.shared, device) or refuses_registers(self.registers, tile, device)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the slab kernel, and the launches that fold the parameter sums."""
        blocks = self.problem.N * (self.problem.group // self.tile.groups) * self.pieces
        passes = self.tile.stages + (not self.problem.is_backward)  # a forward sums again about a better centre
        return self.one_sweep(
            whole_clusters(blocks, self.cluster),
            {"slab_groups": self.tile.groups, "piece_packs": self.slab.piece_packs},
            packs=blocks * self.slab.processed,
            variant=load_of(self.tile),
            uneven=self.problem.uneven or (self.slab.layout == "NHWC" and self.slab.channels % self.problem.pack > 0),
            rounds=self.slab.rounds * passes,
            phases=PHASES,
            shared_bytes=self.shared,
            registers=self.registers,
            cluster=self.cluster,
            constants=self.slab.constants,
        )


def _better_in_a_warp(problem: Problem) -> bool:
    """Whether channels have one element and a warp holds a group, because `warp` then loads the parameters once."""
    return problem.HxW == 1 and problem.group_length <= WARP * max(WARP_SPACE["packs_per_thread"]) * problem.pack


class _Staged(_Slabs):
    """Tiling with one block per slab."""

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if self.tile.packs_per_thread > 1:
            return f"packs_per_thread is {self.tile.packs_per_thread}, expected 1: only load={REGISTERS} uses it"
        return super().refuses(device)

    @lazy
    def worth(self) -> bool:
        """Whether packs_per_thread is unused and `warp` is not better."""
        return self.tile.packs_per_thread == 1 and not _better_in_a_warp(self.problem)


class _InRegisters(Runs):
    """Tiling with one block per group, in registers."""

    variant = "_registers"

    @lazy
    def _tensors(self) -> int:
        """Tensors whose packs a thread holds."""
        return 2 if self.problem.is_backward else 1

    @lazy
    def held(self) -> int:
        """Registers that a thread needs at least: its packs in the stored dtype, and working registers.

        The gradient of an activation needs more working registers if a pack has eight elements.
        """
        problem, work = self.problem, 52 if self.problem.is_backward else 48
        wide = 20 if problem.dtype == "float64" else 0
        through = 14 if problem.is_backward and problem.activation is not None and problem.pack >= 8 else 0
        return work + wide + through + WORDS * self._tensors * self.packs

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        tile = self.tile
        if tile.groups > 1 or tile.stages > 1:
            fields = f"groups is {tile.groups} and stages is {tile.stages}"
            return f"{fields}, expected 1 and 1: load={REGISTERS} loads one whole group"
        if (packs := int(tile.as_dict().get("packs_per_thread", 1))) > RUN_PACKS[-1]:
            return f"packs_per_thread is {packs}, expected at most {RUN_PACKS[-1]} for channels-first data"
        sentence = refuses_threads(tile) or self.refuses_capacity() or refuses_shared(self.shared, device)
        return sentence or refuses_resident(self.held, tile, device)

    @lazy
    def worth(self) -> bool:
        """Whether half the packs per thread would not hold the group, and `warp` is not better."""
        tile, problem = self.tile, self.problem
        if tile.packs_per_thread not in RUN_PACKS:
            return False
        half = tile.threads * tile.packs_per_thread // 2 * problem.pack
        fits = tile.groups == tile.stages == 1 and (tile.packs_per_thread == 1 or problem.group_length > half)
        return fits and not _better_in_a_warp(problem)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the group kernel, and the launches that fold the parameter sums.

        The phases for the cost model are those of a slab in shared memory. Only tuning finds which of the two is
        faster, and from which size on.
        """
        few = self._tensors * self.packs * min(self.pieces, 2) <= FEW_PACKS
        return self.run_launches(LEAN_REGISTERS if few else RESIDENT_REGISTERS, PHASES)


class _StagedCluster(Clustered, _Slabs):
    """Tiling with one cluster of blocks per slab."""

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if (sentence := self.refuses_cluster(device)) is not None:
            return sentence
        if (self.pieces - 1) * self.slab.piece_packs >= self.slab.packs:
            return f"a slab of {self.tile.groups} groups is too small for {self.pieces} pieces"
        return super().refuses(device)


class _ClusterRegisters(Clustered, _InRegisters):
    """Tiling with one cluster of blocks per group, in registers."""

    @lazy
    def constants(self) -> dict[str, int]:
        """Compile-time constants of the team kernel that are not fields of the tile."""
        return {**super().constants, "packs_per_thread": self.packs}

    def _slice(self, elements: int) -> int:
        """Elements of a slice; see Run::slice in team.cuh."""
        return round_up(ceil_div(elements, self.pieces), SECTOR_PACKS * self.problem.pack)

    @lazy
    def packs(self) -> int:
        """Packs per thread: as few as hold a slice.

        If groups are whole packs, all have the alignment of the tensor, which is 0 for the arrays of a framework.
        """
        length, pack = self.problem.group_length, self.problem.pack
        covered = length if length % pack == 0 else length + pack - 1
        return ceil_div(self._slice(covered), pack * self.tile.threads)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if (sentence := self.refuses_cluster(device)) is not None:
            return sentence
        problem = self.problem
        if self.samples > 1 and (problem.HxW == 1 or problem.group_channels == 1):
            return f"samples is {self.samples}, expected 1: each channel has one element, or a group of its own"
        if (self.pieces - 1) * self._slice(problem.group_length + problem.pack - 1) >= problem.group_length:
            return f"a group of {problem.group_length} elements is too small for {self.pieces} slices"
        return super().refuses(device)

    @lazy
    def worth(self) -> bool:
        """Whether the fields that this tiling does not use are the first of their values."""
        return bool(self.tile.groups == self.tile.stages == 1)


def group_cluster(problem: Problem, tile: Tile) -> Tiling:
    """Tiling of a tile of `cluster`."""
    if load_of(tile) != REGISTERS:
        return _StagedCluster(problem, tile)
    if problem.layout == "NHWC":
        return (ClusterGradientColumns if problem.is_backward else ClusterColumns)(problem, tile)
    return _ClusterRegisters(problem, tile)


def group_block(problem: Problem, tile: Tile) -> Tiling:
    """Tiling of a tile of `block`."""
    if load_of(tile) != REGISTERS:
        return _Staged(problem, tile)
    if problem.layout == "NHWC":
        return (GradientColumns if problem.is_backward else Columns)(problem, tile)
    return _InRegisters(problem, tile)
