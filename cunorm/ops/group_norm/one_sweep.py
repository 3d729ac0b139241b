"""What GroupNorm's strategies that read every byte once share: `warp`, `block` and `cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div
from cunorm.ops.common.building_blocks import (
    WARP,
    blocks_for,
    parameter_launches,
    parameter_workspace,
    round_up,
)
from cunorm.ops.common.geometry import channel_lanes
from cunorm.ops.common.rows import parameters_given, present


class OneSweep(Tiling):
    """One kernel that reads every byte once, and the parameter sums behind it."""

    #: What the kernel's name has behind the strategy's.
    variant = ""

    @lazy
    def partial_rows(self) -> int:
        """Rows of sums of the channels: one a sample."""
        return self.problem.N

    @lazy
    def workspace(self) -> int:
        """The rows of dgamma and dbeta."""
        return parameter_workspace(self.problem, self.partial_rows)

    @lazy
    def tensor_bytes(self) -> int:
        """Bytes that moving a tensor once takes."""
        return self.problem.nbytes

    @lazy
    def parameters_read(self) -> int:
        """Bytes of gamma and beta that are asked for: once for each sample."""
        dtypes = present(parameters_given(self.problem))
        return sum(self.problem.N * self.problem.C * ITEMSIZE[dtype] for dtype in dtypes)

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
        """The launches, of a kernel that is told these sizes besides the problem's."""
        problem, rows = self.problem, self.partial_rows
        entry = f"{problem.op}_{self.tile.strategy}{self.variant}"
        shape = {"N": problem.N, "C": problem.C, "HxW": problem.HxW, "groups": problem.group, **sizes}
        traffic = (self.problem.read + ("y" in problem.outputs or "dx" in problem.outputs)) * self.tensor_bytes
        traffic += rows * problem.C * self.problem.pair * problem.wants_parameters + self.parameters_read
        facts.setdefault("streams", self.problem.read)
        main = Launch(entry, entry, grid, self.tile.threads, {**self._given, **shape}, traffic=traffic, **facts)
        second = problem.wants_parameters and rows > 1
        return (main, *parameter_launches(problem, rows)) if second else (main,)


class Runs(OneSweep):
    """Groups that are one run of a sample, in the registers of a team."""

    @lazy
    def lanes(self) -> int:
        """Threads of a team."""
        return self.tile.threads

    @lazy
    def shared(self) -> int:
        """Shared memory of a block: sums of a team of several warps, and each team's parts of its channels' sums."""
        problem, tile = self.problem, self.tile
        sums = 2 * (tile.threads // WARP) * self.problem.pair if self.lanes > WARP else 0
        if not problem.wants_parameters or problem.HxW == 1 or problem.group_channels == 1:
            return sums
        of_team = self.lanes * tile.packs_per_thread + problem.group_channels - 1
        return round_up(sums, 16) + tile.threads // self.lanes * of_team * problem.pair

    def refuses_capacity(self) -> str | None:
        """Why a group does not fit into the registers of its team, or None."""
        if self.problem.layout != "NCHW":
            return "a group of channels-last data is not one run"
        capacity = self.lanes * self.tile.packs_per_thread * self.problem.pack
        if self.problem.group_length > capacity:
            packs = f"{self.lanes} lanes of {self.tile.packs_per_thread} packs hold {capacity}"
            return f"a group has {self.problem.group_length} elements, {packs}"
        return None

    def run_launches(self, registers: int, phases: int) -> tuple[Launch, ...]:
        """The teams' kernel, and the parameter sums behind it."""
        items = ceil_div(self.problem.N * self.problem.group, self.tile.threads // self.lanes)
        facts: dict[str, Any] = {"registers": registers, "phases": phases, "shared_bytes": self.shared}
        if self.problem.is_backward:
            of_channel = channel_lanes(self.problem.HxW, self.problem.pack)
            facts["constants"] = {"channel_lanes": min(of_channel, self.lanes)}
        return self.one_sweep(blocks_for(items), {}, **facts)
