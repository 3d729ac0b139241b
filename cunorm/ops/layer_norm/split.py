"""Strategy `split` of LayerNorm, and functions that it shares with the other strategies of LayerNorm."""

from __future__ import annotations

import math
from typing import Any

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, Tile, Tiling, by_name, ceil_div, refuses_threads
from cunorm.ops.common.folds import fold_rows, parameter_launches
from cunorm.ops.common.limits import RESIDENT_REGISTERS, WARP, blocks_for, refuses_registers, refuses_resident, round_up
from cunorm.ops.common.slab_sweep import Sweep, refuses_chunk
from cunorm.ops.common.split_moments import moments_launches

SPLIT_BACKWARD_SPACE = {"threads": (128, 256), "packs_per_thread": (1, 2, 4), "rows_per_team": (1, 2, 4, 8, 16, 32, 64)}
SPLIT_SPACE = {**SPLIT_BACKWARD_SPACE, "chunk": (1024, 4096, 16384, 65536)}


def gradient_arguments(problem: Problem) -> Arguments:
    """Arrays that every sweep of a backward reads."""
    return by_name("dy", "mean", "rstd", "gamma", x=problem.reads_x)


def owners(problem: Problem, tile: Tile, step: int) -> int:
    """Number of owners (teams or bands) that take the rows in turn, `tile.rows_per_team` each.

    The number is a multiple of ``step``. If an owner has several rows, and these are misaligned, the number is also
    such that all rows of an owner have the same misalignment.
    """
    count = round_up(ceil_div(problem.N, tile.rows_per_team), step)
    if problem.C % problem.pack and count < problem.N:
        count = round_up(count, math.lcm(step, problem.pack))
    return count


