"""The arrays, the naive definition and the finite differences with which the oracle is compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

EPS = 1e-3
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def make(shape: tuple[int, ...], layout: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Random dy, x, gamma and beta in float64, without special values."""
    rng = np.random.default_rng(seed)
    channels = shape[1 if layout == "NCHW" else -1]
    return (
        rng.normal(size=shape),
        rng.normal(size=shape) * 1.5 + 0.7,
        rng.uniform(0.5, 2.0, channels),
        rng.normal(size=channels),
    )


def naive(x: Any, groups: int, gamma: Any, beta: Any, eps: float, layout: str) -> tuple[Any, Any, Any]:
    """y, mean and rstd by the definition, computed element by element."""
    size = x.shape[1 if layout == "NCHW" else -1] // groups
    y, mean, rstd = np.empty_like(x), np.empty((x.shape[0], groups)), np.empty((x.shape[0], groups))
    axis = 1 if layout == "NCHW" else x.ndim - 1
    for n, g in itertools.product(range(x.shape[0]), range(groups)):
        members = [i for i in np.ndindex(x.shape) if i[0] == n and i[axis] // size == g]
        elements = [float(x[i]) for i in members]
        average = sum(elements) / len(elements)
        variance = sum((e - average) ** 2 for e in elements) / len(elements)
        mean[n, g], rstd[n, g] = average, (variance + eps) ** -0.5
        for i in members:
            y[i] = (x[i] - average) * rstd[n, g] * gamma[i[axis]] + beta[i[axis]]
    return y, mean, rstd


def differences(function: Callable[[Any], float], at: Any, step: float = 1e-5) -> Any:
    """Central finite differences of a scalar function of an array."""
    result = np.empty_like(at)
    for i in np.ndindex(at.shape):
        moved = at.copy()
        moved[i] = at[i] + step
        above = function(moved)
        moved[i] = at[i] - step
        result[i] = (above - function(moved)) / (2 * step)
    return result


def disagreements(loss: Callable[..., float], leaves: list[Any], got: tuple[Any, ...]) -> set[str]:
    """The names of the gradients in `got` that disagree with finite differences of the loss.

    `leaves` are x, gamma and beta, the arguments of the loss; `got` are dx, dgamma and dbeta.
    """
    # The error of central differences is step^2 / 6 times a third derivative (some tens if a slice has little spread),
    # plus the rounding error 1e-16 * loss / step: at most 5e-10.
    failures = set()
    for i, (name, ours) in enumerate(zip(("dx", "dgamma", "dbeta"), got, strict=True)):
        theirs = differences(lambda moved, i=i: loss(*leaves[:i], moved, *leaves[i + 1 :]), leaves[i])
        if not np.allclose(ours, theirs, rtol=1e-8, atol=1e-8):
            failures.add(name)
    return failures


def broken(mistake: str) -> Callable[..., tuple[Any, Any, Any]]:
    """A group_norm_backward for NCHW that contains one mistake."""

    def backward(dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any, *, num_groups: int, **_: Any) -> Any:
        shape = (x.shape[0], num_groups, -1)
        scale = rstd[..., None]
        xhat = (x.reshape(shape) - mean[..., None]) * scale
        weights = np.ones_like(gamma) if mistake == "no gamma" else gamma
        dxhat = (dy * weights.reshape(1, -1, *[1] * (x.ndim - 2))).reshape(shape)
        length = dxhat.shape[-1] - (mistake == "L - 1")
        dx = dxhat.copy()
        if mistake != "no mean term":
            dx -= dxhat.sum(-1, keepdims=True) / length
        if mistake != "no xhat term":
            dx -= xhat * (dxhat * xhat).sum(-1, keepdims=True) / length
        if mistake != "no rstd":
            dx = dx * scale
        axes = (0, *range(2, x.ndim))
        dgamma, dbeta = (dy * xhat.reshape(x.shape)).sum(axes), dy.sum(axes)
        if mistake == "dgamma halved":
            dgamma *= 0.5
        if mistake == "dgamma not centred":
            dgamma = (dy * (x.reshape(shape) * scale).reshape(x.shape)).sum(axes)
        if mistake == "dbeta of one sample":
            dbeta = dy[:1].sum(axes)
        return dx.reshape(x.shape), dgamma, dbeta

    return backward


def check_dtype(function: Callable[..., list[Any]], arrays: Iterable[Any], dtype: Any) -> None:
    """Check that a function of the oracle computes in float64, whatever the dtype, and leaves its arguments alone."""
    given = [array.astype(dtype) for array in arrays]
    before = [array.tobytes() for array in given]
    for ours, theirs in zip(function(*given), function(*(one.astype(np.float64) for one in given)), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, theirs)
    assert [array.tobytes() for array in given] == before
