"""Shared parts of the ops' oracles: the part of a large problem that they check, and tensors with channels second."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.problem import Problem

#: Most elements of x for which the oracle checks all groups, channels or rows. Of a larger problem it checks some.
WHOLE = 2**24


def looked_at(problem: Problem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the groups that the oracle checks, and their channels.

    Several groups are evenly spread, and include the first and the last. A single group is the last.
    """
    most = WHOLE // max(1, problem.N * problem.group_length)
    count = min(problem.group, max(1, most))
    groups = np.unique(np.linspace(0, problem.group - 1, count).round().astype(np.intp))
    if count == 1:
        groups = np.array([problem.group - 1])
    inside = np.arange(problem.group_channels)
    return groups, (groups[:, None] * problem.group_channels + inside).reshape(-1)


def channels_second(problem: Problem, values: NDArray[Any]) -> NDArray[Any]:
    """Return an array in memory order as (N, C, HxW)."""
    if problem.layout == "NHWC":
        return np.moveaxis(values.reshape(problem.N, problem.HxW, problem.C), -1, 1)
    return values.reshape(problem.N, problem.C, problem.HxW)
