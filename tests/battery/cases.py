"""Hostile problems of every strategy of every op. Together they reach every barrier, guard and branch of its kernels.

There are few tiles, because a build takes a second. Only the fields of a tile that are constants of its strategy need a
build. Shapes are small: a warp and a half of work, tails of every kind, slices that start off 16-byte boundaries,
one-element groups, enough partial rows that their fold takes several rounds, and grids smaller than the work.
"""

from __future__ import annotations

from collections import Counter

from tests.battery.batch_norm import batch_norm_cases, gather_cases
from tests.battery.case import Case
from tests.battery.group_norm import group_norm_cases
from tests.battery.instance_norm import instance_norm_cases
from tests.battery.layer_norm import layer_norm_cases, single_row_cases
from tests.battery.rms_norm import added_cases, rms_norm_cases
from tests.battery.wide_y import wide_cases

CASES: tuple[Case, ...] = (
    *group_norm_cases("group_norm"),
    *group_norm_cases("group_norm_backward"),
    *instance_norm_cases("instance_norm"),
    *instance_norm_cases("instance_norm_backward"),
    *layer_norm_cases("layer_norm"),
    *layer_norm_cases("layer_norm_backward"),
    *single_row_cases("layer_norm"),
    *added_cases("layer_norm"),
    *added_cases("layer_norm_backward"),
    *rms_norm_cases("rms_norm"),
    *rms_norm_cases("rms_norm_backward"),
    *wide_cases(),
    *gather_cases(),
    *(
        case
        for kind in ("stats", "elemt", "backward_reduce", "backward_elemt")
        for case in batch_norm_cases(f"batch_norm_{kind}")
    ),
)


def cases(op: str, strategy: str) -> list[Case]:
    """The cases of one strategy of one op."""
    return [case for case in CASES if (case.op, case.strategy) == (op, strategy)]


def with_few_builds(op: str, strategy: str) -> list[Case]:
    """The cases of a strategy that need no builds but one per kernel and layout, the one that most cases share.

    Compiling takes most of the time of the battery. These are about half of its cases, with a fifth of its builds.
    """
    found = [(case, case.builds) for case in cases(op, strategy)]
    shared = Counter(build for _, needed in found for build in needed)
    reached, taken = set(), set()
    for case, needed in sorted(found, key=lambda one: -min(shared[build] for build in one[1])):
        kernels = {(kernel, case.last) for kernel in case.kernels}
        if not kernels <= reached:
            reached |= kernels
            taken |= needed
    return [case for case, needed in found if needed <= taken]
