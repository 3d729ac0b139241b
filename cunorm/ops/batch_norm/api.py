"""BatchNorm in the parts that synchronised training needs: the public functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cunorm.core.arrays import Array, epsilon
from cunorm.core.strategy import Tile
from cunorm.runtime.op import perform, typed

from .op import (
    BATCH_NORM_BACKWARD_ELEMT,
    BATCH_NORM_BACKWARD_REDUCE,
    BATCH_NORM_ELEMT,
    BATCH_NORM_GATHER_STATS,
    BATCH_NORM_STATS,
    element_count,
    momentum_number,
    rank_counts,
    with_running,
)


def batch_norm_stats(
    x: Array,
    *,
    eps: float = 1e-5,
    out: tuple[Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array]:
    r"""The statistics of this process's part of a batch.

    .. math:: \mathrm{mean}_c = \frac{1}{M} \sum_{n,hw} x, \qquad
              \mathrm{invstd}_c = 1 / \sqrt{\mathrm{var}_c + \epsilon}

    with the biased variance over the M = N * H * W elements of a channel (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        (N, C, \*), rank 2 to 8; float16, bfloat16, float32 or float64. Contiguous and channels-last strides are read
        where they are; any other is copied once.
    eps : float
        Not negative.
    out : tuple of (mean, invstd), optional
        Arrays to write; None in it means allocate.
    tile : Tile or mapping, optional
        The strategy and its numbers, instead of the chosen ones.
    workspace : array, optional
        At least ``plan.workspace_nbytes`` bytes, contiguous, of any content.

    Returns
    -------
    mean, invstd : array of shape (C,)
        float32 (float64 for float64 x); NaN where there are no elements.

    Raises
    ------
    TypeError
        For a wrong type or dtype.
    ValueError
        For wrong shapes, sizes, devices or overlaps; `UnsupportedTile` for a tile that is not legal.
    CompileError
        If a kernel does not compile.
    """
    results: tuple[Array, Array] = perform(BATCH_NORM_STATS, (x,), (), out, tile, workspace, (epsilon(eps),))
    return results


def batch_norm_gather_stats(
    means: Array,
    invstds: Array,
    counts: Array | Sequence[float],
    *,
    eps: float = 1e-5,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
    out: tuple[Array | None, Array | None] | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, Array]:
    r"""Merge the statistics of several parts of a batch, and update the running ones.

    The variances are merged by the formula of Chan, Golub and LeVeque (1983), in float64, rank by rank. A rank with
    count 0 is absent, whatever its statistics hold.

    .. math::

        \mathrm{running\_mean} &\leftarrow (1 - m)\,\mathrm{running\_mean} + m\,\mathrm{mean} \\
        \mathrm{running\_var} &\leftarrow (1 - m)\,\mathrm{running\_var} + m\,\mathrm{var}\,\frac{M}{M - 1}

    with m = ``momentum`` and M the sum of the counts; the variance stays biased where M is at most 1.

    Parameters
    ----------
    means, invstds : cupy.ndarray or numpy.ndarray of shape (world, C)
        A row for each rank, as `batch_norm_stats` returned them.
    counts : array of shape (world,), or sequence of numbers
        Elements of a channel on each rank; int32, int64, float32 or float64. A sequence or a NumPy array also goes with
        CuPy means; it is checked. A CuPy array is not looked at, for that would wait for the GPU: there a total of 0
        makes NaN statistics and leaves the running ones alone.
    eps : float
        The one that the statistics were made with.
    running_mean, running_var : array of shape (C,), optional
        Updated in place; of any supported dtype.
    momentum : float
        The new statistics' share of the running ones, from 0 to 1.
    out : tuple of (mean, invstd), optional
    tile, workspace
        As in `batch_norm_stats`.

    Returns
    -------
    mean, invstd : array of shape (C,)
        Of the whole batch; float32 (float64 for float64 means).

    Raises
    ------
    ValueError
        Also where the counts' sum is 0.
    TypeError, UnsupportedTile, CompileError
        As `batch_norm_stats`.
    """
    numbers = (epsilon(eps), momentum_number(momentum))
    written = with_running(out, running_mean, running_var)
    arrays = (means, invstds, rank_counts(means, invstds, counts, written))
    mean, invstd, _, _ = perform(BATCH_NORM_GATHER_STATS, arrays, (), written, tile, workspace, numbers)
    return mean, invstd


def batch_norm_elemt(
    x: Array,
    mean: Array,
    invstd: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    out: Array | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Normalise with given statistics.

    .. math:: y = \gamma_c \, (x - \mathrm{mean}_c) \, \mathrm{invstd}_c + \beta_c

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        (N, C, \*), as in `batch_norm_stats`.
    mean, invstd : array of shape (C,)
        float32 (float64 for float64 x) or x's dtype.
    gamma, beta : array of shape (C,), optional
        Of x's dtype or the statistics'; absent they are 1 and 0.
    out : array, optional
        y; may be exactly x.
    tile, workspace
        As in `batch_norm_stats`.

    Returns
    -------
    y : array
        As x.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        As `batch_norm_stats`.
    """
    given = None if out is None else (out,)
    (y,) = perform(BATCH_NORM_ELEMT, (x, mean, invstd, gamma, beta), (), given, tile, workspace)
    return y


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
