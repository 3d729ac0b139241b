"""The launches of partition/split_moments.cu: mean and rstd of slices that several blocks sweep, for `split`."""

from __future__ import annotations

from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, by_name

from .building_blocks import RESIDENT_REGISTERS, WARP, blocks_for, round_up
from .geometry import Sweep


def moments_launches(problem: Problem, sweep: Sweep, groups: int) -> tuple[Launch, ...]:
    """The sweep of x, and the fold of its parts.

    Parameters
    ----------
    problem : Problem
    sweep : Sweep
        Of x, as the kernels see it.
    groups : int
        In its channels.
    """
    moments, channels, warps = problem.moments, sweep.C // groups, sweep.threads // WARP
    parts = sweep.N * sweep.chunks * sweep.C * moments
    first = Launch(
        "split_moments",
        "split_moments",
        blocks_for(sweep.items),
        sweep.threads,
        {**by_name("x", "workspace"), **sweep.arguments, "items": sweep.items},
        shared_bytes=sweep.shared(moments),
        traffic=problem.nbytes + parts,
        registers=RESIDENT_REGISTERS,
        layout=sweep.layout,
        takes_tile=False,
    )
    fold = Launch(
        "split_moments",
        "split_moments_fold",
        blocks_for(sweep.N * groups),
        sweep.threads,
        {**by_name("workspace", "mean", "rstd", "eps"), **sweep.arguments, "groups": groups},
        shared_bytes=round_up(warps * moments, 16),
        traffic=parts,
        registers=RESIDENT_REGISTERS,
        phases=1 + channels * sweep.chunks // sweep.threads,  # a block's threads wait for one part after another
        layout=sweep.layout,
        takes_tile=False,
    )
    return first, fold
