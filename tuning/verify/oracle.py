"""The results that the float64 oracle computes from a problem's inputs, and the tolerance of each result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm.core.problem import Problem
from cunorm.ops.common import tolerance

from .inputs import Inputs, Values


@dataclass(frozen=True)
class Expected:
    """A result of the oracle.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Shape of the whole result in the oracle's axis order.
    part : tuple
        Index of the part that is compared.
    exact, bound : ndarray
        The oracle's values of the part, and the maximum distance of a result from them before the result is rounded.
    dtype : str
    moved : bool
        Whether channels are last in memory.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[Any, ...]
    exact: Values
    bound: Values
    dtype: str
    moved: bool = False

    def looked_at(self, came: Values) -> Values:
        """The compared part of a result. `came` is the result as a flat array in memory order."""
        if self.moved:  # channels are last in memory, but second in the oracle's arrays
            N, C, HxW = self.shape
            came = np.moveaxis(came.reshape(N, HxW, C), -1, 1)
        return came.reshape(self.shape)[self.part]  # type: ignore[no-any-return]

    def fault(self, came: Values) -> str | None:
        """A sentence that says how a result is wrong, or None. `came` is a flat array in memory order."""
        return tolerance.fault(self.name, self.looked_at(came), self.exact, self.bound, self.dtype)

    def off(self, came: Values) -> float:
        """The largest error of a result divided by the largest exact value; it may be NaN.

        If the largest exact value is 0, the error is not divided. `came` is a flat array in memory order.
        """
        largest = float(np.max(np.abs(self.exact), initial=0.0))
        away = float(np.max(np.abs(self.looked_at(came).astype(np.float64) - self.exact), initial=0.0))
        return away / largest if largest else away


def expected(problem: Problem, given: Inputs) -> list[Expected]:
    """The expected results of a problem. For a large problem, only a part of each result is computed.

    Parameters
    ----------
    problem : Problem
    given : dict of str to ndarray
        Result of `inputs_of`.
    """
    spec, found = problem.spec, []
    for name, shape, part, exact, bound in spec.oracle(problem, given, problem.numbers):
        if name in problem.outputs:
            moved = problem.layout == "NHWC" and len(shape) == 3
            dtype = problem.dtype_of(name)
            found.append(Expected(name, shape, part, np.asarray(exact), np.asarray(bound), dtype, moved))
    return found
