"""LayerNorm: the public functions. Their checks are in op.py, their kernels in strategies.py."""

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
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array, Array]:
    r"""LayerNorm: normalise each row of the trailing dimensions.

    .. math:: y = \gamma_i \, (x - \mathrm{mean}) \, \mathrm{rstd} + \beta_i, \qquad
              \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \epsilon}

    with mean and (biased) variance over a row (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        (A1..Ai, R1..Rj); rank 1 to 8; float16, bfloat16, float32 or float64. Contiguous arrays are read where they are;
        others are copied once.
    normalized_shape : int or sequence of int
        (R1..Rj), the last sizes of x: what makes up a row.
    gamma, beta : array of shape normalized_shape, optional
        Of x's dtype or the statistics'; absent they are 1 and 0.
    eps : float
        Not negative.
    out : tuple of (y, mean, rstd), optional
        Arrays to write; None in it means allocate. y may be exactly x.
    tile : Tile or mapping, optional
        The strategy and its numbers, instead of the chosen ones.
    workspace : array, optional
        At least ``plan.workspace_nbytes`` bytes, contiguous, of any content.

    Returns
    -------
    y : array
        Of x's shape and dtype.
    mean, rstd : array of shape (A1..Ai, 1..1)
        float32 (float64 for float64 x).

    Raises
    ------
    TypeError
        For a wrong type or dtype.
    ValueError
        For wrong shapes, sizes, devices or overlaps; `UnsupportedTile` for a tile that is not legal.
    CompileError
        If a kernel does not compile.
    """
    results: tuple[Array, Array, Array] = perform(
        LAYER_NORM,
        (x, gamma, beta),
        (normalized_shape,),
        out,
        tile,
        workspace,
        (epsilon(eps),),
        typed(normalized_shape),
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
    output_mask: Sequence[bool] = EVERY,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    r"""Gradients of LayerNorm.

    .. math::

        d\beta_i = \sum_{rows} dy, \qquad d\gamma_i = \sum_{rows} dy\,\hat x, \qquad
        dx = \mathrm{rstd}\,(\gamma_i\,dy - A/L - \hat x\,B/L)

    with :math:`\hat x = (x - \mathrm{mean})\,\mathrm{rstd}`, A and B the sums of :math:`\gamma_i\,dy` and
    :math:`\gamma_i\,dy\,\hat x` over a row of L elements: GroupNorm's with one group of L channels.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        (A1..Ai, R1..Rj), rank 1 to 8; the same shape and dtype.
    normalized_shape : int or sequence of int
        (R1..Rj).
    mean, rstd : array
        What `layer_norm` returned: (A1..Ai, 1..1), or any shape with an element a row; float32 (float64 for float64 x)
        or x's dtype.
    gamma : array of shape normalized_shape, optional
        Of x's dtype or the statistics'.
    output_mask : sequence of 3 bools
        Which of dx, dgamma, dbeta are wanted. The others come back as None and their work is not done.
    out : tuple of (dx, dgamma, dbeta), optional
        Arrays to write; None in it means allocate. dx may be exactly dy.
    tile, workspace
        As in `layer_norm`.

    Returns
    -------
    dx : array or None
        As x.
    dgamma, dbeta : array of shape normalized_shape, or None
        Of gamma's dtype; without gamma the statistics'.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        As `layer_norm`.
    """
    key = (typed(normalized_shape), output_mask if output_mask is EVERY else typed(output_mask))
    results: tuple[Array | None, Array | None, Array | None] = perform(
        LAYER_NORM_BACKWARD,
        (dy, x, mean, rstd, gamma),
        (normalized_shape, output_mask),
        out,
        tile,
        workspace,
        (),
        key,
    )
    return results
