r"""The oracle: normalisation forward and backward in float64 NumPy, written for clarity and exactness, not for speed.

The notation is that of the kernels. A slice is the L elements that share one mean and one rstd. The normalised element
xhat is (x - mean) * rstd.

- GroupNorm: x has N samples, C channels and H*W positions. A slice is a group of C/G neighbouring channels of a sample,
  L = (C/G)*H*W. gamma and beta have one element per channel.
- InstanceNorm: GroupNorm with one channel per group. A slice is a channel of one sample, L = H*W.
- LayerNorm: x has shape (A1..Ai, R1..Rj). A slice is a row, L = R1*..*Rj. gamma and beta have one element per element
  of a row.
- RMSNorm: as LayerNorm, but without mean and beta. xhat is x * rstd, and gamma may have an offset.
- BatchNorm: x has shape (N, C, \*) and 2 to 8 dimensions. A slice is a channel. It has L = N*H*W elements on one rank,
  and `count` elements on all ranks. rstd is called invstd, and x - mean is called xmu. gamma, beta and every statistic
  have shape (C,).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_elemt",
    "batch_norm_gather_stats",
    "batch_norm_stats",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]

Array: TypeAlias = npt.ArrayLike
Maybe: TypeAlias = npt.ArrayLike | None
Shape: TypeAlias = int | tuple[int, ...]
Float64: TypeAlias = npt.NDArray[np.float64]

# After a division by zero or an overflow, the kernels return NaN or infinity. So does the oracle, without a warning.
_quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore")


@_quiet
def group_norm(
    x: Array,
    num_groups: int,
    gamma: Maybe = None,
    beta: Maybe = None,
    *,
    eps: float = 1e-5,
    data_format: str = "NCHW",
    activation: str | None = None,
) -> tuple[Float64, Float64, Float64]:
    r"""Group normalisation.

    .. math::
        mean = \frac{1}{L} \sum x, \quad
        rstd = \left(\frac{1}{L} \sum (x - mean)^2 + eps\right)^{-1/2}, \quad
        y = (x - mean) \cdot rstd \cdot \gamma_c + \beta_c

    Parameters
    ----------
    x : array_like
        (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; 2 to 8 dimensions, any real dtype.
    num_groups : int
        G, a divisor of C.
    gamma, beta : array_like, optional
        C elements each. None: ones for gamma, zeros for beta.
    eps : float
        Added to the variance.
    data_format : {"NCHW", "NHWC"}
        Position of the channels.
    activation : {None, "silu"}
        Function that is applied to y.

    Returns
    -------
    y : ndarray
        Float64, same shape as `x`.
    mean, rstd : ndarray
        Float64, (N, G). NaN if a slice has no elements. The variance of a constant slice is exactly 0.

    Raises
    ------
    ValueError
        If x has less than 2 or more than 8 dimensions, gamma or beta has another number of elements than C,
        num_groups is no divisor of C, or data_format or activation is none of the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> y, mean, rstd = reference.group_norm(np.arange(8.0).reshape(1, 4, 2), 2)
    >>> mean
    array([[1.5, 5.5]])
    """
    _check_activation(activation)
    values = _slices(x, data_format)
    samples, channels, positions = values.shape
    grouped = values.reshape(samples, num_groups, _group_size(channels, num_groups) * positions)
    mean, rstd = _moments(grouped, eps)
    z = before(x, mean, rstd, gamma, beta, num_groups, data_format)
    return z if activation is None else silu(z), mean[:, :, 0], rstd[:, :, 0]


@_quiet
def group_norm_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    gamma: Maybe = None,
    *,
    num_groups: int,
    beta: Maybe = None,
    data_format: str = "NCHW",
    activation: str | None = None,
) -> tuple[Float64, Float64, Float64]:
    r"""Gradients of group normalisation, from the statistics that the forward returned.

    .. math::
        d\beta_c = \sum_{n, hw} dy, \quad
        d\gamma_c = \sum_{n, hw} dy \cdot \hat{x}, \quad
        dx = rstd \cdot \left(\gamma_c \cdot dy - \frac{A}{L} - \hat{x} \cdot \frac{B}{L}\right)

    with :math:`A = \sum \gamma_c \cdot dy` and :math:`B = \sum \gamma_c \cdot dy \cdot \hat{x}` over the group.

    Parameters
    ----------
    dy, x : array_like
        Gradient of y, and input of the forward. Both have shape (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``.
    mean, rstd : array_like
        N*G elements each. They are used unchanged, even if they were rounded to another dtype.
    gamma, num_groups, data_format, activation
        See `group_norm`. With an activation, silu'(z) * dy replaces dy, where z is the forward's y before the
        activation.
    beta : array_like, optional
        C elements. Used only with an activation. None: zeros.

    Returns
    -------
    dx : ndarray
        Float64, same shape as `x`.
    dgamma, dbeta : ndarray
        Float64, (C,). Zeros if there are no elements to sum.

    Raises
    ------
    ValueError
        If a shape, a number of elements or an option differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.arange(8.0).reshape(1, 4, 2)
    >>> y, mean, rstd = reference.group_norm(x, 2)
    >>> dx, dgamma, dbeta = reference.group_norm_backward(np.ones_like(x), x, mean, rstd, num_groups=2)
    >>> dbeta
    array([2., 2., 2., 2.])
    """
    _check_activation(activation)
    dy = _shaped_as(dy, x)
    if activation is not None:
        dy = silu_gradient(before(x, mean, rstd, gamma, beta, num_groups, data_format), dy)
    values, grads = _slices(x, data_format), _slices(dy, data_format)
    samples, channels, positions = values.shape
    shape = (samples, num_groups, _group_size(channels, num_groups) * positions)
    scale = _given(rstd, (samples, num_groups, 1), "rstd")
    xhat = (values.reshape(shape) - _given(mean, (samples, num_groups, 1), "mean")) * scale
    dxhat = (grads * _given(gamma, (channels, 1), "gamma", 1.0)).reshape(shape)
    dx = scale * (dxhat - _mean(dxhat) - xhat * _mean(dxhat * xhat))
    dgamma, dbeta = _by_channel(grads * xhat.reshape(values.shape)).sum(axis=1), _by_channel(grads).sum(axis=1)
    return _like(dx.reshape(values.shape), x, data_format), dgamma, dbeta


def _check_activation(activation: object) -> None:
    if activation not in (None, "silu"):
        raise ValueError(f"activation: {activation!r}, expected None or 'silu'")


@_quiet
def before(x: Array, mean: Array, rstd: Array, gamma: Maybe, beta: Maybe, num_groups: int, data_format: str) -> Float64:
    """Return z = gamma * (x - mean) * rstd + beta: the y of GroupNorm before an activation."""
    values = _slices(x, data_format)
    samples, channels, positions = values.shape
    grouped = values.reshape(samples, num_groups, _group_size(channels, num_groups) * positions)
    centre, scale = (_given(one, (samples, num_groups, 1), name) for one, name in ((mean, "mean"), (rstd, "rstd")))
    z = ((grouped - centre) * scale).reshape(values.shape) * _given(gamma, (channels, 1), "gamma", 1.0)
    z += _given(beta, (channels, 1), "beta", 0.0)
    return _like(z, x, data_format)


@_quiet
def silu(z: Array) -> Float64:
    """z / (1 + exp(-z)) (Elfwing, Uchibe and Doya, 2018)."""
    values = np.asarray(z, np.float64)
    found: Float64 = values * _sigmoid(values)
    return found


@_quiet
def silu_gradient(z: Array, dy: Array) -> Float64:
    """dy * s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-z))."""
    values = np.asarray(z, np.float64)
    s = _sigmoid(values)
    found: Float64 = np.asarray(dy, np.float64) * (s * (1 + values * (1 - s)))
    return found


@_quiet
def instance_norm(
    x: Array, gamma: Maybe = None, beta: Maybe = None, *, eps: float = 1e-5, data_format: str = "NCHW"
) -> tuple[Float64, Float64, Float64]:
    r"""Instance normalisation (Ulyanov, Vedaldi and Lempitsky, 2016): a slice is a channel of a sample, L = H*W.

    .. math::
        mean_{n,c} = \frac{1}{L} \sum_{hw} x, \quad
        rstd_{n,c} = \left(\frac{1}{L} \sum_{hw} (x - mean)^2 + eps\right)^{-1/2}, \quad
        y = (x - mean) \cdot rstd \cdot \gamma_c + \beta_c

    Parameters
    ----------
    x, gamma, beta, eps, data_format
        See `group_norm`.

    Returns
    -------
    y : ndarray
        Float64, same shape as `x`.
    mean, rstd : ndarray
        Float64, (N, C). NaN if a slice has no elements.

    Raises
    ------
    ValueError
        If a shape, a number of elements or data_format differs from those of `group_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> y, mean, rstd = reference.instance_norm(np.arange(8.0).reshape(1, 4, 2))
    >>> mean
    array([[0.5, 2.5, 4.5, 6.5]])
    """
    values = _slices(x, data_format)
    mean, rstd = _moments(values, eps)
    column = (values.shape[1], 1)
    y = (values - mean) * rstd * _given(gamma, column, "gamma", 1.0) + _given(beta, column, "beta", 0.0)
    return _like(y, x, data_format), mean[:, :, 0], rstd[:, :, 0]


@_quiet
def instance_norm_backward(
    dy: Array, x: Array, mean: Array, rstd: Array, gamma: Maybe = None, *, data_format: str = "NCHW"
) -> tuple[Float64, Float64, Float64]:
    r"""Gradients of instance normalisation, from the statistics that the forward returned.

    .. math::
        d\beta_c = \sum_{n, hw} dy, \quad
        d\gamma_c = \sum_{n, hw} dy \cdot \hat{x}, \quad
        dx = rstd \cdot \gamma_c
             \left(dy - \frac{1}{L} \sum_{hw} dy - \frac{\hat{x}}{L} \sum_{hw} dy \cdot \hat{x}\right)

    Parameters
    ----------
    dy, x, gamma, data_format
        See `group_norm_backward`.
    mean, rstd : array_like
        N*C elements each.

    Returns
    -------
    dx : ndarray
        Float64, same shape as `x`.
    dgamma, dbeta : ndarray
        Float64, (C,). Zeros if there are no elements to sum.

    Raises
    ------
    ValueError
        If a shape, a number of elements or data_format differs from those of `group_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.arange(8.0).reshape(1, 4, 2)
    >>> y, mean, rstd = reference.instance_norm(x)
    >>> dx, dgamma, dbeta = reference.instance_norm_backward(np.ones_like(x), x, mean, rstd)
    >>> dbeta
    array([2., 2., 2., 2.])
    """
    values, grads = _slices(x, data_format), _slices(_shaped_as(dy, x), data_format)
    slices = (*values.shape[:2], 1)
    scale = _given(rstd, slices, "rstd")
    xhat = (values - _given(mean, slices, "mean")) * scale
    through = grads - _mean(grads) - xhat * _mean(grads * xhat)
    dx = scale * _given(gamma, (values.shape[1], 1), "gamma", 1.0) * through
    return _like(dx, x, data_format), _by_channel(grads * xhat).sum(axis=1), _by_channel(grads).sum(axis=1)


def layer_norm(
    x: Array,
    normalized_shape: Shape,
    gamma: Maybe = None,
    beta: Maybe = None,
    *,
    eps: float = 1e-5,
    residual: Maybe = None,
) -> tuple[Float64, ...]:
    """Layer normalisation: group normalisation of the rows with one group and one channel per element of a row.

    Parameters
    ----------
    x : array_like
        (A1..Ai, R1..Rj), any real dtype.
    normalized_shape : int or tuple of int
        (R1..Rj), or the integer R1.
    gamma, beta : array_like, optional
        Shape `normalized_shape`. None: ones for gamma, zeros for beta.
    eps : float
        Added to the variance.
    residual : array_like, optional
        Shape of `x`. h = x + residual, rounded to x's dtype, replaces x.

    Returns
    -------
    y : ndarray
        Float64, same shape as `x`.
    mean, rstd : ndarray
        Float64, (A1..Ai, 1..1). NaN if a row has no elements. The variance of a constant row is exactly 0.
    h : ndarray
        Float64, only with a residual.

    Raises
    ------
    ValueError
        If a shape differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> y, mean, rstd = reference.layer_norm(np.array([[1.0, 2, 3, 6]]), 4)
    >>> mean
    array([[3.]])
    """
    if residual is not None:
        h = joined(x, residual)
        return *layer_norm(h, normalized_shape, gamma, beta, eps=eps), h
    rows, shape = _rows(x, normalized_shape)
    y, *saved = group_norm(rows, 1, gamma, beta, eps=eps)
    kept = np.shape(x)[: np.ndim(x) - len(shape)] + (1,) * len(shape)
    return y.reshape(np.shape(x)), saved[0].reshape(kept), saved[1].reshape(kept)


def layer_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: Shape,
    mean: Array,
    rstd: Array,
    gamma: Maybe = None,
    *,
    dh: Maybe = None,
) -> tuple[Float64, Float64, Float64]:
    """Gradients of layer normalisation, from the statistics that the forward returned.

    Parameters
    ----------
    dy, x : array_like
        Gradient of y, and input of the forward, of one shape. If the forward had a residual, x is its h.
    normalized_shape : int or tuple of int
        (R1..Rj), the last sizes of x.
    mean, rstd : array_like
        One element per row each. They are used unchanged, even if they were rounded to another dtype.
    gamma : array_like, optional
        Shape `normalized_shape`. None: ones.
    dh : array_like, optional
        Shape of `x`: the gradient that reaches h past the norm. It is added to dx.

    Returns
    -------
    dx : ndarray
        Float64, same shape as `x`.
    dgamma, dbeta : ndarray
        Float64, shape `normalized_shape`. Zeros if there are no rows.

    Raises
    ------
    ValueError
        If a shape differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2, 3, 6]])
    >>> y, mean, rstd = reference.layer_norm(x, 4)
    >>> dx, dgamma, dbeta = reference.layer_norm_backward(np.ones_like(x), x, 4, mean, rstd)
    >>> dbeta
    array([1., 1., 1., 1.])
    """
    (rows, shape), (grads, _) = (_rows(each, normalized_shape) for each in (x, _shaped_as(dy, x)))
    dx, dgamma, dbeta = group_norm_backward(grads, rows, mean, rstd, gamma, num_groups=1)
    return _with(dx.reshape(np.shape(x)), dh), dgamma.reshape(shape), dbeta.reshape(shape)


@_quiet
def rms_norm(
    x: Array,
    normalized_shape: Shape,
    gamma: Maybe = None,
    *,
    eps: float = 1e-6,
    residual: Maybe = None,
    gamma_offset: float = 0.0,
) -> tuple[Float64, ...]:
    r"""RMS normalisation (Zhang and Sennrich, 2019) of the rows.

    .. math::
        rstd = \left(\frac{1}{L} \sum x^2 + eps\right)^{-1/2}, \quad y = x \cdot rstd \cdot (\gamma + gamma\_offset)

    Parameters
    ----------
    x : array_like
        (A1..Ai, R1..Rj).
    normalized_shape : int or tuple of int
        (R1..Rj).
    gamma : array_like, optional
        Shape `normalized_shape`. None: y = x * rstd, whatever the offset.
    eps : float
        Added to the mean square.
    residual : array_like, optional
        Shape of `x`. h = x + residual, rounded to x's dtype, replaces x.
    gamma_offset : float
        Added to gamma.

    Returns
    -------
    y : ndarray
        Float64, same shape as `x`.
    rstd : ndarray
        Float64, (A1..Ai, 1..1). If the mean square is not finite, rstd is NaN.
    h : ndarray
        Float64, only with a residual.

    Raises
    ------
    ValueError
        If a shape differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> y, rstd = reference.rms_norm(np.array([[3.0, 4, 3, 4]]), 4, eps=0)
    >>> rstd ** -2
    array([[12.5]])
    """
    if residual is not None:
        h = joined(x, residual)
        return *rms_norm(h, normalized_shape, gamma, eps=eps, gamma_offset=gamma_offset), h
    rows, shape = _rows(x, normalized_shape)
    values = rows.astype(np.float64)
    square = _mean(values**2)
    rstd = 1.0 / np.sqrt(np.where(np.isfinite(square), square, np.nan) + eps)
    kept = np.shape(x)[: np.ndim(x) - len(shape)] + (1,) * len(shape)
    y = values * rstd * _weight(gamma, math.prod(shape), gamma_offset)
    return y.reshape(np.shape(x)), rstd.reshape(kept)


@_quiet
def rms_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: Shape,
    rstd: Array,
    gamma: Maybe = None,
    *,
    dh: Maybe = None,
    gamma_offset: float = 0.0,
) -> tuple[Float64, Float64]:
    r"""Gradients of RMS normalisation, from the rstd that the forward returned.

    .. math::
        g = (\gamma + gamma\_offset) \cdot dy, \quad
        dx = rstd \cdot \left(g - \hat x \cdot \frac{1}{L} \sum g \hat x\right) + dh, \quad
        d\gamma = \sum_{rows} dy \cdot \hat x

    Parameters
    ----------
    dy, x, normalized_shape, gamma, dh
        See `layer_norm_backward`.
    rstd : array_like
        One element per row.
    gamma_offset : float
        Added to gamma, if there is one.

    Returns
    -------
    dx : ndarray
        Float64, same shape as `x`.
    dgamma : ndarray
        Float64, shape `normalized_shape`. Zeros if there are no rows.

    Raises
    ------
    ValueError
        If a shape differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[3.0, 4, 3, 4]])
    >>> y, rstd = reference.rms_norm(x, 4, eps=0)
    >>> dx, dgamma = reference.rms_norm_backward(x, x, 4, rstd)
    >>> bool(np.abs(dx).max() < 1e-12)
    True
    """
    (rows, shape), (grads, _) = (_rows(each, normalized_shape) for each in (x, _shaped_as(dy, x)))
    grads, factor = grads.astype(np.float64), _given(rstd, (len(rows), 1), "rstd")
    xhat, weighted = rows * factor, _weight(gamma, math.prod(shape), gamma_offset) * grads
    dx = factor * (weighted - xhat * _mean(weighted * xhat))
    dgamma = np.ascontiguousarray((grads * xhat).T).sum(axis=-1)
    return _with(dx.reshape(np.shape(x)), dh), dgamma.reshape(shape)


@_quiet
def joined(x: Array, residual: Array) -> Float64:
    """Return h = x + residual, rounded to x's dtype."""
    array: npt.NDArray[Any] = np.asarray(x)
    if np.shape(residual) != array.shape:
        raise ValueError(f"residual: shape {np.shape(residual)}, expected x's shape {array.shape}")
    h: Float64 = (array.astype(np.float64) + np.asarray(residual, np.float64)).astype(array.dtype).astype(np.float64)
    return h


