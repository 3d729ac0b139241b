"""Float64 oracle of RMSNorm, and the tolerances of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem, accumulator
from cunorm.ops.common.row_oracles import expected_of_rows
from cunorm.ops.common.tolerance import FOLD, UNIT


def _weight(gamma: Any, gamma_offset: float) -> Any:
    """Return the magnitudes of the factors of xhat."""
    return 1.0 if gamma is None else np.abs(np.asarray(gamma, np.float64).reshape(1, -1) + gamma_offset)


def rms_forward(
    h: np.ndarray, gamma: Any, rstd: np.ndarray, gamma_offset: float, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of y and rstd before storage rounding. h has shape (rows, length). ``rstd`` is the oracle's.

    All terms of the mean square have one sign, so its relative error is that of the fold.
    """
    u = UNIT[accumulator(dtype)]
    rstd = rstd.reshape(-1, 1)
    return FOLD * u * np.abs(h) * rstd * _weight(gamma, gamma_offset), FOLD * u * rstd


def rms_backward(
    dy: Any, x: Any, rstd: Any, gamma: Any, dh: Any, gamma_offset: float, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of dx and dgamma before storage rounding. Tensors have shape (rows, length)."""
    u = UNIT[accumulator(dtype)]
    rstd = np.asarray(rstd, np.float64).reshape(-1, 1)
    xhat, dy = np.abs(np.asarray(x, np.float64) * rstd), np.abs(np.asarray(dy, np.float64))
    weighted = _weight(gamma, gamma_offset) * dy
    dx = FOLD * u * np.abs(rstd) * (weighted + xhat * (weighted * xhat).mean(axis=1, keepdims=True))
    if dh is not None:
        dx = dx + 2 * u * np.abs(np.asarray(dh, np.float64))
    return dx, FOLD * u * (dy * xhat).sum(axis=0)


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    """Yield the exact results: y, dx, rstd and h of some rows, and dgamma over all rows."""
    length, dtype, shift = problem.C, problem.dtype, numbers["gamma_offset"]

    def forward(rows: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, gamma, residual = rows["x"], rows.get("gamma"), rows.get("residual")
        exact = reference.rms_norm(x, length, gamma, eps=numbers["eps"], residual=residual, gamma_offset=shift)
        h = np.asarray(x, np.float64) if residual is None else exact[2]
        bounds = rms_forward(h, gamma, exact[1], shift, dtype)
        return exact, bounds if residual is None else (*bounds, np.zeros_like(h))

    def backward(rows: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        dy, x, rstd, gamma, dh = rows["dy"], rows["x"], rows["rstd"], rows.get("gamma"), rows.get("dh")
        exact = reference.rms_norm_backward(dy, x, length, rstd, gamma, dh=dh, gamma_offset=shift)
        return exact, rms_backward(dy, x, rstd, gamma, dh, shift, dtype)

    return expected_of_rows(problem, given, backward if problem.is_backward else forward)
