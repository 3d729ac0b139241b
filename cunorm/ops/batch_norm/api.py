"""Public functions of BatchNorm, divided into the steps of synchronised training."""

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
    batch_count,
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
    r"""Compute the statistics of this process's part of a batch.

    .. math:: \mathrm{mean}_c = \frac{1}{M} \sum_{n,hw} x, \qquad
              \mathrm{invstd}_c = 1 / \sqrt{\mathrm{var}_c + \epsilon}

    The variance is the biased variance over the M = N * H * W elements of a channel (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*); rank 2 to 8. Dtype float16, bfloat16, float32 or float64. An array with contiguous or
        channels-last strides is read in place. Any other array is copied once.
    eps : float
        Number that is added to the variance; not negative. Unless x is float64, it is 0 or in the range of float32.
    out : tuple of (mean, invstd), optional
        Arrays for the results. A result whose entry is None is allocated.
    tile : Tile or mapping, optional
        Strategy and tile fields that replace the automatic choice.
    workspace : array, optional
        Contiguous array of at least ``plan.workspace_nbytes`` bytes. Its content does not matter and is overwritten.

    Returns
    -------
    mean, invstd : array of shape (C,)
        Dtype float32 (float64 for float64 x). NaN if a channel has no elements.

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
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> mean, invstd = cunorm.batch_norm_stats(x)
    >>> mean, invstd.round(3)
    (array([3., 6.], dtype=float32), array([0.612, 0.306], dtype=float32))
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
    r"""Merge the statistics of several parts of a batch, and update the running statistics.

    The variances are merged by the formula of Chan, Golub and LeVeque (1983), in float64, rank by rank. A rank with
    count 0 is ignored, whatever its statistics are.

    .. math::

        r &\leftarrow (1 - m)\,r + m\,\mathrm{mean} \\
        v &\leftarrow (1 - m)\,v + m\,\mathrm{var}\,\frac{M}{M - 1}

    Here r and v are ``running_mean`` and ``running_var``, m is ``momentum``, and M is the sum of the counts. If M is at
    most 1, the running variance is updated with the biased variance.

    Parameters
    ----------
    means, invstds : cupy.ndarray or numpy.ndarray of shape (world, C)
        One row per rank, as `batch_norm_stats` returned it. The rows may be any distance apart: columns of one
        gathered buffer, such as ``gathered[:, :C]``, are read in place, and so are strided counts.
    counts : array of shape (world,), or sequence of numbers
        Elements per channel on each rank. Dtype int32, int64, float32 or float64. With CuPy means, counts may also be a
        sequence or a NumPy array. The values of a sequence or a NumPy array are checked. The values of a CuPy array are
        not checked, because this would wait for the GPU. If all counts are 0, the statistics are NaN, and the running
        statistics do not change: no rank has any samples.
    eps : float
        eps of the `batch_norm_stats` calls.
    running_mean, running_var : array of shape (C,), optional
        Running statistics, which are updated in place. Any supported dtype.
    momentum : float
        Weight of the new statistics in the running statistics, from 0 to 1.
    out, tile, workspace
        See `batch_norm_stats`.

    Returns
    -------
    mean, invstd : array of shape (C,)
        Statistics of the whole batch. Dtype float32 (float64 for float64 means).

    Raises
    ------
    ValueError
        See `batch_norm_stats`. Also for counts in host memory that are negative or not finite.
    TypeError, UnsupportedTile, CompileError
        See `batch_norm_stats`.

    Examples
    --------
    Two processes with three and one samples:

    >>> import numpy as np
    >>> import cunorm
    >>> parts = [np.array([[1], [2], [3]], np.float32), np.array([[6]], np.float32)]
    >>> means, invstds = (np.stack(found) for found in zip(*map(cunorm.batch_norm_stats, parts)))
    >>> mean, invstd = cunorm.batch_norm_gather_stats(means, invstds, counts=[3, 1])
    >>> mean, invstd.round(3)
    (array([3.], dtype=float32), array([0.535], dtype=float32))
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
    y_dtype: object = None,
    out: Array | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Normalise x with statistics that the caller passes.

    .. math:: y = \gamma_c \, (x - \mathrm{mean}_c) \, \mathrm{invstd}_c + \beta_c

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*). See `batch_norm_stats`.
    mean, invstd : array of shape (C,)
        Statistics. Dtype float32 (float64 for float64 x) or the dtype of x.
    gamma, beta : array of shape (C,), optional
        Scale and offset, in the dtype of x or of the statistics, or in 16 bits for float32 x. An absent gamma is 1, and
        an absent beta is 0.
    y_dtype : str or dtype, optional
        Dtype of y: that of x, which None means too, or float32 for 16-bit x. y is then not rounded.
    out : array, optional
        Array for y. It may be x itself if it has x's dtype.
    tile, workspace
        See `batch_norm_stats`.

    Returns
    -------
    y : array
        Shape of x. Dtype of x, or ``y_dtype``.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `batch_norm_stats`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> mean, invstd = cunorm.batch_norm_stats(x)
    >>> cunorm.batch_norm_elemt(x, mean, invstd, beta=np.ones(2, np.float32)).round(3)
    array([[-0.225, -0.225],
           [ 1.   ,  1.   ],
           [ 2.225,  2.225]], dtype=float32)
    """
    given = None if out is None else (out,)
    (y,) = perform(BATCH_NORM_ELEMT, (x, mean, invstd, gamma, beta), (y_dtype,), given, tile, workspace)
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
    r"""Compute the sums over each channel that the gradients of BatchNorm need.

    .. math::

        \mathrm{sum\_dy}_c = d\beta_c = \sum_{n,hw} dy, \qquad
        \mathrm{sum\_dy\_xmu}_c = \sum_{n,hw} dy\,(x - \mathrm{mean}_c), \qquad
        d\gamma_c = \mathrm{sum\_dy\_xmu}_c\,\mathrm{invstd}_c

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*); rank 2 to 8. dy and x have the same shape and dtype. Contiguous and channels-last strides are
        read in place.
    mean, invstd : array of shape (C,)
        Statistics of the whole batch. Dtype float32 (float64 for float64 x) or the dtype of x.
    gamma : array of shape (C,), optional
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x. Its values are not
        read. Its dtype is the dtype of dgamma and dbeta.
    input_g, gamma_g, beta_g : bool
        input_g selects sum_dy and sum_dy_xmu, gamma_g selects dgamma, and beta_g selects dbeta. The other results are
        returned as None.
    out : tuple of (sum_dy, sum_dy_xmu, dgamma, dbeta), optional
        Arrays for the results, each of any supported dtype. A result whose entry is None is allocated. The first two
        may be the rows of one [2, C] array, so that one all-reduce sums both.
    tile, workspace
        See `batch_norm_stats`.

    Returns
    -------
    sum_dy, sum_dy_xmu : array of shape (C,) or None
        Dtype of the statistics.
    dgamma, dbeta : array of shape (C,) or None
        Dtype of gamma, or of the statistics if gamma is absent.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `batch_norm_stats`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> mean, invstd = cunorm.batch_norm_stats(x)
    >>> dy = np.array([[1, 0], [0, 1], [0, 0]], dtype=np.float32)
    >>> sum_dy, sum_dy_xmu, dgamma, dbeta = cunorm.batch_norm_backward_reduce(dy, x, mean, invstd)
    >>> sum_dy, sum_dy_xmu
    (array([1., 1.], dtype=float32), array([-2.,  0.], dtype=float32))
    >>> dgamma.round(3), dbeta
    (array([-1.225,  0.   ], dtype=float32), array([1., 1.], dtype=float32))
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
    count: float | Array | Sequence[float],
    *,
    out: Array | None = None,
    tile: Tile | Mapping[str, object] | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Compute the gradient of BatchNorm's input from the sums over the whole batch.

    .. math::

        a_c = \frac{1}{M}\,\mathrm{sum\_dy}_c, \qquad
        k_c = \frac{1}{M}\,\mathrm{invstd}_c^2\,\mathrm{sum\_dy\_xmu}_c, \qquad
        dx = (dy - a_c - (x - \mathrm{mean}_c)\,k_c)\,\mathrm{invstd}_c\,\gamma_c

    Here M is ``count``, or the sum of the counts (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    dy, x, mean, invstd
        See `batch_norm_backward_reduce`.
    gamma : array of shape (C,) or None
        Scale of the forward, in the dtype of x or of the statistics, or in 16 bits for float32 x. None means ones.
    sum_dy, sum_dy_xmu : array of shape (C,)
        Sums over all ranks. Both have the same supported dtype.
    count : int, float, array of shape (world,), or sequence of numbers
        Elements per channel on all ranks together, or on each rank. The kernel adds the counts of an array on the
        device of x, so that the host need not know them: pass the counts of `batch_norm_gather_stats`. They may be
        strided, and have the dtypes that it takes. A number, a sequence and a NumPy array must be finite and not
        negative. The values of a CuPy array are not checked, because this would wait for the GPU. If the total is 0, no
        rank has any samples, and dx is empty; the dx of samples that are there nevertheless is not finite.
    out : array, optional
        Array for dx. It may be dy itself.
    tile, workspace
        See `batch_norm_stats`.

    Returns
    -------
    dx : array
        Shape and dtype of x.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile, CompileError
        See `batch_norm_stats`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> mean, invstd = cunorm.batch_norm_stats(x)
    >>> dy = np.array([[1, 0], [0, 1], [0, 0]], dtype=np.float32)
    >>> sum_dy, sum_dy_xmu, dgamma, dbeta = cunorm.batch_norm_backward_reduce(dy, x, mean, invstd)
    >>> cunorm.batch_norm_backward_elemt(dy, x, mean, invstd, None, sum_dy, sum_dy_xmu, count=3).round(3)
    array([[ 0.102, -0.102],
           [-0.204,  0.204],
           [ 0.102, -0.102]], dtype=float32)
    """
    given = None if out is None else (out,)
    counts, total = batch_count(count, x)
    arrays = (dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, counts)
    numbers = (total,)
    (dx,) = perform(BATCH_NORM_BACKWARD_ELEMT, arrays, (), given, tile, workspace, numbers)
    return dx
