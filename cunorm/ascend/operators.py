"""The Ascend operators GroupNormGrad and LayerNormGrad. They allocate and return their results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cunorm.core.arrays import (
    DTYPES,
    Array,
    dtype_name,
    flag,
    kind_of,
    mask,
    namespace,
    one_dtype,
    place_of,
    same_place,
    sized,
)
from cunorm.core.arrays import epsilon as check_epsilon
from cunorm.core.problem import ITEMSIZE, accumulator
from cunorm.executors.choose import capturing, on
from cunorm.ops.group_norm.api import group_norm_backward
from cunorm.ops.layer_norm.api import layer_norm_backward
from cunorm.runtime.checked_call import CAPTURED
from cunorm.runtime.checks import check_rank, like, parameter
from cunorm.runtime.op import EVERY

Three = tuple[Array | None, Array | None, Array | None]


def GroupNormGrad(
    dy: Array,
    mean: Array,
    rstd: Array,
    x: Array,
    gamma: Array | None,
    num_groups: int,
    data_format: str = "NCHW",
    dx_is_require: bool = True,
    dgamma_is_require: bool = True,
    dbeta_is_require: bool = True,
) -> Three:
    r"""Gradients of GroupNorm: `cunorm.group_norm_backward` with the operator's name and argument order.

    The operator's documents print dx with a term ``mean * rstd * gamma[...]``. This is an error in the documents: the
    gradient has no such term. `cunorm.group_norm_backward` documents the formula that is computed.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; 2 to 8 dimensions; the same shape and dtype: float16,
        bfloat16, float32 or float64.
    mean, rstd : array of shape (N, num_groups)
        Any shape with that number of elements is accepted. float32 (float64 for float64 x) or x's dtype.
    gamma : array of shape (C,) or None
        The dtype of mean. None means ones.
    num_groups : int
        A divisor of C.
    data_format : {"NCHW", "NHWC"}
    dx_is_require, dgamma_is_require, dbeta_is_require : bool
        Whether each result is computed.

    Returns
    -------
    dx : array or None
        Same shape and dtype as x.
    dgamma, dbeta : array of shape (C,) or None
        The dtype of mean.

    Raises
    ------
    TypeError, ValueError, CompileError
        See `cunorm.group_norm_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.ascend import GroupNormGrad
    >>> x = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    >>> mean, rstd = np.array([[1.5, 5.5]], np.float32), np.full((1, 2), 0.894, np.float32)
    >>> dx, dgamma, dbeta = GroupNormGrad(np.ones_like(x), mean, rstd, x, np.ones(4, np.float32), 2)
    >>> dbeta
    array([2., 2., 2., 2.], dtype=float32)
    """
    required = {
        "dx_is_require": dx_is_require,
        "dgamma_is_require": dgamma_is_require,
        "dbeta_is_require": dbeta_is_require,
    }
    wanted = tuple([flag(name, value) for name, value in required.items()])
    if gamma is not None:
        for name, array in (("x", x), ("mean", mean), ("gamma", gamma)):
            kind_of(name, array)
        dtype = dtype_name("x", x)
        dtype_name("mean", mean, (accumulator(dtype), dtype), f" for {dtype} x")
        one_dtype(("mean", mean), ("gamma", gamma))
    _not_capturing("cunorm.group_norm_backward", x)
    return group_norm_backward(
        dy, x, mean, rstd, gamma, num_groups=num_groups, output_mask=wanted, data_format=data_format
    )


def LayerNormGrad(
    dy: Array,
    x: Array,
    variance: Array,
    mean: Array,
    gamma: Array,
    output_mask: Sequence[bool] = EVERY,
    *,
    epsilon: float = 1e-5,
) -> Three:
    """Gradients of LayerNorm from a saved variance: `cunorm.layer_norm_backward` for ``1 / sqrt(variance + epsilon)``.

    The operator's own page prints rstd as ``1 / (variance + epsilon)``. The missing square root is an error in the
    page. This function computes rstd in float64. Both statistics are rounded once, to float32 (float64 for float64 x).

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        (A1..Ai, R1..Rj), rank 1 to 8; the same shape and dtype: float16, bfloat16, float32 or float64.
    variance, mean : array of shape (A1..Ai, 1..1)
        Any shape with one element per row is accepted. A dtype that is not narrower than x's.
    gamma : array of shape (R1..Rj)
        x's dtype or float32 (float64 for float64 x). The shape of gamma is the shape of a row.
    output_mask : sequence of 3 bools
        Which of pd_x, pd_gamma, pd_beta are computed.
    epsilon : float
        The epsilon of the forward; not negative.

    Returns
    -------
    pd_x : array or None
        Same shape and dtype as x.
    pd_gamma, pd_beta : array of gamma's shape and dtype, or None

    Raises
    ------
    TypeError, ValueError, CompileError
        See `cunorm.layer_norm_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.ascend import LayerNormGrad
    >>> x = np.array([[1, 2, 3, 6], [0, 0, 0, 4]], dtype=np.float32)
    >>> mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    >>> pd_x, pd_gamma, pd_beta = LayerNormGrad(np.ones_like(x), x, variance, mean, np.ones(4, np.float32))
    >>> pd_beta
    array([2., 2., 2., 2.], dtype=float32)
    """
    named = [("dy", dy), ("x", x), ("variance", variance), ("mean", mean), ("gamma", gamma)]
    for name, array in named:
        kind_of(name, array)
    kind, ordinal = same_place([named[1], *named])
    wanted = mask("output_mask", output_mask, ("pd_x", "pd_gamma", "pd_beta"))
    eps = check_epsilon(epsilon, "epsilon")
    dtype = dtype_name("x", x)
    like("dy", dy, x)
    wide = [name for name, itemsize in ITEMSIZE.items() if itemsize >= ITEMSIZE[dtype]]
    for name, array in named[2:4]:
        dtype_name(name, array, wide, f", no narrower than the {dtype} of x")
    check_rank(x.shape, 1)
    row = gamma.shape
    if 0 in row or not row or x.shape[-len(row) :] != row:
        raise ValueError(f"gamma: shape {row}, expected the last sizes of x with shape {x.shape}, none of them 0")
    parameter("gamma", gamma, row, dtype)
    outer = x.shape[: -len(row)]
    rows, saved = math.prod(outer), (*outer, *(1,) * len(row))
    for name, array in named[2:4]:
        sized(name, array, rows, f"{saved}, or any shape of {rows} elements")
    _not_capturing("cunorm.layer_norm_backward", x)
    xp = namespace(kind)
    with on(kind, ordinal), np.errstate(all="ignore"):
        # asarray, because a subclass of numpy.ndarray may define its own arithmetic.
        spread, centre = (xp.asarray(array).reshape(saved) for array in (variance, mean))
        rstd = 1 / xp.sqrt(spread.astype(np.float64) + eps)
        centre, rstd = (each.astype(DTYPES[accumulator(dtype)], copy=False) for each in (centre, rstd))
    return layer_norm_backward(dy, x, row, centre, rstd, gamma, output_mask=wanted)


def _not_capturing(instead: str, x: Array) -> None:
    """Raise ValueError during graph capture: these operators allocate memory."""
    kind_of("x", x)
    if capturing(*place_of(x)):
        raise ValueError(f"x: {CAPTURED}; call {instead} with out= and workspace=")