class _LayerSplit(Tiling):
    """Tiling with strips of a row and bands of rows. A warp processes one strip of all rows of a band, row by row."""

    @lazy
    def strips(self) -> int:
        """Strips per row, for the worst alignment. A strip has the width Strips::span in strips.cuh."""
        span = WARP * self.tile.packs_per_thread * self.problem.pack
        return ceil_div(self.problem.C + self.problem.pack - 1, span)

    @lazy
    def bands(self) -> int:
        """Number of bands."""
        return min(self.problem.N, owners(self.problem, self.tile, 1))

    @lazy
    def grid(self) -> int:
        """Blocks of a sweep, with one warp per strip of a band."""
        return blocks_for(ceil_div(self.bands * self.strips, self.tile.threads // WARP))

    @lazy
    def shape(self) -> dict[str, int]:
        """Sizes that the kernels take as arguments."""
        return {"rows": self.problem.N, "length": self.problem.C, "bands": self.bands, "strips": self.strips}

    @lazy
    def processed(self) -> int:
        """Packs that the threads process in a sweep, idle lanes of their warps counted."""
        rows = ceil_div(self.problem.N, max(1, self.bands))
        return self.grid * self.tile.threads * rows * self.tile.packs_per_thread

    @lazy
    def widened(self) -> int:
        """Registers per pack of accumulators."""
        return self.problem.pack * self.problem.sum_itemsize // 4


class LayerSplit(_LayerSplit):
    """Tiling of the forward: moments of chunks of a row, their fold, and y."""

    @lazy
    def moments(self) -> Sweep:
        """Sweep that computes the moments. A row is a sample with one channel."""
        problem, tile = self.problem, self.tile
        return Sweep("NCHW", problem.N, 1, problem.C, tile.chunk, problem.pack, tile.threads)

    @lazy
    def registers(self) -> int:
        """Registers that a thread needs without spilling; the compile gate proves the number."""
        return 52 + self.tile.packs_per_thread * (4 + 2 * self.widened)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. No problem is refused for its sizes."""
        sentence = refuses_threads(self.tile) or refuses_chunk(self.tile, "elements")
        return sentence or refuses_resident(self.registers, self.tile, device)

    @lazy
    def workspace(self) -> int:
        """Bytes of the moments of each chunk of a row. The first sweep writes them, and the fold reads them."""
        return self.problem.N * self.moments.chunks * self.problem.moments

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the moments, their fold, and the second sweep."""
        return (
            *moments_launches(self.problem, self.moments, 1),
            Launch(
                "layer_norm_split",
                "layer_norm_split_apply",
                self.grid,
                self.tile.threads,
                {**by_name("x", "gamma", "beta", "y", "mean", "rstd"), **self.shape},
                traffic=2 * self.problem.nbytes,
                reread=self.problem.nbytes,
                packs=self.processed,
                registers=self.registers,
                phases=ceil_div(self.problem.N, self.bands),
            ),
        )


class LayerSplitBackward(_LayerSplit):
    """Tiling of the gradients: sums of strips, column sums of bands, their folds, and dx."""

    @lazy
    def registers(self) -> int:
        """Registers that a thread needs without spilling; the compile gate proves the number."""
        return 64 + self.tile.packs_per_thread * (8 + 4 * self.widened)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. No problem is refused for its sizes."""
        sentence = refuses_threads(self.tile)
        return sentence or refuses_registers(max(self.registers, RESIDENT_REGISTERS), self.tile, device)

    @lazy
    def row_sums(self) -> int:
        """Pairs of the workspace for the sums of strips."""
        return self.problem.N * self.strips if "dx" in self.problem.outputs else 0

    @lazy
    def _bands_bytes(self) -> int:
        """Bytes of the column sums of bands, and of the slices in which they are folded."""
        kept = self.problem.wants_parameters and self.bands > 1
        return fold_rows(self.bands, self.problem.C) * self.problem.C * self.problem.pair if kept else 0

    @lazy
    def workspace(self) -> int:
        """Bytes of one pair per strip of a row, and of the column sums of bands."""
        return self.row_sums * self.problem.pair + self._bands_bytes

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        The column sums of bands and the slices in which they are folded are written once and read once. The first sweep
        writes the sums of strips, and the fold reads them. The fold writes one pair per row, and the second sweep reads
        it once per strip.
        """
        fold = self.problem.N if self.row_sums else 0
        return 2 * self._bands_bytes + (3 * self.row_sums + fold) * self.problem.pair

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the first sweep, the folds of its sums, and the second sweep."""
        problem, threads, stem = self.problem, self.tile.threads, "layer_norm_backward_split"
        given, wants_dx = gradient_arguments(problem), "dx" in problem.outputs
        direct = problem.wants_parameters and self.bands == 1
        kept = problem.wants_parameters and not direct
        facts: dict[str, Any] = {"registers": self.registers, "phases": ceil_div(problem.N, self.bands)}
        facts["packs"] = self.processed
        partial = (self.row_sums + self.bands * problem.C * problem.wants_parameters) * self.problem.pair
        rows_at: Arguments = {"row_sums": "workspace" if wants_dx else 0, "bands_at": self.row_sums}
        sums = {**given, **by_name(workspace=kept, dgamma=direct, dbeta=direct), **rows_at, **self.shape}
        traffic = problem.read * problem.nbytes + partial
        launches = [Launch(stem, f"{stem}_sums", self.grid, threads, sums, traffic=traffic, **facts)]
        if kept:
            launches += parameter_launches(problem, self.bands, start=self.row_sums)
        if wants_dx:
            fold: dict[str, Any] = {"shared_bytes": threads // WARP * problem.pair}
            fold["traffic"] = fold["reread"] = self.row_sums * problem.pair
            fold["phases"] = 1 + self.strips // threads
            parts: Arguments = {"row_sums": "workspace", **self.shape}
            launches.append(Launch(stem, f"{stem}_fold", blocks_for(problem.N), threads, parts, **fold))
            sweep: Arguments = {**given, "dx": "dx", "row_sums": "workspace", **self.shape}
            facts |= {"traffic": 3 * problem.nbytes, "reread": 2 * problem.nbytes}
            launches.append(Launch(stem, f"{stem}_input", self.grid, threads, sweep, **facts))
        return tuple(launches)
