"""Shared parts of GroupNorm's strategies that read every byte once: `warp`, `block` and `cluster`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div
from cunorm.ops.common.folds import parameter_launches, parameter_workspace
from cunorm.ops.common.limits import refuses_cluster_size, round_up, whole_clusters
from cunorm.ops.common.register_rows import parameter_bytes
from cunorm.ops.common.slab_sweep import channel_lanes

SECTOR_BYTES = 32  # smallest transfer from DRAM and L2
#: Values of ``load``: bulk copies by one thread, asynchronous copies by all threads, or loads into registers.
BULK, CP_ASYNC, REGISTERS = "bulk", "cp_async", "registers"
PHASES = 3  # for the cost model: loads, sums, stores
WORDS = 4  # registers per pack


class OneSweep(Tiling):
    """Tiling with a kernel that reads every byte once, and the fold of the parameter sums."""

    #: Suffix of the kernel's name after the strategy's name.
    variant = ""

    @lazy
    def pieces(self) -> int:
        """Blocks that share a slab or a group of one sample."""
        return 1

    @lazy
    def samples(self) -> int:
        """Samples whose channel sums are added up by the blocks of one cluster."""
        return 1

    @lazy
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.pieces * self.samples

    @lazy
    def partial_rows(self) -> int:
        """Partial rows of channel sums: one per sample, or one per cluster that adds up several."""
        return self.problem.N // self.samples

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial rows of dgamma and dbeta."""
        return parameter_workspace(self.problem, self.partial_rows)

    def team_sums(self, lanes: int) -> int:
        """Bytes of shared memory for one pair of sums in teams of ``lanes``; see Team::scratch_size in team.cuh."""
        shared = self.pieces > 1
        warps = self.tile.threads // WARP + shared
        return 2 * warps * self.problem.pair if lanes > WARP or shared else 0

    def tensor_bytes(self, name: str) -> int:
        """Bytes that are moved to read or write a tensor once."""
        return self.problem.nbytes_of(name)

    @lazy
    def parameters_read(self) -> int:
        """Bytes of gamma and beta that are loaded: once per sample."""
        return self.problem.N * parameter_bytes(self.problem)

    @lazy
    def _given(self) -> Arguments:
        problem = self.problem
        if not problem.is_backward:
            return by_name("x", "gamma", "beta", "y", "mean", "rstd", "eps")
        direct = problem.wants_parameters and self.partial_rows == 1
        given = by_name("dy", "mean", "rstd", "gamma", "dx", x=problem.reads_x, beta=problem.activation is not None)
        kept = by_name(workspace=problem.wants_parameters and not direct, dgamma=direct, dbeta=direct)
        return {**given, **kept}

    def one_sweep(self, grid: int, sizes: Mapping[str, int], **facts: Any) -> tuple[Launch, ...]:
        """Launches of the kernel, whose arguments include ``sizes``, and of the fold of the parameter sums."""
        problem, rows = self.problem, self.partial_rows
        entry = f"{problem.op}_{self.tile.strategy}{self.variant}"
        shape = {"N": problem.N, "C": problem.C, "HxW": problem.HxW, "groups": problem.group, **sizes}
        written = (name for name in ("y", "dx") if name in problem.outputs)
        traffic = problem.read * self.tensor_bytes("x") + sum(map(self.tensor_bytes, written))
        traffic += rows * problem.C * self.problem.pair * problem.wants_parameters + self.parameters_read
        facts.setdefault("streams", self.problem.read)
        main = Launch(entry, entry, grid, self.tile.threads, {**self._given, **shape}, traffic=traffic, **facts)
        second = problem.wants_parameters and rows > 1
        return (main, *parameter_launches(problem, rows)) if second else (main,)