def _with(dx: Float64, dh: Maybe) -> Float64:
    """Return dx + dh."""
    if dh is not None and np.shape(dh) != dx.shape:
        raise ValueError(f"dh: shape {np.shape(dh)}, expected x's shape {dx.shape}")
    return dx if dh is None else dx + np.asarray(dh, np.float64)


def _weight(gamma: Maybe, length: int, gamma_offset: float) -> Float64:
    """Return the factors of xhat in a row, or one factor of 1 without gamma."""
    given = _given(gamma, (length,), "gamma", 1.0)
    return given if gamma is None else given + gamma_offset


@_quiet
def batch_norm_stats(x: Array, *, eps: float = 1e-5) -> tuple[Float64, Float64]:
    r"""Mean and invstd of every channel on one rank.

    .. math::
        mean_c = \frac{1}{L} \sum_{n, hw} x, \quad
        invstd_c = \left(\frac{1}{L} \sum_{n, hw} (x - mean)^2 + eps\right)^{-1/2}

    Parameters
    ----------
    x : array_like
        (N, C, \*), 2 to 8 dimensions, any real dtype.
    eps : float
        Added to the variance, which is the biased one.

    Returns
    -------
    mean, invstd : ndarray
        Float64, (C,). NaN if there are no elements.

    Raises
    ------
    ValueError
        If x has less than 2 or more than 8 dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2], [3, 6], [5, 10]])
    >>> mean, invstd = reference.batch_norm_stats(x)
    >>> mean
    array([3., 6.])
    """
    mean, invstd = _moments(_by_channel(_slices(x)), eps)
    return mean[:, 0], invstd[:, 0]


