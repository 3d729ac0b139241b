"""BatchNorm of a batch whose samples are spread over several processes: one exchange forward, one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cunorm.core.arrays import (
    DTYPES,
    Array,
    dtype_name,
    epsilon,
    integer,
    kind_of,
    mask,
    namespace,
    overlap,
    said,
    same_place,
    shape_of,
    span,
)
from cunorm.core.problem import accumulator
from cunorm.executors.choose import on
from cunorm.ops.batch_norm.api import (
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
    batch_norm_elemt,
    batch_norm_gather_stats,
    batch_norm_stats,
)
from cunorm.ops.batch_norm.op import RUNNING, momentum_number
from cunorm.runtime.checked_call import OVERLAPS
from cunorm.runtime.checks import GRADIENTS, parameter, split_axes, writable

from .engines import Engine
from .packets import PacketFormat


class SavedStatistics(NamedTuple):
    """What `sync_batch_norm_backward` needs from the forward, on the device of x.

    Attributes
    ----------
    mean, invstd : array of shape (C,)
        Statistics of the whole batch; dtype float32 (float64 for float64 x). NaN if the whole batch is empty.
    counts : array of shape (world,)
        Elements per channel on each rank; dtype int64.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.distributed import LocalEngine, sync_batch_norm
    >>> y, saved = sync_batch_norm(np.zeros((2, 4, 5, 5), np.float32), engine=LocalEngine())
    >>> saved.counts
    array([50])
    """

    mean: Array
    invstd: Array
    counts: Array


def sync_batch_norm(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    *,
    engine: Engine,
    eps: float = 1e-5,
    momentum: float = 0.1,
) -> tuple[Array, SavedStatistics]:
    r"""Normalise this process's part of a batch with the statistics of the whole batch.

    All processes of the engine call this function together. It makes one all-gather, of 16 + 8 C bytes per process (16
    + 16 C for float64; 8 bytes fewer for CuPy arrays). A CuPy array is processed in the order of CuPy's current stream,
    and the process does not wait for the GPU (`MpiEngine` does).

    .. math:: y = \gamma_c \, (x - \mathrm{mean}_c) \, \mathrm{invstd}_c + \beta_c

    Parameters
    ----------
    x : cupy.ndarray or numpy.ndarray
        This process's samples, shape (N, C, \*); rank 2 to 8. Dtype float16, bfloat16, float32 or float64. N and the
        axes after C may differ between processes and may be 0. C and the dtype must be the same on all of them.
    gamma, beta : array of shape (C,), optional
        Scale and offset, in the dtype of x or of the statistics; for float32 x also float16 or bfloat16. An absent
        gamma is 1, and an absent beta is 0.
    running_mean, running_var : array of shape (C,), optional
        Running statistics, which are updated in place with the statistics of the whole batch; unchanged if it is empty.
        Any supported dtype. Processes that start with the same values keep the same values.
    engine : Engine
        The exchange between the processes.
    eps : float
        Number that is added to the variance; not negative. The same on all processes.
    momentum : float
        Weight of the new statistics in the running statistics, from 0 to 1.

    Returns
    -------
    y : array
        Shape and dtype of x.
    saved : SavedStatistics
        The argument of `sync_batch_norm_backward`.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype.
    ValueError
        If a shape, a size or a number is invalid, or arrays are on different devices. Also if NumPy arrays of another C
        or dtype come from another process and the engine transports them. The arguments of this process are checked
        before the exchange.
    CompileError
        If a kernel does not compile.
    Exception
        The engine's own error, if another process ended or its message has another size.

    Examples
    --------
    One process of one:

    >>> import numpy as np
    >>> from cunorm.distributed import LocalEngine, sync_batch_norm
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> y, saved = sync_batch_norm(x, beta=np.ones(2, np.float32), engine=LocalEngine())
    >>> y.round(3)
    array([[-0.225, -0.225],
           [ 1.   ,  1.   ],
           [ 2.225,  2.225]], dtype=float32)
    """
    eps, momentum = epsilon(eps), momentum_number(momentum)
    world = _size(engine)
    kind, ordinal = _check_forward(x, gamma, beta, running_mean, running_var)
    with on(kind, ordinal):
        packet = _Packet(kind, dtype_name("x", x), x.shape[1])
        received = packet.exchange(x, engine, world, eps)
        counts, means, invstds = packet.parts(received)
        mean, invstd = batch_norm_gather_stats(
            means,
            invstds,
            counts,
            eps=eps,
            running_mean=running_mean,
            running_var=running_var,
            momentum=momentum,
        )
        y = batch_norm_elemt(x, mean, invstd, gamma, beta)
    return y, SavedStatistics(mean, invstd, counts)


def sync_batch_norm_backward(
    dy: Array,
    x: Array,
    saved: SavedStatistics,
    gamma: Array | None = None,
    *,
    engine: Engine,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Array | None, Array | None, Array | None]:
    r"""Compute the gradients of `sync_batch_norm` for this process's part of a batch.

    All processes of the engine call this function together, if dx is wanted. It then makes one all-reduce, of 8 C bytes
    (16 C for float64). Without dx it exchanges nothing.

    dy is the gradient of the sum of all processes' losses. dx is the gradient of that sum too. dgamma and dbeta are
    **this process's share**, as in ``torch.nn.SyncBatchNorm``: their sum over the processes is the gradient of the
    whole batch. Sum them, or average them, together with the gradients of the other parameters.

    Parameters
    ----------
    dy, x : cupy.ndarray or numpy.ndarray
        Shape (N, C, \*); the x of the forward. dy has the shape and dtype of x.
    saved : SavedStatistics
        The second result of `sync_batch_norm`.
    gamma : array of shape (C,), optional
        Scale of the forward, in a dtype that the forward takes.
    engine : Engine
        The engine of the forward.
    output_mask : tuple of bool
        Which of dx, dgamma and dbeta are computed. The others are returned as None. The first flag must be the same on
        all processes.

    Returns
    -------
    dx : array or None
        Shape and dtype of x.
    dgamma, dbeta : array of shape (C,) or None
        This process's share, in the dtype of gamma, or of the statistics if gamma is absent. Zeros if x is empty.

    Raises
    ------
    TypeError, ValueError, CompileError, Exception
        See `sync_batch_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.distributed import LocalEngine, sync_batch_norm, sync_batch_norm_backward
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> dy = np.array([[1, 0], [0, 1], [0, 0]], dtype=np.float32)
    >>> y, saved = sync_batch_norm(x, engine=LocalEngine())
    >>> dx, dgamma, dbeta = sync_batch_norm_backward(dy, x, saved, engine=LocalEngine())
    >>> dx.round(3)
    array([[ 0.102, -0.102],
           [-0.204,  0.204],
           [ 0.102, -0.102]], dtype=float32)
    >>> dbeta
    array([1., 1.], dtype=float32)
    """
    wanted = mask("output_mask", output_mask, GRADIENTS)
    world = _size(engine)
    if not isinstance(saved, SavedStatistics):
        raise TypeError(f"saved: {said(saved)}, expected the SavedStatistics that sync_batch_norm returned")
    mean, invstd, counts = saved
    kind_of("saved.counts", counts)
    shape_of("saved.counts", counts, (world,), ", one count per process of the engine")
    place = same_place([("x", x), ("saved.counts", counts)])
    if not wanted[0]:
        _, _, dgamma, dbeta = batch_norm_backward_reduce(
            dy, x, mean, invstd, gamma, input_g=False, gamma_g=wanted[1], beta_g=wanted[2]
        )
        return None, dgamma, dbeta
    with on(*place):
        sums = namespace(place[0]).empty((2, mean.size), mean.dtype)
        out = (sums[0], sums[1], None, None)
        _, _, dgamma, dbeta = batch_norm_backward_reduce(
            dy, x, mean, invstd, gamma, gamma_g=wanted[1], beta_g=wanted[2], out=out
        )
        engine.all_reduce(sums)
        dx = batch_norm_backward_elemt(dy, x, mean, invstd, gamma, sums[0], sums[1], counts)
    return dx, dgamma, dbeta


def _size(engine: object) -> int:
    """The number of processes of an engine (TypeError, ValueError)."""
    if isinstance(engine, type) or not isinstance(engine, Engine):  # a class has the methods too
        raise TypeError(
            f"engine: {said(engine)}, expected an object with size, all_gather and all_reduce, "
            "such as cunorm.distributed.TorchEngine()"
        )
    return integer("engine.size", engine.size)


def _check_forward(
    x: Array, gamma: Array | None, beta: Array | None, running_mean: Array | None, running_var: Array | None
) -> tuple[str, int]:
    """Check all arrays before the exchange and before anything is written; return the place of x."""
    kind_of("x", x)
    parameters = (("gamma", gamma), ("beta", beta))
    running = tuple(zip(RUNNING, (running_mean, running_var), strict=True))
    place = same_place([("x", x), *parameters, *running])
    dtype = dtype_name("x", x)
    _, C, _ = split_axes(x.shape, "NCHW")
    for name, array in parameters:
        parameter(name, array, (C,), dtype)
    for name, array in running:
        if array is not None:
            dtype_name(name, array)
            shape_of(name, array, (C,), ", one element per channel")
            writable(name, array)
    _check_apart(running, [("x", x), *parameters])
    return place


def _check_apart(written: Sequence[tuple[str, Array | None]], read: Sequence[tuple[str, Array | None]]) -> None:
    """Check that no array that is written overlaps another one (ValueError). The others are read after that."""
    for index, (name, array) in enumerate(written):
        for other, another in (*read, *written[:index]):
            if array is not None and another is not None and overlap(array, span(array), another, span(another)):
                raise ValueError(OVERLAPS.format(name, other))


class _Packet:
    """The packets of all processes (`packets`), as arrays of a kind."""

    def __init__(self, kind: str, dtype: str, C: int) -> None:
        self.kind, self.C, self.wide = kind, C, DTYPES[accumulator(dtype)]
        self.format = PacketFormat(kind == "cpu", dtype, C)

    def exchange(self, x: Array, engine: Engine, world: int, eps: float) -> Array:
        """The packets of all processes, shape (world, words)."""
        xp, C = namespace(self.kind), self.C
        packet = xp.empty(self.format.words, np.int64)
        xp.copyto(packet[:1], x.size // C if C else 0)
        if self.format.kind is not None:
            packet[1] = self.format.kind
        statistics = packet[self.format.head :].view(self.wide)
        batch_norm_stats(x, eps=eps, out=(statistics[:C], statistics[C:]))
        received = xp.empty((world, packet.size), np.int64)
        engine.all_gather(packet, received)
        if self.format.kind is not None:
            self.format.check_kinds(received[:, 1].tolist(), "x")
        return received

    def parts(self, received: Array) -> tuple[Array, Array, Array]:
        """The counts (world,), and means and invstds (world, C), as views of the received packets."""
        numbers = received.view(self.wide)[:, self.format.first :]
        return received[:, 0], numbers[:, : self.C], numbers[:, self.C :]
