"""BatchNorm in the parts that synchronised training needs: the gradient's public functions."""

from __future__ import annotations

from collections.abc import Mapping

from cunorm.core.arrays import Array
from cunorm.core.strategy import Tile
from cunorm.runtime.op import perform, typed

from .op import BATCH_NORM_BACKWARD_ELEMT, BATCH_NORM_BACKWARD_REDUCE, element_count

__all__ = ["batch_norm_backward_elemt", "batch_norm_backward_reduce"]

Four = tuple[Array | None, Array | None, Array | None, Array | None]


def batch_norm_backward_reduce(
    dy: Array,
    x: Array,
    mean: Array,
    invstd: Array,
    gamma: Array | None = None,
    *,
    input_g: bool = True,
    gamma_g: bool = True,
    beta_g: bool = True,
    out: Four | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> Four:
    r"""The sums over a channel that the gradients of BatchNorm need.

    .. math::

        \mathrm{sum\_dy}_c = d\beta_c = \sum_{n,hw} dy, \qquad
        \mathrm{sum\_dy\_xmu}_c = \sum_{n,hw} dy\,(x - \mathrm{mean}_c), \qquad
        d\gamma_c = \mathrm{sum\_dy\_xmu}_c\,\mathrm{invstd}_c

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        (N, C, \*), rank 2 to 8; the same shape and dtype. Contiguous and channels-last strides are read where they are.
    mean, invstd : array of shape (C,)
        Of the whole batch; float32 (float64 for float64 x) or x's dtype.
    gamma : array of shape (C,), optional
        Of x's dtype or the statistics'. Its values are not needed; dgamma and dbeta take its dtype.
    input_g, gamma_g, beta_g : bool
        Whether sum_dy and sum_dy_xmu, dgamma, and dbeta are wanted. The others come back as None.
    out : tuple of (sum_dy, sum_dy_xmu, dgamma, dbeta), optional
        Arrays to write, each of any supported dtype; None in it means allocate. The first two may be the rows of one
        [2, C] array, ready for one all-reduce.
    tile, workspace
        As in `batch_norm_stats`.

    Returns
    -------
    sum_dy, sum_dy_xmu : array of shape (C,) or None
        Of the statistics' dtype.
    dgamma, dbeta : array of shape (C,) or None
        Of gamma's dtype; without gamma the statistics'.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        As `batch_norm_stats`.
    """
    flags = (input_g, gamma_g, beta_g)
    results: Four = perform(
        BATCH_NORM_BACKWARD_REDUCE, (dy, x, mean, invstd, gamma), flags, out, tile, workspace, (), typed(flags)
    )
    return results


def batch_norm_backward_elemt(
    dy: Array,
    x: Array,
    mean: Array,
    invstd: Array,
    gamma: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    count: float,
    *,
    out: Array | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""The gradient of BatchNorm's input, from the sums over the whole batch.

    .. math::

        dx = \left(dy - \frac{\mathrm{sum\_dy}_c}{M}
             - (x - \mathrm{mean}_c)\,\mathrm{invstd}_c^2\,\frac{\mathrm{sum\_dy\_xmu}_c}{M}\right)
             \mathrm{invstd}_c\,\gamma_c

    with M = ``count`` (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    dy, x, mean, invstd
        As in `batch_norm_backward_reduce`.
    gamma : array of shape (C,) or None
        Of x's dtype or the statistics'; None stands for ones.
    sum_dy, sum_dy_xmu : array of shape (C,)
        Summed over all ranks; one supported dtype.
    count : int or float
        Elements of a channel on all ranks together; more than 0.
    out : array, optional
        dx; may be exactly dy.
    tile, workspace
        As in `batch_norm_stats`.

    Returns
    -------
    dx : array
        As x.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        As `batch_norm_stats`.
    """
    given = None if out is None else (out,)
    arrays = (dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu)
    numbers = (element_count(count),)
    (dx,) = perform(BATCH_NORM_BACKWARD_ELEMT, arrays, (), given, tile, workspace, numbers)
    return dx
