"""The launches of partition/split_moments.cu: mean and rstd of slices that several blocks sweep, for `split`."""

from __future__ import annotations

from collections.abc import Mapping

from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Tile, by_name

from .building_blocks import RESIDENT_REGISTERS, WARP, blocks_for, moments_bytes, round_up
from .geometry import sweep_shared


def moments_launches(
    problem: Problem, tile: Tile, cut: Mapping[str, int], groups: int, layout: str, blocks: int
) -> tuple[Launch, ...]:
    """The sweep of x, and the fold of its parts.

    Parameters
    ----------
    problem : Problem
    tile : Tile
    cut : mapping of str to int
        N, C, HxW, chunk and chunks as the kernels see them.
    groups : int
    layout : str
        That the kernels are compiled for.
    blocks : int
        Of the sweep.
    """
    moments, channels = moments_bytes(problem), cut["C"] // groups
    parts = cut["N"] * cut["chunks"] * cut["C"] * moments
    sweep = Launch(
        "split_moments",
        "split_moments",
        blocks,
        tile.threads,
        {**by_name("x", "workspace"), **cut},
        shared_bytes=sweep_shared(layout, problem, tile, moments),
        traffic=problem.nbytes + parts,
        registers=RESIDENT_REGISTERS,
        layout=layout,
        takes_tile=False,
    )
    fold = Launch(
        "split_moments",
        "split_moments_fold",
        blocks_for(cut["N"] * groups),
        tile.threads,
        {**by_name("workspace", "mean", "rstd", "eps"), **cut, "groups": groups},
        shared_bytes=round_up(tile.threads // WARP * moments, 16),
        traffic=parts,
        registers=RESIDENT_REGISTERS,
        phases=1 + channels * cut["chunks"] // tile.threads,  # a block's threads wait for one part after another
        layout=layout,
        takes_tile=False,
    )
    return sweep, fold
