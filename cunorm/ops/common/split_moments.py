"""The launches of partition/split_moments.cu: mean and rstd of slices that several blocks sweep, for `split`."""

from __future__ import annotations

from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Tile

from .building_blocks import RESIDENT_REGISTERS, WARP, blocks_for, moments_bytes, round_up
from .geometry import sweep_shared


def moments_launches(
    problem: Problem, tile: Tile, sizes: tuple[int, int, int, int, int, int], layout: str, blocks: int
) -> tuple[Launch, ...]:
    """The sweep of x, and the fold of its parts.

    Parameters
    ----------
    problem : Problem
    tile : Tile
    sizes : tuple of int
        N, C, HxW and groups as the kernels see them, elements of a chunk, and chunks.
    layout : str
        That the kernels are compiled for.
    blocks : int
        Of the sweep.
    """
    N, C, HxW, groups, chunk, chunks = sizes
    moments, channels = moments_bytes(problem), C // groups
    parts = N * chunks * C * moments
    sweep = Launch(
        "split_moments",
        "split_moments",
        blocks,
        tile.threads,
        ("x", "workspace", N, C, HxW, chunk, chunks),
        shared_bytes=sweep_shared(layout, problem, tile, moments),
        traffic=problem.nbytes + parts,
        registers=RESIDENT_REGISTERS,
        layout=layout,
        takes_tile=False,
    )
    fold = Launch(
        "split_moments",
        "split_moments_fold",
        blocks_for(N * groups),
        tile.threads,
        ("workspace", "mean", "rstd", N, C, HxW, groups, chunk, chunks, "eps"),
        shared_bytes=round_up(tile.threads // WARP * moments, 16),
        traffic=parts,
        registers=RESIDENT_REGISTERS,
        phases=1 + channels * chunks // tile.threads,  # a block's threads wait for one part after another
        layout=layout,
        takes_tile=False,
    )
    return sweep, fold