@_quiet
def batch_norm_gather_stats(
    means: Array,
    invstds: Array,
    counts: Array,
    *,
    eps: float = 1e-5,
    running_mean: Maybe = None,
    running_var: Maybe = None,
    momentum: float = 0.1,
) -> tuple[Float64, Float64, Float64 | None, Float64 | None]:
    r"""Mean and invstd of all ranks together, and the new running mean and variance.

    .. math::
        w_r = \frac{count_r}{\sum count}, \quad
        var_r = \max(invstd_r^{-2} - eps, 0), \quad
        mean = \sum_r w_r \cdot mean_r

    .. math::
        var = \sum_r w_r \left(var_r + (mean_r - mean)^2\right), \quad
        invstd = (var + eps)^{-1/2}, \quad
        running' = (1 - momentum) \cdot running + momentum \cdot new

    new is mean, or the unbiased variance var * total / (total - 1); with a total count of at most 1, it is var.

    Parameters
    ----------
    means, invstds : array_like
        Statistics of the ranks, (world, C).
    counts : array_like
        Elements per channel of the ranks, (world,). A rank with count 0 is ignored, whatever its mean and invstd are.
    eps : float
        The same as in `batch_norm_stats`.
    running_mean, running_var : array_like, optional
        C elements each.
    momentum : float
        Weight of the new value in the running statistics.

    Returns
    -------
    mean, invstd : ndarray
        Float64, (C,). NaN if all counts are 0.
    running_mean, running_var : ndarray or None
        Float64, (C,): the new ones, or the old ones if all counts are 0. None if the old one is None.

    Raises
    ------
    ValueError
        If a shape differs from the above, or a count is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2], [3, 6], [5, 10]])
    >>> mean, invstd = reference.batch_norm_stats(x)
    >>> found = reference.batch_norm_gather_stats(mean[None], invstd[None], [3])
    >>> found[0]
    array([3., 6.])
    """
    mean_r, invstd_r, amounts = (np.asarray(each).astype(np.float64) for each in (means, invstds, counts))
    total = amounts.sum()
    if amounts.ndim != 1 or not (amounts >= 0).all():
        raise ValueError(f"counts: {amounts}, expected (world,) and nothing negative")
    for name, each in (("means", mean_r), ("invstds", invstd_r)):
        if each.ndim != 2 or each.shape != (amounts.size, mean_r.shape[1]):
            raise ValueError(f"{name}: shape {each.shape}, expected (world, C) with world = {amounts.size}")
    if total == 0:
        kept = (None if old is None else np.asarray(old).astype(np.float64) for old in (running_mean, running_var))
        nothing = np.full(mean_r.shape[1], np.nan)
        return nothing, nothing.copy(), next(kept), next(kept)
    mean_r, invstd_r, w = (each[amounts > 0] for each in (mean_r, invstd_r, amounts[:, None] / total))
    mean = (w * mean_r).sum(axis=0)
    mean = np.where(np.isfinite(mean), mean + (w * (mean_r - mean)).sum(axis=0), mean)  # see _moments
    var = (w * (np.maximum(invstd_r**-2.0 - eps, 0.0) + (mean_r - mean) ** 2)).sum(axis=0)
    new_mean = new_var = None
    if running_mean is not None:
        new_mean = (1.0 - momentum) * _given(running_mean, mean.shape, "running_mean") + momentum * mean
    if running_var is not None:
        unbiased = var * total / (total - 1) if total > 1 else var
        new_var = (1.0 - momentum) * _given(running_var, mean.shape, "running_var") + momentum * unbiased
    return mean, 1.0 / np.sqrt(var + eps), new_mean, new_var


