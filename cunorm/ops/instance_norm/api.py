"""Public functions of InstanceNorm. Their checks are in op.py, and their strategies in strategies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cunorm.core.arrays import Array, epsilon
from cunorm.core.strategy import Tile
from cunorm.runtime.op import EVERY, perform, typed

from .op import INSTANCE_NORM, INSTANCE_NORM_BACKWARD


def instance_norm(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    eps: float = 1e-5,
    data_format: str = "NCHW",
    y_dtype: object = None,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array, Array]:
    r"""InstanceNorm: normalise each channel of each sample over its positions.

    .. math:: y = \gamma_c \, (x - \mathrm{mean}_{n,c}) \, \mathrm{rstd}_{n,c} + \beta_c, \qquad
              \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \epsilon}

    The mean and the biased variance are over all positions of a channel of one sample (Ulyanov, Vedaldi and Lempitsky,
    2016). The results are those of `group_norm` with as many groups as channels, bit for bit for the same tile.

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; rank 2 to 8. Dtype float16, bfloat16, float32 or
        float64. An array with contiguous or channels-last strides is read in place. Any other array is copied once.
    gamma, beta : array of shape (C,), optional
        Scale and offset, in the dtype of x or of the statistics, or in 16 bits for float32 x. An absent gamma is 1, and
        an absent beta is 0.
    eps : float
        Number that is added to the variance; not negative. Unless x is float64, it is 0 or in the range of float32.
    data_format : {"NCHW", "NHWC"}
        Position of the channel axis: second or last.
    y_dtype : str or dtype, optional
        Dtype of y: that of x, which None means too, or float32 for 16-bit x. y is then not rounded.
    out : tuple of (y, mean, rstd), optional
        Arrays for the results. A result whose entry is None is allocated. y may be x itself if it has x's dtype.
    tile : Tile or mapping, optional
        Strategy and tile fields that replace the automatic choice.
    workspace : array, optional
        Contiguous array of at least ``plan.workspace_nbytes`` bytes. Its content does not matter and is overwritten.

    Returns
    -------
    y : array
        Shape of x. Dtype of x, or ``y_dtype``.
    mean, rstd : array of shape (N, C)
        Dtype float32 (float64 for float64 x). NaN for channels without positions. A channel whose elements are all
        equal has rstd = 1 / sqrt(eps), also one with a single position.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype.
    ValueError
        If a shape, a size or a format is invalid, or if arrays overlap or are on different devices.
    UnsupportedTile
        If ``tile`` is not legal for the problem on the device.
    CompileError
        If a kernel does not compile.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    >>> y, mean, rstd = cunorm.instance_norm(x)
    >>> mean
    array([[ 1.,  4.],
           [ 7., 10.]], dtype=float32)
    >>> y[0].round(3)
    array([[-1.225,  0.   ,  1.225],
           [-1.225,  0.   ,  1.225]], dtype=float32)
    """
    results: tuple[Array, Array, Array] = perform(
        INSTANCE_NORM, (x, gamma, beta), (data_format, y_dtype), out, tile, workspace, (epsilon(eps),)
    )
    return results


def instance_norm_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    gamma: Array | None = None,
    *,
    output_mask: Sequence[bool] = EVERY,
    data_format: str = "NCHW",
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    r"""Gradients of InstanceNorm.

    .. math::

        d\beta_c = \sum_{n,hw} dy, \qquad d\gamma_c = \sum_{n,hw} dy\,\hat x, \qquad
        dx = \mathrm{rstd}\,(\gamma_c\,dy - A/L - \hat x\,B/L)

    Here :math:`\hat x = (x - \mathrm{mean})\,\mathrm{rstd}`. A and B are the sums of :math:`\gamma_c\,dy` and
    :math:`\gamma_c\,dy\,\hat x` over the L positions of a channel of one sample. The norm is that of Ulyanov, Vedaldi
    and Lempitsky (2016). The derivation is the same as for the gradient of BatchNorm (Ioffe and Szegedy, 2015), with a
    channel of one sample in place of a channel of the batch.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``. dy and x have the same shape and dtype.
    mean, rstd : array
        Statistics that `instance_norm` returned. Shape (N, C), or any shape with the same number of elements. Dtype
        float32 (float64 for float64 x) or the dtype of x.
    gamma : array of shape (C,), optional
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x.
    output_mask : sequence of 3 bools
        Which of dx, dgamma and dbeta are wanted. The others are not computed and are returned as None.
    data_format : {"NCHW", "NHWC"}
        Position of the channel axis: second or last.
    out : tuple of (dx, dgamma, dbeta), optional
        Arrays for the results. A result whose entry is None is allocated. dx may be dy itself.
    tile, workspace
        See `instance_norm`.

    Returns
    -------
    dx : array or None
        Shape and dtype of x.
    dgamma, dbeta : array of shape (C,) or None
        Dtype of gamma, or of the statistics if gamma is absent.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `instance_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    >>> y, mean, rstd = cunorm.instance_norm(x)
    >>> dy = np.zeros_like(x)
    >>> dy[0, 0, 0] = 1
    >>> dx, dgamma, dbeta = cunorm.instance_norm_backward(dy, x, mean, rstd)
    >>> dx[0].round(3)
    array([[ 0.204, -0.408,  0.204],
           [ 0.   ,  0.   ,  0.   ]], dtype=float32)
    >>> dgamma.round(3), dbeta
    (array([-1.225,  0.   ], dtype=float32), array([1., 0.], dtype=float32))
    """
    flags = output_mask if output_mask is EVERY else typed(output_mask)
    results: tuple[Array | None, Array | None, Array | None] = perform(
        INSTANCE_NORM_BACKWARD,
        (dy, x, mean, rstd, gamma),
        (output_mask, data_format),
        out,
        tile,
        workspace,
        (),
        (flags, data_format),
    )
    return results
