"""The problems that the compile gate compiles tiles for: one for each op, strategy, dtype and layout."""

from __future__ import annotations

from dataclasses import replace

from cunorm.core.problem import ACTIVATIONS, ITEMSIZE, Problem, accumulator
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS

__all__ = ["demanding", "problem_for"]

#: Types that only some ops have, beside those of the tensors: sums and running statistics in the accumulator's.
OTHERS = {
    "batch_norm_gather_stats": ("running_mean_t", "running_var_t"),
    "batch_norm_backward_reduce": ("sum_dy_t", "sum_dy_xmu_t", "dgamma_t", "dbeta_t"),
    "batch_norm_backward_elemt": ("sum_t",),
}


def problem_for(op: str, strategy: str, dtype: str, layout: str, tile: Tile) -> Problem:
    """A problem that the tile takes, if the strategy takes that layout at all."""
    sums = accumulator(dtype)
    gamma = None if op in ("batch_norm_stats", "batch_norm_gather_stats") else dtype
    beta = dtype if op in ("group_norm", "layer_norm", "batch_norm_elemt") else None
    if op.startswith("layer_norm"):
        # As long rows as a team of the cluster holds, or the teams of all slabs: these have a row each.
        rows, length, packs = 256, 32, tile.as_dict().get("packs", 1) * (16 // ITEMSIZE[dtype])
        if strategy == "cluster":
            length = tile.cluster * tile.threads // tile.block_teams * packs
        elif strategy == "grid":
            rows, length = max(1, tile.threads // tile.lanes), tile.slabs * tile.lanes * packs
        sizes = (rows, length, 1, 1)
    elif op.startswith("batch_norm"):
        sizes = (8, 64, 1 if op == "batch_norm_gather_stats" else 64, 64)
    else:
        # As large a group as a warp's tile holds, of channels of one element where it takes several samples; else a
        # middling one.
        HxW, group, channels = 64, 32, 8
        if strategy == "warp":
            HxW, group = 1 if tile.samples > 1 else 2, 4
            channels = tile.lanes * tile.packs * (16 // ITEMSIZE[dtype]) // HxW
        sizes = (256, channels * group, HxW, group)
    others = tuple((name, sums) for name in OTHERS.get(op, ()))
    if op == "batch_norm_gather_stats":
        others += (("count_t", "int64"),)
    return Problem(op, dtype, gamma, beta, sums, layout, *sizes, OPS[op].results, others)


def demanding(problem: Problem) -> Problem:
    """The problem with what takes more registers: wide parameters, and an activation where its op has any."""
    sums = accumulator(problem.dtype)
    if problem.op.startswith("group_norm"):
        return replace(problem, activation=ACTIVATIONS[0], gamma_dtype=sums, beta_dtype=sums)
    if problem.op.startswith("layer_norm"):
        return replace(problem, gamma_dtype=sums, beta_dtype=problem.beta_dtype and sums)
    return problem
