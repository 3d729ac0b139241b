"""GroupNorm's strategy `warp`: a group in the registers of a warp or a part of one.

Where a channel is one element (HxW = 1), a group is a row, as LayerNorm's are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Tile, Tiling, ceil_div
from cunorm.ops.common.building_blocks import blocks_for, refuses_registers, refuses_shared, round_up
from cunorm.ops.common.rows import WarpRows, present

from .one_sweep import Runs

#: Among equals the first is taken: few packs, so that many lanes read side by side, and no more lanes than have work.
WARP_SPACE = {
    "packs_per_thread": (1, 2, 4, 8),
    "lanes": (1, 2, 4, 8, 16, 32),
    "threads": (128, 256),
    "samples_per_team": (1, 4, 16, 64),
}
ACTIVATION_REGISTERS = 16


class _Warp(Runs):
    """What both ways have in common."""

    @lazy
    def lanes(self) -> int:
        """Threads of a team."""
        return self.tile.lanes

    @lazy
    def rows(self) -> WarpRows:
        """The problem with a group of a sample for a row."""
        problem = self.problem
        made = replace(problem, N=problem.N * problem.group, C=problem.group_channels, group=1)
        return WarpRows(made, self.tile)


class _WarpRuns(_Warp):
    """Groups of channels of several elements."""

    @lazy
    def registers(self) -> int:
        """What a thread needs so as not to spill, from above: addresses and statistics; then for each pack its data and
        its values widened. The compile gate proves it.
        """
        problem = self.problem
        base = 64 if problem.is_backward else 48
        base += 8 if problem.dtype == "float64" else 0
        widened = problem.pack * problem.sum_itemsize // 4
        each = 9 + widened if problem.is_backward else 5 + 2 * widened
        return base + self.tile.packs_per_thread * each

    def refuses(self, device: Device) -> str | None:
        """As `Tiling.refuses`."""
        if (sentence := self.rows.refuses_team() or self.refuses_capacity()) is not None:
            return sentence
        if self.tile.samples_per_team > 1:
            return f"samples_per_team is {self.tile.samples_per_team}, expected 1: more only where HxW = 1"
        return refuses_shared(self.shared, device) or refuses_registers(self.registers, self.tile, device)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """The teams' kernel, and the parameter sums behind it."""
        return self.run_launches(self.registers, phases=1)


class _WarpRows(_Warp):
    """Groups of channels of one element."""

    variant = "_rows"

    @lazy
    def owners(self) -> int:
        """Teams that share out the samples of a group, `tile.samples_per_team` each, in turn: as many as make up whole
        blocks over all groups. Where a team has several samples, and those start off 16-byte boundaries, also a number
        that lets it cover all of them from the same place.
        """
        problem, teams = self.problem, self.rows.teams_of_block
        step = teams // math.gcd(teams, problem.group)
        count = round_up(ceil_div(problem.N, self.tile.samples_per_team), step)
        if problem.C % problem.pack and count < problem.N:
            count = round_up(count, math.lcm(step, problem.pack))
        return count

    @lazy
    def partial_rows(self) -> int:
        """Rows of sums of the channels: one for each block whose teams have every group; else for each team of a group
        that has a sample.
        """
        copies, rest = divmod(self.rows.teams_of_block, self.problem.group)
        return ceil_div(min(self.problem.N, self.owners), 1 if rest else copies)

    @lazy
    def shared(self) -> int:
        """Shared memory of a block: the sums that teams of one group hand on."""
        teams = self.rows.teams_of_block
        return self.rows.sums_shared(self.problem.group if teams % self.problem.group == 0 else teams)

    @lazy
    def registers(self) -> int:
        """As for LayerNorm's rows, and what an activation works with."""
        return self.rows.registers + (ACTIVATION_REGISTERS if self.problem.activation else 0)

    def refuses(self, device: Device) -> str | None:
        """As `Tiling.refuses`."""
        sentence = self.rows.refuses_team() or self.refuses_capacity() or self.rows.refuses_halves()
        sentence = sentence or refuses_shared(self.shared, device)
        return sentence or refuses_registers(self.registers, self.tile, device)

    @lazy
    def parameters_read(self) -> int:
        """Bytes of gamma and beta that are asked for: by each team once where they stay in registers; else for every
        row, and in a backward for the sums and for dx.
        """
        of_rows, rows = self.problem.N * (1 + ("dx" in self.problem.outputs)), self.rows
        asked = ((ITEMSIZE[dtype], rows.resident(dtype)) for dtype in present(rows.given))
        return sum(self.problem.C * nbytes * (self.owners if once else of_rows) for nbytes, once in asked)

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """The teams' kernel, and the parameter sums behind it."""
        teams = self.owners * self.problem.group
        return self.one_sweep(
            blocks_for(teams // self.rows.teams_of_block),
            {"teams": teams},
            registers=self.registers,
            phases=self.rows.phases(ceil_div(self.problem.N, max(1, self.owners))),
            shared_bytes=self.shared,
            streams=self.rows.streams,
            constants=self.rows.constants,
        )


def group_warp(problem: Problem, tile: Tile) -> Tiling:
    """The tiling of a warp's tile."""
    return _WarpRows(problem, tile) if problem.HxW == 1 else _WarpRuns(problem, tile)
