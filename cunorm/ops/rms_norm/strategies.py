"""Strategies of RMSNorm, forward and backward. The kernels are in kernels_cu.

In a problem of RMSNorm, N is the number of rows, C is the length of a row, and HxW and group are 1, as in LayerNorm.
"""

from __future__ import annotations

from typing import Any

from cunorm.core.devices import WARP, Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Arguments, Launch, Strategy, by_name, ceil_div, refuses_threads
from cunorm.ops.common.limits import blocks_for, refuses_resident
from cunorm.ops.common.rows import held_strategies, short_rows
from cunorm.ops.common.strips import STRIPS_SPACE, StripGradients, Strips, from_h, join_launches, numbers_of


class RmsSplit(Strips):
    """Tiling of the forward: with a residual h, sums of squares of strips, their fold, and y."""

    @lazy
    def registers(self) -> int:
        """Registers that a thread needs without spilling; the compile gate proves the number."""
        return 52 + self.tile.packs_per_thread * (4 + 2 * self.widened)

    def refuses(self, device: Device) -> str | None:
        """See `Tiling.refuses`. No problem is refused for its sizes."""
        return refuses_threads(self.tile) or refuses_resident(self.registers, self.tile, device)

    @lazy
    def workspace(self) -> int:
        """Bytes of one sum per strip of a row. The first sweep writes them, and the fold reads them."""
        return self.problem.N * self.strips * self.problem.row_sums

    @lazy
    def launches(self) -> tuple[Launch, ...]:
        """Launches of h, the sums of squares, their fold, and the second sweep."""
        problem, threads, stem = self.problem, self.tile.threads, "rms_norm_split"
        rows_at: Arguments = {"row_sums": "workspace", **self.shape}
        facts: dict[str, Any] = {"packs": self.processed, "registers": self.registers}
        facts["phases"] = ceil_div(problem.N, self.bands)
        sums = Launch(
            stem,
            f"{stem}_sums",
            self.grid,
            threads,
            {**by_name("x"), **rows_at},
            traffic=problem.nbytes + self.workspace,
            **facts,
        )
        fold = Launch(
            stem,
            f"{stem}_fold",
            blocks_for(problem.N),
            threads,
            {**by_name("rstd", "eps"), **rows_at},
            shared_bytes=threads // WARP * problem.row_sums,
            traffic=self.workspace,
            reread=self.workspace,
            phases=1 + self.strips // threads,
        )
        apply = Launch(
            stem,
            f"{stem}_apply",
            self.grid,
            threads,
            {**by_name("x", "gamma", "y", "rstd"), **numbers_of(problem), **self.shape},
            traffic=problem.nbytes + problem.nbytes_of("y"),
            reread=problem.nbytes,
            **facts,
        )
        return (*join_launches(problem), *from_h(problem, sums, fold, apply))


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    of = StripGradients if backward else RmsSplit
    split = Strategy("split", op, STRIPS_SPACE, ("threads", "packs_per_thread"), of, short_rows)
    return {strategy.name: strategy for strategy in (*held_strategies(op, backward), split)}


FORWARD: dict[str, Strategy] = _strategies("rms_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("rms_norm_backward", backward=True)
