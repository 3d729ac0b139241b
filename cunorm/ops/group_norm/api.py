"""GroupNorm: the public functions. Their checks are in op.py, their kernels in strategies.py."""

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
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array, Array]:
    r"""GroupNorm: normalise each group of channels of each sample.

    .. math:: y = \gamma_c \, (x - \mathrm{mean}) \, \mathrm{rstd} + \beta_c, \qquad
              \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \epsilon}

    with mean and (biased) variance over the C / num_groups channels of a group and all positions (Wu and He, 2018).

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; rank 2 to 8; float16, bfloat16, float32 or float64.
        Contiguous and channels-last strides are read where they are; any other is copied once.
    num_groups : int
        Divides C.
    gamma, beta : array of shape (C,), optional
        Of x's dtype or the statistics'; absent they are 1 and 0.
    eps : float
        Not negative.
    data_format : {"NCHW", "NHWC"}
        Where the channel axis is.
    activation : {None, "silu"}
        What lies behind the norm, in the same pass: y becomes y / (1 + exp(-y)) (Elfwing, Uchibe and Doya, 2018).
    out : tuple of (y, mean, rstd), optional
        Arrays to write; None in it means allocate. y may be exactly x.
    tile : Tile or mapping, optional
        The strategy and its numbers, instead of the chosen ones.
    workspace : array, optional
        At least ``plan.workspace_nbytes`` bytes, contiguous, of any content.

    Returns
    -------
    y : array
        As x.
    mean, rstd : array of shape (N, num_groups)
        float32 (float64 for float64 x); NaN for groups without elements.

    Raises
    ------
    TypeError
        For a wrong type or dtype.
    ValueError
        For wrong shapes, sizes, formats, devices or overlaps; `UnsupportedTile` for a tile that is not legal.
    CompileError
        If a kernel does not compile.
    """
    options = (num_groups, data_format, activation)
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

    with :math:`\hat x = (x - \mathrm{mean})\,\mathrm{rstd}`, A and B the sums of :math:`\gamma_c\,dy` and
    :math:`\gamma_c\,dy\,\hat x` over a group of L elements. The derivation is that of BatchNorm's gradient (Ioffe and
    Szegedy, 2015) with the group in the batch's place.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        (N, C, \*), or (N, \*, C) with ``data_format="NHWC"``; the same shape and dtype.
    mean, rstd : array
        What `group_norm` returned: (N, num_groups), or any shape with that many elements; float32 (float64 for float64
        x) or x's dtype.
    gamma : array of shape (C,), optional
        Of x's dtype or the statistics'.
    num_groups : int
        Divides C.
    beta : array of shape (C,), optional
        What the forward had. Needed with an activation; without one checked and not read.
    activation : {None, "silu"}
        What lay behind the norm: dy is the gradient behind it, and its derivative is made again from x.
    output_mask : sequence of 3 bools
        Which of dx, dgamma, dbeta are wanted. The others come back as None and their work is not done.
    data_format : {"NCHW", "NHWC"}
        Where the channel axis is.
    out : tuple of (dx, dgamma, dbeta), optional
        Arrays to write; None in it means allocate. dx may be exactly dy.
    tile, workspace
        As in `group_norm`.

    Returns
    -------
    dx : array or None
        As x.
    dgamma, dbeta : array of shape (C,) or None
        Of gamma's dtype; without gamma the statistics'.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        As `group_norm`.
    """
    options = (num_groups, output_mask, data_format, activation)
    flags = output_mask if output_mask is EVERY else typed(output_mask)
    key = (num_groups, num_groups.__class__, flags, data_format, activation)
    results: tuple[Array | None, Array | None, Array | None] = perform(
        GROUP_NORM_BACKWARD, (dy, x, mean, rstd, gamma, beta), options, out, tile, workspace, (), key
    )
    return results