@_quiet
def batch_norm_elemt(x: Array, mean: Array, invstd: Array, gamma: Maybe = None, beta: Maybe = None) -> Float64:
    r"""Batch normalisation with statistics that are passed: y = (x - mean) * invstd * gamma + beta.

    Parameters
    ----------
    x : array_like
        (N, C, \*), 2 to 8 dimensions, any real dtype.
    mean, invstd : array_like
        C elements each.
    gamma, beta : array_like, optional
        C elements each. None: ones for gamma, zeros for beta.

    Returns
    -------
    ndarray
        y, float64, same shape as `x`.

    Raises
    ------
    ValueError
        If a shape or a number of elements differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2], [3, 6], [5, 10]])
    >>> mean, invstd = reference.batch_norm_stats(x)
    >>> reference.batch_norm_elemt(x, mean, invstd)[1]
    array([0., 0.])
    """
    values = _slices(x)
    column = (values.shape[1], 1)
    y = (values - _given(mean, column, "mean")) * _given(invstd, column, "invstd") * _given(gamma, column, "gamma", 1.0)
    return _like(y + _given(beta, column, "beta", 0.0), x)


@_quiet
def batch_norm_backward_reduce(
    dy: Array, x: Array, mean: Array, invstd: Array, gamma: Maybe = None
) -> tuple[Float64, Float64, Float64, Float64]:
    r"""Sums of batch normalisation's gradients on one rank.

    .. math::
        sum\_dy_c = \sum_{n, hw} dy, \quad
        sum\_dy\_xmu_c = \sum_{n, hw} dy \cdot (x - mean), \quad
        d\gamma = sum\_dy\_xmu \cdot invstd, \quad
        d\beta = sum\_dy

    Parameters
    ----------
    dy, x : array_like
        Gradient of y, and input of the forward, both (N, C, \*), 2 to 8 dimensions.
    mean, invstd : array_like
        C elements each.
    gamma : array_like, optional
        Not used; it is here because the operator takes it.

    Returns
    -------
    sum_dy, sum_dy_xmu, dgamma, dbeta : ndarray
        Float64, (C,). Zeros if there are no elements to sum.

    Raises
    ------
    ValueError
        If a shape or a number of elements differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2], [3, 6], [5, 10]])
    >>> mean, invstd = reference.batch_norm_stats(x)
    >>> sum_dy, sum_dy_xmu, dgamma, dbeta = reference.batch_norm_backward_reduce(np.ones_like(x), x, mean, invstd)
    >>> sum_dy, sum_dy_xmu
    (array([3., 3.]), array([0., 0.]))
    """
    values, grads = _by_channel(_slices(x)), _by_channel(_slices(_shaped_as(dy, x)))
    sum_dy = grads.sum(axis=1)
    sum_dy_xmu = (grads * (values - _given(mean, (len(values), 1), "mean"))).sum(axis=1)
    scale = _given(invstd, sum_dy.shape, "invstd")
    dgamma = sum_dy_xmu * (scale if values.size else 0.0)  # without elements, invstd is NaN
    return sum_dy, sum_dy_xmu, dgamma, sum_dy.copy()


