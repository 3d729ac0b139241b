"""Public functions of GroupNorm. Their checks are in op.py, and their strategies in strategies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cunorm.core.arrays import Array, epsilon
from cunorm.core.strategy import Tile
from cunorm.runtime.op import EVERY, perform, typed

from .op import GROUP_NORM, GROUP_NORM_BACKWARD


def group_norm(
    x: Array,
    num_groups: int,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    eps: float = 1e-5,
    data_format: str = "NCHW",
    activation: str | None = None,
    y_dtype: object = None,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array, Array]:
    r"""GroupNorm: normalise each group of channels of each sample.

    .. math:: y = \gamma_c \, (x - \mathrm{mean}) \, \mathrm{rstd} + \beta_c, \qquad
              \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \epsilon}

    The mean and the biased variance are over the C / num_groups channels of a group and all positions (Wu and He,
    2018).

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; rank 2 to 8. Dtype float16, bfloat16, float32 or
        float64. An array with contiguous or channels-last strides is read in place. Any other array is copied once.
    num_groups : int
        Number of groups, a divisor of C.
    gamma, beta : array of shape (C,), optional
        Scale and offset, in the dtype of x or of the statistics, or in 16 bits for float32 x. An absent gamma is 1, and
        an absent beta is 0.
    eps : float
        Number that is added to the variance; not negative. Unless x is float64, it is 0 or in the range of float32.
    data_format : {"NCHW", "NHWC"}
        Position of the channel axis: second or last.
    activation : {None, "silu"}
        Activation that is applied to y in the same pass. "silu" replaces y with y / (1 + exp(-y)) (Elfwing, Uchibe
        and Doya, 2018).
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
    mean, rstd : array of shape (N, num_groups)
        Dtype float32 (float64 for float64 x). NaN for groups without elements.

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
    >>> x = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    >>> y, mean, rstd = cunorm.group_norm(x, num_groups=2)
    >>> mean
    array([[ 1.5,  5.5],
           [ 9.5, 13.5]], dtype=float32)
    >>> y[0].round(3)
    array([[-1.342, -0.447],
           [ 0.447,  1.342],
           [-1.342, -0.447],
           [ 0.447,  1.342]], dtype=float32)
    """
    options = (num_groups, data_format, activation, y_dtype)
    key = (*options, num_groups.__class__)
    results: tuple[Array, Array, Array] = perform(
        GROUP_NORM, (x, gamma, beta), options, out, tile, workspace, (epsilon(eps),), key
    )
    return results


def group_norm_backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    gamma: Array | None = None,
    *,
    num_groups: int,
    beta: Array | None = None,
    activation: str | None = None,
    output_mask: Sequence[bool] = EVERY,
    data_format: str = "NCHW",
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    r"""Gradients of GroupNorm.

    .. math::

        d\beta_c = \sum_{n,hw} dy, \qquad d\gamma_c = \sum_{n,hw} dy\,\hat x, \qquad
        dx = \mathrm{rstd}\,(\gamma_c\,dy - A/L - \hat x\,B/L)

    Here :math:`\hat x = (x - \mathrm{mean})\,\mathrm{rstd}`. A and B are the sums of :math:`\gamma_c\,dy` and
    :math:`\gamma_c\,dy\,\hat x` over a group of L elements. The derivation is the same as for the gradient of BatchNorm
    (Ioffe and Szegedy, 2015), with a group in place of the batch.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``. dy and x have the same shape and dtype.
    mean, rstd : array
        Statistics that `group_norm` returned. Shape (N, num_groups), or any shape with the same number of elements.
        Dtype float32 (float64 for float64 x) or the dtype of x.
    gamma : array of shape (C,), optional
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x.
    num_groups : int
        Number of groups, a divisor of C.
    beta : array of shape (C,), optional
        Offset of the forward. With an activation, beta is needed if the forward had one. Without an activation, beta is
        checked but not read.
    activation : {None, "silu"}
        Activation of the forward. dy is the gradient of the activation's output. The derivative of the activation is
        recomputed from x.
    output_mask : sequence of 3 bools
        Which of dx, dgamma and dbeta are wanted. The others are not computed and are returned as None.
    data_format : {"NCHW", "NHWC"}
        Position of the channel axis: second or last.
    out : tuple of (dx, dgamma, dbeta), optional
        Arrays for the results. A result whose entry is None is allocated. dx may be dy itself.
    tile, workspace
        See `group_norm`.

    Returns
    -------
    dx : array or None
        Shape and dtype of x.
    dgamma, dbeta : array of shape (C,) or None
        Dtype of gamma, or of the statistics if gamma is absent.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `group_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    >>> y, mean, rstd = cunorm.group_norm(x, num_groups=2)
    >>> dy = np.zeros_like(x)
    >>> dy[0, 0, 0] = 1
    >>> dx, dgamma, dbeta = cunorm.group_norm_backward(dy, x, mean, rstd, num_groups=2)
    >>> dx[0].round(3)
    array([[ 0.268, -0.358],
           [-0.089,  0.179],
           [ 0.   ,  0.   ],
           [ 0.   ,  0.   ]], dtype=float32)
    >>> dgamma.round(3), dbeta
    (array([-1.342,  0.   ,  0.   ,  0.   ], dtype=float32), array([1., 0., 0., 0.], dtype=float32))
    """
    options = (num_groups, output_mask, data_format, activation)
    flags = output_mask if output_mask is EVERY else typed(output_mask)
    key = (num_groups, num_groups.__class__, flags, data_format, activation)
    results: tuple[Array | None, Array | None, Array | None] = perform(
        GROUP_NORM_BACKWARD, (dy, x, mean, rstd, gamma, beta), options, out, tile, workspace, (), key
    )
    return results
