"""Strategy `split` of GroupNorm: the channels of a sample are cut into chunks, and each chunk is swept twice."""

from __future__ import annotations

from typing import Any

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Arguments, Launch, Tiling, by_name
from cunorm.ops.common.folds import fold_rows, parameter_launches
from cunorm.ops.common.limits import blocks_for, bound_registers
from cunorm.ops.common.slab_sweep import Sweep, groups_asked, refuses_sweep
from cunorm.ops.common.split_moments import moments_launches

SPLIT_SPACE = {"threads": (128, 256, 512), "chunk": (16, 64, 256, 1024, 4096, 16384, 65536)}


class GroupSplit(Tiling):
    """Tiling with one partial sum per channel, sample and chunk."""

    @lazy
    def sweep(self) -> Sweep:
        """Sweep of a tensor in the layout for which the kernels are compiled.

        With HxW = 1 both layouts are the same bytes. Channels-last is better, because a thread processes a pack of
        channels, whereas a channels-first warp would process one element.
        """
        return Sweep.of(self.problem, self.tile, "NHWC" if self.problem.HxW == 1 else self.problem.layout)

    @lazy
    def rows(self) -> int:
        """Rows of partial sums [rows, C] in the workspace."""
        return self.problem.N * self.sweep.chunks

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. No problem is refused for its sizes."""
        return refuses_sweep(self.sweep, self.problem, self.tile, device)

    @lazy
    def workspace(self) -> int:
        """Bytes of the partial sums, and of the slices in which their rows are folded."""
        problem = self.problem
        rows = fold_rows(self.rows, problem.C) if problem.wants_parameters else self.rows
        return rows * problem.C * self.problem.part

    @lazy
    def workspace_traffic(self) -> int:
        """See `Tiling.workspace_traffic`.

        There are P = N * chunks * C partial sums, and S * C pairs of slices. In a forward, the first sweep writes P and
        the fold reads P. In a backward, the first sweep writes P. The fold to dgamma and dbeta reads P, and writes and
        reads S * C. For dx, another fold reads P and writes N * groups pairs. The second sweep reads the pair of its
        group for every channel, chunk and sample; channels-last, for every group of a pack instead of every channel,
        and once for every part of a block's threads that sweeps the same columns.
        """
        problem, sweep = self.problem, self.sweep
        parts = self.rows * problem.C
        if not problem.is_backward:
            return 2 * parts * self.problem.part
        moved = parts
        if problem.wants_parameters:
            moved += parts + 2 * (fold_rows(self.rows, problem.C) - self.rows) * problem.C
        if "dx" in problem.outputs:
            readers = sweep.parts if sweep.layout == "NHWC" else 1
            moved += parts + problem.N * problem.group + readers * self.rows * groups_asked(sweep.layout, problem)
        return moved * self.problem.pair

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of the first sweep, the folds of its partial sums, and the second sweep."""
        return self._backward() if self.problem.is_backward else self._forward()

    def _launch(self, stage: str, arguments: Arguments, traffic: int, **facts: Any) -> Launch:
        """Launch of one of the op's own kernels, by default a sweep."""
        stem = f"{self.problem.op}_split"
        facts = {"grid": blocks_for(self.sweep.items), "threads": self.tile.threads, **facts}
        facts |= {"registers": bound_registers(self.problem, self.sweep.layout), "layout": self.sweep.layout}
        return Launch(stem, f"{stem}_{stage}", arguments=arguments, traffic=traffic, streams=self.problem.read, **facts)

    @lazy
    def _shape(self) -> dict[str, int]:
        return {**self.sweep.arguments, "groups": self.problem.group, "items": self.sweep.items}

    def _forward(self) -> tuple[Launch, ...]:
        problem = self.problem
        arguments = {**by_name("x", "gamma", "beta", "y", "mean", "rstd"), **self._shape}
        return (
            *moments_launches(problem, self.sweep, problem.group),
            self._launch(
                "apply", arguments, problem.nbytes + problem.written, reread=problem.nbytes, packs=self.sweep.processed
            ),
        )

    def _backward(self) -> tuple[Launch, ...]:
        problem, parts = self.problem, self.rows * self.problem.C * self.problem.pair
        given, activated = by_name("dy", "mean", "rstd", "workspace", x=problem.reads_x), problem.activation is not None
        sums = {**given, **by_name(gamma=activated, beta=activated), **self._shape}
        traffic = self.problem.read * problem.nbytes + parts
        facts = {"shared_bytes": self.sweep.shared(self.problem.pair), "rounds": self.sweep.rounds}
        facts["packs"] = self.sweep.processed
        launches = [self._launch("sums", sums, traffic, **facts)]
        if problem.wants_parameters:
            launches += parameter_launches(problem, self.rows)
        if "dx" in problem.outputs:
            launches += [self._fold(parts), self._input(given, activated)]
        return tuple(launches)

    def _fold(self, parts: int) -> Launch:
        """Launch of the fold, one block per group. A thread waits for one partial sum after another."""
        problem, threads = self.problem, self.tile.threads
        shape = {name: size for name, size in self._shape.items() if name not in ("chunk", "items")}
        return self._launch(
            "fold",
            {**by_name("gamma", "workspace"), **shape},
            parts,
            reread=parts,
            grid=blocks_for(problem.N * problem.group),
            shared_bytes=threads // WARP * self.problem.pair,
            phases=1 + problem.group_channels * self.sweep.chunks // threads,
        )

    def _input(self, given: Arguments, activated: bool) -> Launch:
        arguments = {**given, **by_name("gamma", "dx", beta=activated), **self._shape}
        nbytes = self.problem.nbytes
        return self._launch("input", arguments, 3 * nbytes, reread=2 * nbytes, packs=self.sweep.processed)
