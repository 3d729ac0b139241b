"""What the ops' oracles share: which part of a large problem they look at, and tensors with channels second."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.problem import Problem

#: Elements of x up to which the oracle looks at all groups, channels or rows; of a larger problem, at some of them.
WHOLE = 2**24


def looked_at(problem: Problem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The groups that the oracle looks at, evenly spread, first and last among them; and their channels."""
    most = WHOLE // max(1, problem.N * problem.group_length)
    count = min(problem.group, max(1, most))
    groups = np.unique(np.linspace(0, problem.group - 1, count).round().astype(np.intp))
    if count == 1:
        groups = np.array([problem.group - 1])
    inside = np.arange(problem.group_channels)
    return groups, (groups[:, None] * problem.group_channels + inside).reshape(-1)


def channels_second(problem: Problem, values: NDArray[Any]) -> NDArray[Any]:
    """(N, C, HxW) from an array as it lies in memory."""
    if problem.layout == "NHWC":
        return np.moveaxis(values.reshape(problem.N, problem.HxW, problem.C), -1, 1)
    return values.reshape(problem.N, problem.C, problem.HxW)
