"""GroupNorm with an activation behind it, in float64: the oracle of what is fused. Proven as reference.py is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cunorm import reference

__all__ = ["before", "group_norm", "group_norm_backward", "silu", "silu_gradient"]

Float64 = NDArray[np.float64]


def _sigmoid(z: Float64) -> Float64:
    with np.errstate(over="ignore", invalid="ignore"):
        found: Float64 = 1 / (1 + np.exp(-z))
    return found


def silu(z: ArrayLike) -> Float64:
    """z / (1 + exp(-z)) (Elfwing, Uchibe and Doya, 2018)."""
    values = np.asarray(z, np.float64)
    with np.errstate(invalid="ignore"):
        return values * _sigmoid(values)


def silu_gradient(z: ArrayLike, dy: ArrayLike) -> Float64:
    """dy * s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-z))."""
    values = np.asarray(z, np.float64)
    s = _sigmoid(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(dy, np.float64) * (s * (1 + values * (1 - s)))


def _columns(parameter: Any, x: Float64, data_format: str, absent: float) -> Float64:
    """A parameter, or what stands for it, to stand beside x."""
    channel = 1 if data_format == "NCHW" else x.ndim - 1
    values = np.full(x.shape[channel], absent) if parameter is None else np.asarray(parameter, np.float64)
    return values.reshape([-1 if axis == channel else 1 for axis in range(x.ndim)])


def before(
    x: ArrayLike, mean: ArrayLike, rstd: ArrayLike, gamma: Any, beta: Any, num_groups: int, data_format: str
) -> Float64:
    """z = gamma * (x - mean) * rstd + beta, from given statistics."""
    values = np.asarray(x, np.float64)
    channel = 1 if data_format == "NCHW" else values.ndim - 1
    samples, channels = values.shape[0], values.shape[channel]
    shape = [samples if axis == 0 else channels if axis == channel else 1 for axis in range(values.ndim)]
    spread = [
        np.repeat(np.asarray(one, np.float64).reshape(samples, num_groups), channels // num_groups, 1).reshape(shape)
        for one in (mean, rstd)
    ]
    scaled = (values - spread[0]) * spread[1] * _columns(gamma, values, data_format, 1.0)
    found: Float64 = scaled + _columns(beta, values, data_format, 0.0)
    return found


def group_norm(
    x: ArrayLike, num_groups: int, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, data_format: str = "NCHW"
) -> tuple[Float64, Float64, Float64]:
    """As `cunorm.reference.group_norm`, and SiLU of its y."""
    z, mean, rstd = reference.group_norm(x, num_groups, gamma, beta, eps=eps, data_format=data_format)
    return silu(z), mean, rstd


def group_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    mean: ArrayLike,
    rstd: ArrayLike,
    gamma: Any = None,
    beta: Any = None,
    *,
    num_groups: int,
    data_format: str = "NCHW",
) -> tuple[Float64, Float64, Float64]:
    """The gradients through SiLU: those of `cunorm.reference.group_norm_backward` for silu'(z) * dy in place of dy."""
    z = before(x, mean, rstd, gamma, beta, num_groups, data_format)
    dz = silu_gradient(z, dy)
    options: dict[str, Any] = {"num_groups": num_groups, "data_format": data_format}
    return reference.group_norm_backward(dz, x, mean, rstd, gamma, **options)