class WholeGroups(OneSweep):
    """Tiling with slabs of neighbouring whole groups of one sample: ``groups`` of them."""

    @lazy
    def channels(self) -> int:
        """Channels of a slab."""
        return int(self.tile.groups * self.problem.group_channels)

    def tensor_bytes(self, name: str) -> int:
        """Bytes of the 32-byte sectors that are accessed to read or write a tensor once.

        Rows of few channels share sectors with neighbouring slabs. In a sector, rows begin at each multiple of `step`
        equally often.
        """
        problem, nbytes = self.problem, self.problem.nbytes_of(name)
        if problem.layout == "NCHW" or self.tile.groups == problem.group:
            return nbytes
        itemsize = ITEMSIZE[problem.dtype_of(name)]
        row = self.channels * itemsize
        step = math.gcd(row, problem.C * itemsize, SECTOR_BYTES)
        return nbytes * (row + SECTOR_BYTES - step) // row

    def refuses_groups(self) -> str | None:
        """Return the error message if the groups cannot be divided into slabs, or None."""
        if self.problem.group % self.tile.groups:
            return f"groups is {self.tile.groups}, expected a divisor of the number of groups, {self.problem.group}"
        return None


class Runs(OneSweep):
    """Tiling of groups that are one run of a sample, in the registers of a team."""

    @lazy
    def lanes(self) -> int:
        """Threads per team."""
        return self.tile.threads

    @lazy
    def packs(self) -> int:
        """Packs per thread."""
        return self.tile.packs_per_thread

    @lazy
    def constants(self) -> dict[str, int]:
        """Compile-time constants of the team kernel that are not fields of the tile."""
        if not self.problem.is_backward:
            return {}
        return {"channel_lanes": min(channel_lanes(self.problem.HxW, self.problem.pack), self.lanes)}

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block.

        The sums of teams of several warps, and those that other blocks of a cluster read; the teams' partial channel
        sums; the channel sums of a cluster's slices.
        """
        problem, tile, sums = self.problem, self.tile, self.team_sums(self.lanes)
        if not problem.wants_parameters or problem.HxW == 1 or problem.group_channels == 1:
            return sums
        of_team = self.lanes * self.packs + problem.group_channels - 1
        slices = self.cluster * problem.group_channels * problem.pair if self.cluster > 1 else 0
        return round_up(sums, 16) + round_up(tile.threads // self.lanes * of_team * problem.pair, 16) + slices

    def refuses_capacity(self) -> str | None:
        """Return the error message if a group does not fit into the registers of a team, or None."""
        if self.problem.layout != "NCHW":
            return "expected channels-first data: a channels-last group is not one run"
        capacity = self.pieces * self.lanes * self.packs * self.problem.pack
        if self.problem.group_length > capacity:
            packs = f"{self.lanes} lanes with packs_per_thread={self.packs} hold {capacity}"
            return f"a group has {self.problem.group_length} elements, but {packs}"
        return None

    def run_launches(self, registers: int, phases: int) -> tuple[Launch, ...]:
        """Launch of the team kernel, and the launches that fold the parameter sums."""
        items = ceil_div(self.problem.N * self.problem.group, self.tile.threads // self.lanes)
        facts: dict[str, Any] = {"registers": registers, "phases": phases, "shared_bytes": self.shared}
        grid = whole_clusters(items * self.pieces, self.cluster)
        facts["packs"] = grid * self.tile.threads * self.packs
        return self.one_sweep(grid, {}, constants=self.constants, cluster=self.cluster, **facts)


class Clustered(OneSweep):
    """Tiling with one cluster of blocks per slab or group, of one sample or of all."""

    @lazy
    def samples(self) -> int:
        """Samples whose channel sums are added up by the blocks of one cluster."""
        return int(self.tile.as_dict().get("samples", 1))

    @lazy
    def pieces(self) -> int:
        """Blocks that share a slab or a group of one sample."""
        return self.tile.cluster // self.samples

    def refuses_cluster(self, device: Device) -> str | None:
        """Return the error message if the blocks of a cluster cannot be divided among its samples, or None."""
        problem, tile = self.problem, self.tile
        if self.samples > 1:
            if not problem.wants_parameters:
                return f"samples is {self.samples}, expected 1, because neither dgamma nor dbeta is wanted"
            if self.samples != problem.N:
                return f"samples is {self.samples}, expected 1 or the number of samples, {problem.N}"
            if tile.cluster % self.samples:
                return f"samples is {self.samples}, expected a divisor of cluster, {tile.cluster}"
        return refuses_cluster_size(tile, device)