@_quiet
def batch_norm_backward_elemt(
    dy: Array, x: Array, mean: Array, invstd: Array, gamma: Maybe, sum_dy: Array, sum_dy_xmu: Array, count: Array
) -> Float64:
    r"""Gradient of batch normalisation's input on one rank, from the sums of all ranks.

    .. math::
        dx = \left(dy - \frac{sum\_dy}{count}
             - (x - mean) \cdot invstd^2 \cdot \frac{sum\_dy\_xmu}{count}\right) \cdot invstd \cdot \gamma_c

    Parameters
    ----------
    dy, x : array_like
        Gradient of y, and input of the forward, both (N, C, \*), 2 to 8 dimensions.
    mean, invstd : array_like
        C elements each.
    gamma : array_like or None
        C elements. None: ones.
    sum_dy, sum_dy_xmu : array_like
        Totals of all ranks, C elements each.
    count : array_like
        Elements per channel: the total, or that of each rank.

    Returns
    -------
    ndarray
        dx, float64, same shape as `x`.

    Raises
    ------
    ValueError
        If a shape or a number of elements differs from the above.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[1.0, 2], [3, 6], [5, 10]])
    >>> mean, invstd = reference.batch_norm_stats(x)
    >>> dy = np.ones_like(x)
    >>> sum_dy, sum_dy_xmu, dgamma, dbeta = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    >>> reference.batch_norm_backward_elemt(dy, x, mean, invstd, None, sum_dy, sum_dy_xmu, 3)[0]
    array([0., 0.])
    """
    values, grads = _slices(x), _slices(_shaped_as(dy, x))
    column = (values.shape[1], 1)
    scale = _given(invstd, column, "invstd")
    total = np.asarray(count).astype(np.float64).sum()
    a, b = (_given(s, column, n) / total for s, n in ((sum_dy, "sum_dy"), (sum_dy_xmu, "sum_dy_xmu")))
    dx = (grads - a - (values - _given(mean, column, "mean")) * scale**2 * b) * scale
    return _like(dx * _given(gamma, column, "gamma", 1.0), x)


