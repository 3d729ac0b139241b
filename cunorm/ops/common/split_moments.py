"""Launches of partition/split_moments.cu for `split`: mean and rstd of groups or rows that several blocks sweep."""

from __future__ import annotations

from cunorm.core.devices import WARP
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, by_name

from .limits import RESIDENT_REGISTERS, blocks_for, round_up
from .slab_sweep import Sweep


def moments_launches(problem: Problem, sweep: Sweep, groups: int) -> tuple[Launch, ...]:
    """Launches of the sweep of x and of the fold of its partial moments.

    Parameters
    ----------
    problem : Problem
    sweep : Sweep
        Sweep of x in the layout for which the kernels are compiled.
    groups : int
        Groups into which the channels of the sweep are divided.
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
        packs=sweep.processed,
        rounds=sweep.rounds,
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
        reread=parts,
        registers=RESIDENT_REGISTERS,
        phases=1 + channels * sweep.chunks // sweep.threads,  # a thread waits for one part after another
        layout=sweep.layout,
        takes_tile=False,
    )
    return first, fold
