"""What the float64 oracle says of a problem's inputs: what a candidate has to get right."""

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
        Of the whole result as the oracle has it.
    part : tuple
        The index of what was looked at.
    exact, bound : ndarray
        The oracle's values of the part, and how far from them a result may lie before it is rounded.
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
        """The part of a result, flat as it lies in memory, that the oracle looks at."""
        if self.moved:  # channels last in memory, the oracle has them second
            N, C, HxW = self.shape
            came = np.moveaxis(came.reshape(N, HxW, C), -1, 1)
        return came.reshape(self.shape)[self.part]  # type: ignore[no-any-return]

    def fault(self, came: Values) -> str | None:
        """What is wrong with a result, flat as it lies in memory; None if nothing is."""
        return tolerance.fault(self.name, self.looked_at(came), self.exact, self.bound, self.dtype)

    def off(self, came: Values) -> float:
        """The share of the largest exact value that a result, flat as it lies in memory, is off by; it may be NaN."""
        largest = float(np.max(np.abs(self.exact), initial=0.0))
        away = float(np.max(np.abs(self.looked_at(came).astype(np.float64) - self.exact), initial=0.0))
        return away / largest if largest else away


def expected(problem: Problem, given: Inputs) -> list[Expected]:
    """What the results of a problem have to be; of a large one, a part of them.

    Parameters
    ----------
    problem : Problem
    given : dict of str to ndarray
        From `inputs_of`.
    """
    spec, found = problem.spec, []
    for name, shape, part, exact, bound in spec.oracle(problem, given, problem.numbers):
        if name in problem.outputs:
            moved = problem.layout == "NHWC" and len(shape) == 3
            dtype = problem.dtype_of(name)
            found.append(Expected(name, shape, part, np.asarray(exact), np.asarray(bound), dtype, moved))
    return found
