"""Public functions of RMSNorm. Their checks are in op.py, and their strategies in strategies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cunorm.core.arrays import Array, epsilon
from cunorm.core.strategy import Tile
from cunorm.runtime.op import perform, typed

from .op import RMS_NORM, RMS_NORM_BACKWARD, offset

#: The default mask of the gradients.
BOTH = (True, True)


def rms_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    gamma: Array | None = None,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    gamma_offset: float = 0.0,
    y_dtype: object = None,
    out: tuple[Array | None, ...] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, ...]:
    r"""RMSNorm: scale each row of the trailing dimensions to a root mean square of 1.

    .. math:: y = (\gamma_i + \mathrm{gamma\_offset}) \, x \, \mathrm{rstd}, \qquad
              \mathrm{rstd} = 1 / \sqrt{\tfrac{1}{L} \sum x^2 + \epsilon}

    The mean square is over a row of L elements (Zhang and Sennrich, 2019). No mean is computed. With a residual,
    h = x + residual replaces x.

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (A1..Ai, R1..Rj); rank 1 to 8. Dtype float16, bfloat16, float32 or float64. A contiguous array is read in
        place. Any other array is copied once.
    normalized_shape : int or sequence of int
        Last sizes of x, (R1..Rj), which make up a row.
    gamma : array of shape normalized_shape, optional
        Scale, in the dtype of x or of the statistics, or in 16 bits for float32 x. Without it the scale is 1, whatever
        ``gamma_offset``.
    eps : float
        Number that is added to the mean square; not negative. Unless x is float64, it is 0 or in the range of float32.
    residual : array, optional
        Shape and dtype of x. It is added to x in the same pass.
    gamma_offset : float
        Number that is added to gamma in the accumulator's precision. 1 is the (1 + gamma) of Gemma.
    y_dtype : str or dtype, optional
        Dtype of y: that of x, which None means too, or float32 for 16-bit x. y is then not rounded.
    out : tuple of (y, rstd), or (y, rstd, h) with a residual, optional
        Arrays for the results. A result whose entry is None is allocated. y may be x itself if it has
        x's dtype, and h the residual itself.
    tile : Tile or mapping, optional
        Strategy and tile fields that replace the automatic choice.
    workspace : array, optional
        Contiguous array of at least ``plan.workspace_nbytes`` bytes. Its content does not matter and is overwritten.

    Returns
    -------
    y : array
        Shape of x. Dtype of x, or ``y_dtype``.
    rstd : array of shape (A1..Ai, 1..1)
        Dtype float32 (float64 for float64 x). NaN if the sum of squares is not finite in that dtype.
    h : array
        Only with a residual: x + residual, rounded once to the dtype of x. rstd and y are those of the rounded h.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype.
    ValueError
        If a shape or a size is invalid, or if arrays overlap or are on different devices.
    UnsupportedTile
        If ``tile`` is not legal for the problem on the device.
    CompileError
        If a kernel does not compile.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 1, 1, 1], [0, 0, 0, 4]], dtype=np.float32)
    >>> y, rstd = cunorm.rms_norm(x, normalized_shape=4)
    >>> y.round(3)
    array([[1., 1., 1., 1.],
           [0., 0., 0., 2.]], dtype=float32)
    >>> y, rstd, h = cunorm.rms_norm(x, 4, residual=np.ones_like(x))
    >>> h
    array([[2., 2., 2., 2.],
           [1., 1., 1., 5.]], dtype=float32)
    """
    results: tuple[Array, ...] = perform(
        RMS_NORM,
        (x, gamma, residual),
        (normalized_shape, y_dtype),
        out,
        tile,
        workspace,
        (epsilon(eps), offset(gamma_offset)),
        (typed(normalized_shape), y_dtype),
    )
    return results


def rms_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    rstd: Array,
    gamma: Array | None = None,
    *,
    dh: Array | None = None,
    gamma_offset: float = 0.0,
    output_mask: Sequence[bool] = BOTH,
    out: tuple[Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array | None, Array | None]:
    r"""Gradients of RMSNorm.

    .. math::

        g_i = (\gamma_i + \mathrm{gamma\_offset}) \, dy, \qquad
        dx = \mathrm{rstd}\,(g_i - \hat x\,B/L) + dh, \qquad d\gamma_i = \sum_{rows} dy\,\hat x

    Here :math:`\hat x = x \, \mathrm{rstd}`. B is the sum of :math:`g_i\,\hat x` over a row of L elements. These are
    the gradients of LayerNorm without the terms of the mean.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (A1..Ai, R1..Rj); rank 1 to 8. dy and x have the same shape and dtype. If the forward had a residual, x is
        its h.
    normalized_shape : int or sequence of int
        Last sizes of x, (R1..Rj), which make up a row.
    rstd : array
        Statistics that `rms_norm` returned. Shape (A1..Ai, 1..1), or any shape with one element per row. Dtype float32
        (float64 for float64 x) or the dtype of x.
    gamma : array of shape normalized_shape, optional
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x.
    dh : array, optional
        Shape and dtype of x: the gradient that reaches h past the norm. It is added to dx in the same pass; dx is then
        the gradient of x and of the residual alike.
    gamma_offset : float
        See `rms_norm`.
    output_mask : sequence of 2 bools
        Which of dx and dgamma are wanted. The others are not computed and are returned as None.
    out : tuple of (dx, dgamma), optional
        Arrays for the results. A result whose entry is None is allocated. dx may be dy itself.
    tile, workspace
        See `rms_norm`.

    Returns
    -------
    dx : array or None
        Shape and dtype of x.
    dgamma : array of shape normalized_shape, or None
        Dtype of gamma, or of the statistics if gamma is absent.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 1, 1, 1], [0, 0, 0, 4]], dtype=np.float32)
    >>> y, rstd = cunorm.rms_norm(x, normalized_shape=4)
    >>> dy = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=np.float32)
    >>> dx, dgamma = cunorm.rms_norm_backward(dy, x, 4, rstd)
    >>> dx.round(3)
    array([[ 0.75, -0.25, -0.25, -0.25],
           [ 0.  ,  0.5 ,  0.  ,  0.  ]], dtype=float32)
    >>> dgamma.round(3)
    array([1., 0., 0., 0.], dtype=float32)
    """
    key = (typed(normalized_shape), output_mask if output_mask is BOTH else typed(output_mask))
    results: tuple[Array | None, Array | None] = perform(
        RMS_NORM_BACKWARD,
        (dy, x, rstd, gamma, dh),
        (normalized_shape, output_mask),
        out,
        tile,
        workspace,
        (offset(gamma_offset),),
        key,
    )
    return results
