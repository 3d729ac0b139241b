"""The oracle: normalisation forward and backward in float64 NumPy, written for clarity and exactness, not for speed.

The notation is that of the kernels: x has N samples, C channels and H*W positions; a group has C/G neighbouring
channels, so one slice of statistics has L = (C/G)*H*W elements; gamma and beta are per channel;
xhat = (x - mean) * rstd.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["group_norm", "group_norm_backward"]

Float64: TypeAlias = npt.NDArray[np.float64]


def group_norm(
    x: npt.ArrayLike,
    num_groups: int,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    data_format: str = "NCHW",
) -> tuple[Float64, Float64, Float64]:
    r"""Group normalisation.

    .. math::
        mean = \frac{1}{L} \sum x, \quad
        rstd = \left(\frac{1}{L} \sum (x - mean)^2 + eps\right)^{-1/2}, \quad
        y = (x - mean) \cdot rstd \cdot \gamma_c + \beta_c

    Parameters
    ----------
    x : array_like
        (N, C, *), or (N, *, C) with ``data_format="NHWC"``; 2 to 8 dimensions, any real dtype.
    num_groups : int
        G, a divisor of C.
    gamma, beta : array_like, optional
        C elements each. None stands for ones and zeros.
    eps : float
        Added to the variance.
    data_format : {"NCHW", "NHWC"}
        Where the channels are.

    Returns
    -------
    y : ndarray
        Float64, of the shape of `x`.
    mean, rstd : ndarray
        Float64, (N, G). NaN where a slice has no elements. The variance of a constant slice is exactly 0.
    """
    values = _slices(x, data_format)
    samples, channels, positions = values.shape
    grouped = values.reshape(samples, num_groups, _group_size(channels, num_groups) * positions)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean = _mean(grouped)
        # The mean of what is left is the rounding error of the first mean: after this step a constant is its own mean.
        # A mean that is not finite stays what it is.
        mean = np.where(np.isfinite(mean), mean + _mean(grouped - mean), mean)
        centred = grouped - mean
        rstd = 1.0 / np.sqrt(_mean(centred * centred) + eps)
        y = (centred * rstd).reshape(values.shape) * _per_channel(gamma, channels, 1.0, "gamma")
        y += _per_channel(beta, channels, 0.0, "beta")
    return _like(y, x, data_format), mean[:, :, 0], rstd[:, :, 0]


def group_norm_backward(
    dy: npt.ArrayLike,
    x: npt.ArrayLike,
    mean: npt.ArrayLike,
    rstd: npt.ArrayLike,
    gamma: npt.ArrayLike | None = None,
    *,
    num_groups: int,
    data_format: str = "NCHW",
) -> tuple[Float64, Float64, Float64]:
    r"""Gradients of group normalisation, from the statistics that the forward saved.

    .. math::
        d\beta_c = \sum_{n, hw} dy, \quad
        d\gamma_c = \sum_{n, hw} dy \cdot \hat{x}, \quad
        dx = rstd \cdot \left(\gamma_c \cdot dy - \frac{A}{L} - \hat{x} \cdot \frac{B}{L}\right)

    with :math:`A = \sum \gamma_c \cdot dy` and :math:`B = \sum \gamma_c \cdot dy \cdot \hat{x}` over the group.

    Parameters
    ----------
    dy, x : array_like
        The gradient of y, and the forward's input; one shape, (N, C, *) or (N, *, C).
    mean, rstd : array_like
        N*G elements each, used as given (rounded ones included).
    gamma : array_like, optional
        C elements. None stands for ones.
    num_groups : int
        G, a divisor of C.
    data_format : {"NCHW", "NHWC"}
        Where the channels are.

    Returns
    -------
    dx : ndarray
        Float64, of the shape of `x`.
    dgamma, dbeta : ndarray
        Float64, (C,). Zeros where there is nothing to sum.
    """
    values, grads = _slices(x, data_format), _slices(dy, data_format)
    if np.shape(dy) != np.shape(x):
        raise ValueError(f"dy: shape {np.shape(dy)}, expected x's shape {np.shape(x)}")
    samples, channels, positions = values.shape
    length = _group_size(channels, num_groups) * positions
    shape = (samples, num_groups, length)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = _statistics(rstd, samples, num_groups, "rstd")
        xhat = (values.reshape(shape) - _statistics(mean, samples, num_groups, "mean")) * scale
        dxhat = (grads * _per_channel(gamma, channels, 1.0, "gamma")).reshape(shape)
        dx = scale * (dxhat - _mean(dxhat) - xhat * _mean(dxhat * xhat))
        dgamma = (grads * xhat.reshape(values.shape)).sum(axis=(0, 2))
        dbeta = grads.sum(axis=(0, 2))
    return _like(dx.reshape(values.shape), x, data_format), dgamma, dbeta


def _slices(x: npt.ArrayLike, data_format: str) -> Float64:
    """`x` in float64 as (N, C, H*W), contiguous."""
    array: npt.NDArray[Any] = np.asarray(x)
    if not 2 <= array.ndim <= 8:
        raise ValueError(f"x: {array.ndim} dimensions, expected 2 to 8")
    if data_format not in ("NCHW", "NHWC"):
        raise ValueError(f"data_format: {data_format!r}, expected 'NCHW' or 'NHWC'")
    if data_format == "NHWC":
        array = np.moveaxis(array, -1, 1)
    array = np.ascontiguousarray(array, dtype=np.float64)
    return array.reshape(array.shape[0], array.shape[1], math.prod(array.shape[2:]))


def _like(values: Float64, x: npt.ArrayLike, data_format: str) -> Float64:
    """(N, C, H*W) back in the shape of `x`."""
    shape = np.shape(x)
    if data_format == "NCHW":
        return values.reshape(shape)
    back = values.reshape(shape[0], shape[-1], *shape[1:-1])
    return np.ascontiguousarray(np.moveaxis(back, 1, -1))


def _group_size(channels: int, num_groups: int) -> int:
    """Channels of one group, C/G."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups: {num_groups}, expected a divisor of the {channels} channels")
    return channels // num_groups


def _mean(values: Float64) -> Float64:
    """Mean over the last axis, which stays; NaN where it is empty."""
    mean: Float64 = values.sum(axis=-1, keepdims=True) / np.float64(values.shape[-1])
    return mean


def _per_channel(parameter: npt.ArrayLike | None, channels: int, otherwise: float, name: str) -> Float64:
    """One of gamma and beta as (C, 1), or the one value that stands for a missing one."""
    if parameter is None:
        return np.full((1, 1), otherwise)
    array: npt.NDArray[Any] = np.asarray(parameter)
    if array.size != channels:
        raise ValueError(f"{name}: {array.size} elements, expected {channels}")
    return array.astype(np.float64).reshape(channels, 1)


def _statistics(statistic: npt.ArrayLike, samples: int, num_groups: int, name: str) -> Float64:
    """One of mean and rstd as (N, G, 1)."""
    array: npt.NDArray[Any] = np.asarray(statistic)
    if array.size != samples * num_groups:
        raise ValueError(f"{name}: {array.size} elements, expected {samples * num_groups}")
    return array.astype(np.float64).reshape(samples, num_groups, 1)
