"""Strategy `warp` of GroupNorm: a warp or a part of a warp holds a group in registers.

If HxW = 1, a group is a row, and is processed as a row of LayerNorm.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, Problem, accumulator
from cunorm.core.strategy import Launch, Tile, Tiling, ceil_div
from cunorm.ops.common.limits import blocks_for, refuses_registers, refuses_shared
from cunorm.ops.common.register_rows import WarpRows, present
from cunorm.ops.common.strips import owners

from .one_sweep import Runs

#: Of equal predictions the first is selected: few packs, so that many lanes read side by side, and no idle lanes.
WARP_SPACE = {
    "packs_per_thread": (1, 2, 4, 8),
    "lanes": (1, 2, 4, 8, 16, 32),
    "threads": (128, 256),
    "samples_per_team": (1, 4, 16, 64),
}
#: Working registers of an activation, by the dtype of the sums.
ACTIVATION_REGISTERS = {"float32": 16, "float64": 24}


class _Warp(Runs):
    """Common base of the two tilings of `warp`."""

    @lazy
    def lanes(self) -> int:
        """Threads per team."""
        return self.tile.lanes

    @lazy
    def rows(self) -> WarpRows:
        """Tiling of the problem whose rows are the groups of all samples."""
        problem = self.problem
        made = replace(problem, N=problem.N * problem.group, C=problem.group_channels, group=1)
        return WarpRows(made, self.tile)


class _WarpRuns(_Warp):
    """Tiling of groups whose channels have several elements, HxW > 1."""

    @lazy
    def registers(self) -> int:
        """Upper bound of the registers that a thread needs without spilling; the compile gate proves it.

        They hold addresses and statistics, and for each pack its data and its widened values.
        """
        problem = self.problem
        base = 64 if problem.is_backward else 48
        base += 8 if problem.dtype == "float64" else 0
        widened = problem.pack * problem.sum_itemsize // 4
        each = 9 + widened if problem.is_backward else 5 + 2 * widened
        return base + self.tile.packs_per_thread * each

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        if (sentence := self.rows.refuses_team() or self.refuses_capacity()) is not None:
            return sentence
        if self.tile.samples_per_team > 1:
            return f"samples_per_team is {self.tile.samples_per_team}, expected 1 unless HxW = 1"
        return refuses_shared(self.shared, device) or refuses_registers(self.registers, self.tile, device)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the team kernel, and the launches that fold the parameter sums."""
        return self.run_launches(self.registers, phases=1)


class _WarpRows(_Warp):
    """Tiling of groups whose channels have one element, HxW = 1."""

    variant = "_rows"

    @lazy
    def owners(self) -> int:
        """Teams per group. They take the samples in turn, `tile.samples_per_team` each.

        The teams of all groups make up whole blocks.
        """
        teams = self.rows.teams_of_block
        return owners(self.problem, self.tile.samples_per_team, teams // math.gcd(teams, self.problem.group))

    @lazy
    def partial_rows(self) -> int:
        """Partial rows of channel sums.

        There is one row per block if every block has the same number of teams of each group. Otherwise there are as
        many rows as teams of one group that have a sample.
        """
        copies, rest = divmod(self.rows.teams_of_block, self.problem.group)
        return ceil_div(min(self.problem.N, self.owners), 1 if rest else copies)

    @lazy
    def shared(self) -> int:
        """Bytes of shared memory per block: the sums that teams of one group fold."""
        teams = self.rows.teams_of_block
        return self.rows.sums_shared(self.problem.group if teams % self.problem.group == 0 else teams)

    @lazy
    def registers(self) -> int:
        """Registers per thread: those of `WarpRows`, and the working registers of an activation."""
        working = ACTIVATION_REGISTERS[accumulator(self.problem.dtype)] if self.problem.activation else 0
        return self.rows.registers + working

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`."""
        sentence = self.rows.refuses_team() or self.refuses_capacity() or self.rows.refuses_halves()
        sentence = sentence or refuses_shared(self.shared, device)
        return sentence or refuses_registers(self.registers, self.tile, device)

    @lazy
    def parameters_read(self) -> int:
        """Bytes of gamma and beta that are loaded: once per team if they stay in registers, otherwise for every row.

        In a backward, a row loads them once for the sums and once for dx.
        """
        of_rows, rows = self.problem.N * (1 + ("dx" in self.problem.outputs)), self.rows
        asked = ((ITEMSIZE[dtype], rows.resident(dtype)) for dtype in present(rows.given))
        return sum(self.problem.C * nbytes * (self.owners if once else of_rows) for nbytes, once in asked)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launch of the team kernel, and the launches that fold the parameter sums."""
        teams, rows = self.owners * self.problem.group, ceil_div(self.problem.N, max(1, self.owners))
        return self.one_sweep(
            blocks_for(teams // self.rows.teams_of_block),
            {"teams": teams},
            packs=teams * self.lanes * rows * self.tile.packs_per_thread,
            rounds=rows,
            items=rows,
            registers=self.registers,
            phases=self.rows.phases(rows),
            shared_bytes=self.shared,
            streams=self.rows.streams,
            constants=self.rows.constants,
        )


def group_warp(problem: Problem, tile: Tile) -> Tiling:
    """Tiling of a tile of `warp`."""
    return _WarpRows(problem, tile) if problem.HxW == 1 else _WarpRuns(problem, tile)
