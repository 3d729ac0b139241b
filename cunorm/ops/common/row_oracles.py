"""The exact results of an op on rows: of some rows of a large problem, and sums over all rows, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core import settings
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem

from . import oracles

BLOCKS = 8  # most blocks of rows that are summed in parallel
#: Inputs of some rows, by name -> the exact results in result order, and their bounds.
OfRows = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], tuple[Any, ...]]]
_PARAMETERS = ("gamma", "beta")


def _rows_looked_at(problem: Problem) -> NDArray[np.intp]:
    """Return the rows whose tensors and statistics the oracle checks: evenly spread, with the first and the last."""
    count = min(problem.N, max(2, oracles.WHOLE // problem.C))
    return np.unique(np.linspace(0, problem.N - 1, count).round().astype(np.intp))


def expected_of_rows(problem: Problem, given: Mapping[str, Any], of_rows: OfRows) -> Iterator[Exact]:
    """Yield the exact results: tensors and statistics of some rows, and sums over all rows."""
    rows, length = problem.N, problem.C
    chosen = _rows_looked_at(problem)
    tall = {name: values.reshape(rows, -1) for name, values in given.items() if name not in _PARAMETERS}

    def some(part: Any) -> dict[str, Any]:
        return {**given, **{name: values[part] for name, values in tall.items()}}

    exact, bounds = of_rows(some(chosen))
    names = problem.spec.results_with(problem.extras)
    of_columns = [index for index, name in enumerate(names) if problem.spec.arrays[name].sizes == ("C",)]
    for index, name in enumerate(names):
        if index not in of_columns:
            shape = (rows, length) if name in problem.spec.tensors else (rows, 1)
            yield Exact(name, shape, (chosen,), exact[index], bounds[index])
    if not of_columns:
        return
    found = [(exact[index], bounds[index]) for index in of_columns]
    if len(chosen) < rows:
        found = _summed(rows, max(1, oracles.WHOLE // BLOCKS // length), of_columns, lambda part: of_rows(some(part)))
    for index, (values, bound) in zip(of_columns, found, strict=True):
        yield Exact(names[index], (length,), (), values, bound)


def _summed(rows: int, step: int, of_columns: list[int], results: Callable[[slice], Any]) -> list[Any]:
    """Return the sums over all rows of results and bounds, from blocks of ``step`` rows."""
    with ThreadPoolExecutor(min(BLOCKS, settings.cores())) as pool:  # NumPy releases the interpreter lock
        blocks = pool.map(results, [slice(start, start + step) for start in range(0, rows, step)])
        total: list[Any] = []
        for exact, bounds in blocks:  # in the order of the blocks, whichever ends first
            here = [(exact[index], bounds[index]) for index in of_columns]
            total = [(a + c, b + d) for (a, b), (c, d) in zip(total, here, strict=True)] if total else here
    return total
