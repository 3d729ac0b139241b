"""Strips of rows, which the `split` kernels of LayerNorm and RMSNorm sweep, and the arguments of kernels on rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name, ceil_div, refuses_threads

from .folds import fold_rows, parameter_launches
from .limits import RESIDENT_REGISTERS, blocks_for, refuses_registers, round_up

STRIPS_SPACE = {"threads": (128, 256), "packs_per_thread": (1, 2, 4), "rows_per_team": (1, 2, 4, 8, 16, 32, 64)}
#: Threads per block of the kernel that adds the residual.
JOIN_THREADS = 256


def numbers_of(problem: Problem) -> Arguments:
    """The argument gamma_offset of ops that have one. It is 0 without gamma, whose place a factor of 1 takes."""
    if "gamma_offset" not in problem.spec.numbers:
        return {}
    return by_name(gamma_offset=problem.gamma_dtype is not None)


def arguments_of_forward(problem: Problem) -> Arguments:
    """All arrays and numbers of a forward."""
    return {**by_name(*problem.spec.inputs, *problem.spec.results, *problem.spec.numbers), **numbers_of(problem)}


def arguments_of_gradient(problem: Problem) -> Arguments:
    """The inputs that every sweep of a backward reads, and the numbers."""
    names = (name for name in problem.spec.inputs if name not in problem.spec.extras)
    return {**by_name(*names), **by_name(x=problem.reads_x), **numbers_of(problem)}


def results_of_parameters(problem: Problem, wanted: bool) -> Arguments:
    """The gradients of the parameters, if ``wanted``; otherwise null in their place."""
    return by_name(**{name: wanted for name in ("dgamma", "dbeta") if name in problem.spec.results})


def join_launches(problem: Problem) -> tuple[Launch, ...]:
    """The launch that stores h = x + residual, if the problem has a residual. Later launches read h as their x."""
    if "residual" not in problem.extras:
        return ()
    packs = ceil_div(problem.N * problem.C, problem.pack)
    return (
        Launch(
            "add_residual",
            "add_residual",
            blocks_for(ceil_div(packs, JOIN_THREADS)),
            JOIN_THREADS,
            {**by_name("x", "residual", "h"), "count": problem.N * problem.C},
            traffic=3 * problem.nbytes,
            registers=32,
            takes_tile=False,
            streams=2 / 4,  # one pack of two tensors, where a stream is four packs
        ),
    )


def _reading_h(arguments: Arguments) -> Arguments:
    return {name: "h" if argument == "x" else argument for name, argument in arguments.items()}


def from_h(problem: Problem, *launches: Launch) -> tuple[Launch, ...]:
    """The launches, which read h instead of x if the problem has a residual."""
    if "residual" not in problem.extras:
        return launches
    return tuple(replace(one, arguments=_reading_h(one.arguments)) for one in launches)


def owners(problem: Problem, rows_of_each: int, step: int) -> int:
    """Number of owners (teams or bands) that take the rows or samples in turn, ``rows_of_each`` each.

    The number is a multiple of ``step``. If an owner has several rows, and these are misaligned, the number is also
    such that all rows of an owner have the same misalignment.
    """
    count = round_up(ceil_div(problem.N, rows_of_each), step)
    if problem.C % problem.pack and count < problem.N:
        count = round_up(count, math.lcm(step, problem.pack))
    return count


class Strips(Tiling):
    """Tiling with strips of a row and bands of rows. A warp processes one strip of all rows of a band, row by row."""

    @lazy
    def strips(self) -> int:
        """Strips per row, for the worst alignment. A strip has the width Strips::span in strips.cuh."""
        span = WARP * self.tile.packs_per_thread * self.problem.pack
        return ceil_div(self.problem.C + self.problem.pack - 1, span)

    @lazy
    def bands(self) -> int:
        """Number of bands."""
        return min(self.problem.N, owners(self.problem, self.tile.rows_per_team, 1))

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


class StripGradients(Strips):
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
    def strip_sums(self) -> int:
        """Number of the sums of strips in the workspace."""
        return self.problem.N * self.strips if "dx" in self.problem.outputs else 0

    @lazy
    def _bands_bytes(self) -> int:
        """Bytes of the column sums of bands, and of the slices in which they are folded."""
        kept = self.problem.wants_parameters and self.bands > 1
        return fold_rows(self.bands, self.problem.C) * self.problem.C * self.problem.row_sums if kept else 0

    @lazy
    def workspace(self) -> int:
        """Bytes of the sums of each strip of a row, and of the column sums of bands."""
        return self.strip_sums * self.problem.row_sums + self._bands_bytes

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        The column sums of bands and the slices in which they are folded are written once and read once. The first sweep
        writes the sums of strips, and the fold reads them. The fold writes the sums of each row, and the second sweep
        reads them once per strip.
        """
        fold = self.problem.N if self.strip_sums else 0
        return 2 * self._bands_bytes + (3 * self.strip_sums + fold) * self.problem.row_sums

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the first sweep, the folds of its sums, and the second sweep."""
        problem, threads, stem = self.problem, self.tile.threads, f"{self.problem.op}_split"
        given, wants_dx = arguments_of_gradient(problem), "dx" in problem.outputs
        direct = problem.wants_parameters and self.bands == 1
        kept = problem.wants_parameters and not direct
        facts: dict[str, Any] = {"registers": self.registers, "phases": ceil_div(problem.N, self.bands)}
        facts |= {"packs": self.processed, "constants": {"addend": len(problem.extras)}}
        partial = (self.strip_sums + self.bands * problem.C * problem.wants_parameters) * self.problem.row_sums
        rows_at: Arguments = {"row_sums": "workspace" if wants_dx else 0, "bands_at": self.strip_sums}
        results = {**by_name(workspace=kept), **results_of_parameters(problem, direct)}
        sums = {**given, **results, **rows_at, **self.shape}
        traffic = (1 + problem.reads_x) * problem.nbytes + partial
        launches = [Launch(stem, f"{stem}_sums", self.grid, threads, sums, traffic=traffic, **facts)]
        if kept:
            launches += parameter_launches(problem, self.bands, start=self.strip_sums)
        if wants_dx:
            fold: dict[str, Any] = {"shared_bytes": threads // WARP * problem.row_sums}
            fold["traffic"] = fold["reread"] = self.strip_sums * problem.row_sums
            fold |= {"phases": 1 + self.strips // threads, "constants": facts["constants"]}
            parts: Arguments = {"row_sums": "workspace", **self.shape}
            launches.append(Launch(stem, f"{stem}_fold", blocks_for(problem.N), threads, parts, **fold))
            sweep: Arguments = {**given, **by_name("dx", "dh"), "row_sums": "workspace", **self.shape}
            facts |= {"traffic": (1 + problem.read) * problem.nbytes, "reread": 2 * problem.nbytes}
            launches.append(Launch(stem, f"{stem}_input", self.grid, threads, sweep, **facts))
        return tuple(launches)