def _sigmoid(z: Float64) -> Float64:
    found: Float64 = 1 / (1 + np.exp(-z))
    return found


def _slices(x: Array, data_format: str = "NCHW") -> Float64:
    """Return `x` as a contiguous float64 array of shape (N, C, H*W)."""
    array: npt.NDArray[Any] = np.asarray(x)
    if not 2 <= array.ndim <= 8:
        raise ValueError(f"x: {array.ndim} dimensions, expected 2 to 8")
    if data_format not in ("NCHW", "NHWC"):
        raise ValueError(f"data_format: {data_format!r}, expected 'NCHW' or 'NHWC'")
    if data_format == "NHWC":
        array = np.moveaxis(array, -1, 1)
    array = np.ascontiguousarray(array, dtype=np.float64)
    return array.reshape(array.shape[0], array.shape[1], math.prod(array.shape[2:]))


def _like(values: Float64, x: Array, data_format: str = "NCHW") -> Float64:
    """Reshape an array of shape (N, C, H*W) to the shape of `x`."""
    shape = np.shape(x)
    if data_format == "NCHW":
        return values.reshape(shape)
    back = values.reshape(shape[0], shape[-1], *shape[1:-1])
    return np.ascontiguousarray(np.moveaxis(back, 1, -1))


def _by_channel(values: Float64) -> Float64:
    """Rearrange (N, C, H*W) to a contiguous (C, N*H*W), which NumPy sums pairwise even if H*W is 1."""
    return np.ascontiguousarray(values.swapaxes(0, 1)).reshape(values.shape[1], values.shape[0] * values.shape[2])


