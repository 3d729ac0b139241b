"""Strategies of LayerNorm, forward and backward. The kernels are in kernels_cu.

In a problem of LayerNorm, N is the number of rows, C is the length of a row, and HxW and group are 1.
"""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Launch, Strategy, Tile, by_name, ceil_div, refuses_threads
from cunorm.ops.common.limits import refuses_resident
from cunorm.ops.common.rows import held_strategies, short_rows
from cunorm.ops.common.slab_sweep import Sweep, refuses_chunk
from cunorm.ops.common.split_moments import moments_launches
from cunorm.ops.common.strips import STRIPS_SPACE, StripGradients, Strips, from_h, join_launches

from .grid import GRID_SPACE, LayerGrid

SPLIT_SPACE = {**STRIPS_SPACE, "chunk": (1024, 4096, 16384, 65536)}


class LayerSplit(Strips):
    """Tiling of the forward: with a residual h, moments of chunks of a row, their fold, and y."""

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
        """Launches of h, the moments, their fold, and the second sweep."""
        problem = self.problem
        apply = Launch(
            "layer_norm_split",
            "layer_norm_split_apply",
            self.grid,
            self.tile.threads,
            {**by_name("x", "gamma", "beta", "y", "mean", "rstd"), **self.shape},
            traffic=problem.nbytes + problem.nbytes_of("y"),
            reread=problem.nbytes,
            packs=self.processed,
            registers=self.registers,
            phases=ceil_div(problem.N, self.bands),
        )
        return (*join_launches(problem), *from_h(problem, *moments_launches(problem, self.moments, 1), apply))


def _fills_slabs(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    """Example sizes whose rows fill the teams of all slabs, with one row per team."""
    return max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * tile.packs_per_thread * pack, 1, 1


def _strategies(op: str, backward: bool) -> dict[str, Strategy]:
    space = STRIPS_SPACE if backward else SPLIT_SPACE
    split = StripGradients if backward else LayerSplit
    made = (
        *held_strategies(op, backward),
        Strategy("grid", op, GRID_SPACE, ("threads", "lanes", "packs_per_thread"), LayerGrid, _fills_slabs),
        Strategy("split", op, space, ("threads", "packs_per_thread"), split, short_rows),
    )
    return {strategy.name: strategy for strategy in made}


FORWARD: dict[str, Strategy] = _strategies("layer_norm", backward=False)
BACKWARD: dict[str, Strategy] = _strategies("layer_norm_backward", backward=True)
