"""Public functions of LayerNorm. Their checks are in op.py, and their strategies in strategies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cunorm.core.arrays import Array, epsilon
from cunorm.core.strategy import Tile
from cunorm.runtime.op import EVERY, perform, typed

from .op import LAYER_NORM, LAYER_NORM_BACKWARD


def layer_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    eps: float = 1e-5,
    residual: Array | None = None,
    y_dtype: object = None,
    out: tuple[Array | None, ...] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, ...]:
    r"""LayerNorm: normalise each row of the trailing dimensions.

    .. math:: y = \gamma_i \, (x - \mathrm{mean}) \, \mathrm{rstd} + \beta_i, \qquad
              \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \epsilon}

    The mean and the biased variance are over a row (Ba, Kiros and Hinton, 2016). With a residual, h = x + residual
    replaces x.

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (A1..Ai, R1..Rj); rank 1 to 8. Dtype float16, bfloat16, float32 or float64. A contiguous array is read in
        place. Any other array is copied once.
    normalized_shape : int or sequence of int
        Last sizes of x, (R1..Rj), which make up a row.
    gamma, beta : array of shape normalized_shape, optional
        Scale and offset, in the dtype of x or of the statistics, or in 16 bits for float32 x. An absent gamma is 1, and
        an absent beta is 0.
    eps : float
        Number that is added to the variance; not negative. Unless x is float64, it is 0 or in the range of float32.
    residual : array, optional
        Shape and dtype of x. It is added to x in the same pass.
    y_dtype : str or dtype, optional
        Dtype of y: that of x, which None means too, or float32 for 16-bit x. y is then not rounded.
    out : tuple of (y, mean, rstd), or (y, mean, rstd, h) with a residual, optional
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
    mean, rstd : array of shape (A1..Ai, 1..1)
        Dtype float32 (float64 for float64 x).
    h : array
        Only with a residual: x + residual, rounded once to the dtype of x. The statistics are those of the rounded h.

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
    >>> x = np.array([[1, 2, 3, 6], [0, 0, 0, 4]], dtype=np.float32)
    >>> y, mean, rstd = cunorm.layer_norm(x, normalized_shape=4)
    >>> y.round(3)
    array([[-1.069, -0.535,  0.   ,  1.604],
           [-0.577, -0.577, -0.577,  1.732]], dtype=float32)
    >>> mean
    array([[3.],
           [1.]], dtype=float32)
    """
    results: tuple[Array, ...] = perform(
        LAYER_NORM,
        (x, gamma, beta, residual),
        (normalized_shape, y_dtype),
        out,
        tile,
        workspace,
        (epsilon(eps),),
        (typed(normalized_shape), y_dtype),
    )
    return results


def layer_norm_backward(
    dy: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    mean: Array,
    rstd: Array,
    gamma: Array | None = None,
    *,
    dh: Array | None = None,
    output_mask: Sequence[bool] = EVERY,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    r"""Gradients of LayerNorm.

    .. math::

        d\beta_i = \sum_{rows} dy, \qquad d\gamma_i = \sum_{rows} dy\,\hat x, \qquad
        dx = \mathrm{rstd}\,(\gamma_i\,dy - A/L - \hat x\,B/L)

    Here :math:`\hat x = (x - \mathrm{mean})\,\mathrm{rstd}`. A and B are the sums of :math:`\gamma_i\,dy` and
    :math:`\gamma_i\,dy\,\hat x` over a row of L elements. These are the gradients of GroupNorm with one group of L
    channels.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (A1..Ai, R1..Rj); rank 1 to 8. dy and x have the same shape and dtype.
    normalized_shape : int or sequence of int
        Last sizes of x, (R1..Rj), which make up a row.
    mean, rstd : array
        Statistics that `layer_norm` returned. Shape (A1..Ai, 1..1), or any shape with one element per row. Dtype
        float32 (float64 for float64 x) or the dtype of x.
    gamma : array of shape normalized_shape, optional
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x.
    dh : array, optional
        Shape and dtype of x. If the forward had a residual, x is its h, and dh is the gradient that reaches h past the
        norm. It is added to dx in the same pass; dx is then the gradient of x and of the residual alike.
    output_mask : sequence of 3 bools
        Which of dx, dgamma and dbeta are wanted. The others are not computed and are returned as None.
    out : tuple of (dx, dgamma, dbeta), optional
        Arrays for the results. A result whose entry is None is allocated. dx may be dy itself.
    tile, workspace
        See `layer_norm`.

    Returns
    -------
    dx : array or None
        Shape and dtype of x.
    dgamma, dbeta : array of shape normalized_shape, or None
        Dtype of gamma, or of the statistics if gamma is absent.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2, 3, 6], [0, 0, 0, 4]], dtype=np.float32)
    >>> y, mean, rstd = cunorm.layer_norm(x, normalized_shape=4)
    >>> dy = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=np.float32)
    >>> dx, dgamma, dbeta = cunorm.layer_norm_backward(dy, x, 4, mean, rstd)
    >>> dx[0].round(3)
    array([ 0.248, -0.21 , -0.134,  0.095], dtype=float32)
    >>> dgamma.round(3), dbeta
    (array([-1.069, -0.577,  0.   ,  0.   ], dtype=float32), array([1., 1., 0., 0.], dtype=float32))
    """
    key = (typed(normalized_shape), output_mask if output_mask is EVERY else typed(output_mask))
    results: tuple[Array | None, Array | None, Array | None] = perform(
        LAYER_NORM_BACKWARD,
        (dy, x, mean, rstd, gamma, dh),
        (normalized_shape, output_mask),
        out,
        tile,
        workspace,
        (),
        key,
    )
    return results
