"""Strategy `split` of LayerNorm's forward. That of its gradients is `StripGradients` in ``ops/common/strips.py``."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.locks import lazy
from cunorm.core.strategy import Launch, by_name, ceil_div, refuses_threads
from cunorm.ops.common.limits import refuses_resident
from cunorm.ops.common.slab_sweep import Sweep, refuses_chunk
from cunorm.ops.common.split_moments import moments_launches
from cunorm.ops.common.strips import STRIPS_SPACE, Strips, from_h, join_launches

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
            traffic=2 * problem.nbytes,
            reread=problem.nbytes,
            packs=self.processed,
            registers=self.registers,
            phases=ceil_div(problem.N, self.bands),
        )
        return (*join_launches(problem), *from_h(problem, *moments_launches(problem, self.moments, 1), apply))