def _rows(x: Array, normalized_shape: Shape) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """Return `x` in shape (rows, L), and the shape of a row."""
    array: npt.NDArray[Any] = np.asarray(x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    length = math.prod(shape)
    if not shape or not length or array.shape[-len(shape) :] != shape:
        raise ValueError(f"normalized_shape: {shape}, expected trailing dimensions of {array.shape}, not empty")
    return array.reshape(math.prod(array.shape[: array.ndim - len(shape)]), length), shape


def _shaped_as(dy: Array, x: Array) -> Array:
    """Return `dy` if it has the shape of `x`, else raise ValueError."""
    if np.shape(dy) != np.shape(x):
        raise ValueError(f"dy: shape {np.shape(dy)}, expected x's shape {np.shape(x)}")
    return dy


def _group_size(channels: int, num_groups: int) -> int:
    """Channels per group, C/G."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups: {num_groups}, expected a divisor of the {channels} channels")
    return channels // num_groups


def _mean(values: Float64) -> Float64:
    """Mean over the last axis, which is kept with length 1; NaN if it is empty."""
    mean: Float64 = values.sum(axis=-1, keepdims=True) / np.float64(values.shape[-1])
    return mean


def _moments(slices: Float64, eps: float) -> tuple[Float64, Float64]:
    """Mean and rstd over the last axis, which is kept with length 1."""
    mean = _mean(slices)
    # The mean of the differences from the first mean is the rounding error of the first mean. With this correction, the
    # mean of a constant slice is exactly the constant. A mean that is not finite is not corrected.
    mean = np.where(np.isfinite(mean), mean + _mean(slices - mean), mean)
    return mean, 1.0 / np.sqrt(_mean((slices - mean) ** 2) + eps)


def _given(parameter: Maybe, shape: tuple[int, ...], name: str, otherwise: float = math.nan) -> Float64:
    """Return a parameter in `shape`; for an absent one, a single element `otherwise` that broadcasts to it."""
    if parameter is None:
        return np.full((1,) * len(shape), otherwise)
    array: npt.NDArray[Any] = np.asarray(parameter)
    if array.size != math.prod(shape):
        raise ValueError(f"{name}: {array.size} elements, expected {math.prod(shape)}")
    return array.astype(np.float64).reshape(shape)
