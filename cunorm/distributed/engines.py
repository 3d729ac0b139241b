"""Engines: the two exchanges that synchronised BatchNorm needs, on libraries that have them.

A library is imported when an engine is made or first called with its arrays, so cunorm depends on none of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cunorm.core.arrays import Array, integer, said


def _missing(error: ModuleNotFoundError, engine: str, extra: str) -> ModuleNotFoundError:
    """The error for an engine whose library, of an extra of cunorm, is not installed."""
    return ModuleNotFoundError(f"{engine}: {error}; type: pip install 'cunorm[{extra}]'", name=error.name)


@runtime_checkable
class Engine(Protocol):
    """The functions that a group of processes needs for synchronised BatchNorm.

    Any object with these three attributes is an engine. Arrays are C-contiguous NumPy or CuPy arrays of dtype int64,
    float32 or float64. Each function is collective: all ranks call it, in the same order and with the same sizes. A
    CuPy array is read and written in the order of CuPy's current stream of its GPU.

    Attributes
    ----------
    size : int
        Number of processes.

    Examples
    --------
    An engine that counts the bytes a process sends:

    >>> import numpy as np
    >>> from cunorm.distributed import Engine, LocalEngine, sync_batch_norm
    >>> class Counting(LocalEngine):
    ...     sent = 0
    ...     def all_gather(self, send, receive):
    ...         self.sent += send.nbytes
    ...         super().all_gather(send, receive)
    >>> engine = Counting()
    >>> isinstance(engine, Engine)
    True
    >>> y, saved = sync_batch_norm(np.ones((2, 8, 3, 3), np.float32), engine=engine)
    >>> engine.sent  # two words, and 8 means and invstds of 4 bytes
    80
    """

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_gather(self, send: Array, receive: Array) -> None:
        r"""Copy the array of rank r to ``receive[r]``, for all ranks.

        Parameters
        ----------
        send : array
            Any shape. `sync_batch_norm` passes int64.
        receive : array
            Shape (size, \*send.shape), dtype of send.
        """

    def all_reduce(self, buffer: Array) -> None:
        """Replace an array by the sum of this array over all ranks.

        Parameters
        ----------
        buffer : array
            Any shape. `sync_batch_norm_backward` passes float32 or float64.
        """


class LocalEngine:
    """The engine of one process, which exchanges nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm.distributed import LocalEngine, sync_batch_norm
    >>> x = np.array([[1, 2], [3, 6], [5, 10]], dtype=np.float32)
    >>> y, saved = sync_batch_norm(x, engine=LocalEngine())
    >>> saved.mean, saved.counts
    (array([3., 6.], dtype=float32), array([3]))
    """

    size = 1

    def all_gather(self, send: Array, receive: Array) -> None:
        """Copy ``send`` to ``receive[0]``."""
        receive[0] = send

    def all_reduce(self, buffer: Array) -> None:
        """Leave the buffer unchanged: the sum over one process."""


class TorchEngine:
    """Process groups of torch.distributed: gloo for NumPy arrays, NCCL for CuPy arrays.

    Arrays are passed to PyTorch without a copy. CuPy arrays are exchanged in the order of CuPy's current stream, and
    the process does not wait for the GPU.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        None: the default group.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    ValueError
        If torch.distributed is not initialised, or this process does not belong to the group.

    Examples
    --------
    A group of one process; with several, each passes its own rank:

    >>> import numpy as np
    >>> import torch.distributed as dist
    >>> from cunorm.distributed import TorchEngine, sync_batch_norm
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> engine = TorchEngine()
    >>> engine.size
    1
    >>> y, saved = sync_batch_norm(np.array([[1], [3]], np.float32), engine=engine)
    >>> y.round(3).tolist()
    [[-1.0], [1.0]]
    >>> dist.destroy_process_group()
    """

    def __init__(self, group: Any = None) -> None:
        try:
            import torch.distributed
        except ModuleNotFoundError as error:
            raise _missing(error, "TorchEngine", "torch") from None
        if not torch.distributed.is_available():
            raise ImportError("this PyTorch is built without torch.distributed")
        self._library, self._group = torch.distributed, group
        # all_gather_into_tensor is the name in PyTorch before 2.14, which later versions warn of.
        single: Any = getattr(torch.distributed, "all_gather_single", None)
        self._gather = single or torch.distributed.all_gather_into_tensor
        self._size = int(torch.distributed.get_world_size(group))
        if self._size < 1:
            raise ValueError("group: this process does not belong to it, expected a group that contains this process")

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def all_gather(self, send: Array, receive: Array) -> None:
        """Gather with ``torch.distributed.all_gather_single``, or its old name ``all_gather_into_tensor``."""
        with _torch_on_stream_of(send):
            self._gather(_tensor(receive.reshape(-1)), _tensor(send.reshape(-1)), group=self._group)

    def all_reduce(self, buffer: Array) -> None:
        """Sum with ``torch.distributed.all_reduce``."""
        with _torch_on_stream_of(buffer):
            self._library.all_reduce(_tensor(buffer), group=self._group)


def _tensor(array: Array) -> Any:
    """A tensor in the memory of an array."""
    import torch
    from torch.utils.dlpack import from_dlpack

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)


def _torch_on_stream_of(array: Array) -> AbstractContextManager[Any]:
    """Make CuPy's current stream the current stream of PyTorch: NCCL waits for it, and it waits for NCCL."""
    if isinstance(array, np.ndarray):
        return nullcontext()
    import cupy
    import torch

    ordinal = int(array.data.device_id)
    pointer, cuda = cupy.cuda.get_current_stream(ordinal).ptr, torch.cuda
    # ExternalStream(0) would be a new stream, not the default one, which is 0 for both libraries.
    stream: Any = cuda.ExternalStream(pointer, ordinal) if pointer > 1 else cuda.default_stream(ordinal)  # type: ignore[no-untyped-call,unused-ignore]
    current: AbstractContextManager[Any] = cuda.stream(stream)
    return current


class NcclEngine:
    """NCCL through ``cupyx.distributed``, for CuPy arrays.

    The exchange runs on CuPy's current stream, and the process does not wait for the GPU. NCCL is not a part of CuPy:
    the module ``cupy.cuda.nccl`` needs the library.

    Parameters
    ----------
    backend : cupyx.distributed.NCCLBackend
        The result of ``cupyx.distributed.init_process_group``.
    size : int
        Number of processes, the ``n_devices`` of ``init_process_group``: the backend has no public attribute for it.

    Raises
    ------
    TypeError, ValueError
        If ``backend`` has no `all_gather` and `all_reduce`, or ``size`` is not a positive int.

    Examples
    --------
    One process per GPU; ``rank`` is this process's:

    >>> import cupyx.distributed  # doctest: +SKIP
    >>> cupy.cuda.Device(rank).use()  # doctest: +SKIP
    >>> backend = cupyx.distributed.init_process_group(2, rank)  # doctest: +SKIP
    >>> engine = cunorm.distributed.NcclEngine(backend, 2)  # doctest: +SKIP
    """

    def __init__(self, backend: Any, size: int) -> None:
        if not (hasattr(backend, "all_gather") and hasattr(backend, "all_reduce")):
            raise TypeError(f"backend: {said(backend)}, expected the result of cupyx.distributed.init_process_group")
        self._backend, self._size = backend, integer("size", size)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def all_gather(self, send: Array, receive: Array) -> None:
        """Gather with the backend's `all_gather`."""
        self._backend.all_gather(send, receive, send.size)

    def all_reduce(self, buffer: Array) -> None:
        """Sum with the backend's `all_reduce`, in place."""
        self._backend.all_reduce(buffer, buffer, "sum")


class MpiEngine:
    """A communicator of mpi4py, for NumPy arrays.

    CuPy arrays need an MPI that is built for CUDA. MPI knows no streams, so before each exchange of a CuPy array the
    process waits for CuPy's current stream. `TorchEngine` with NCCL and `NcclEngine` do not wait.

    Start a program with ``mpiexec -n 2 python -m mpi4py program.py``: without ``-m mpi4py``, an exception in one
    process leaves the others waiting for it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        None: ``MPI.COMM_WORLD``.

    Raises
    ------
    ImportError
        If mpi4py is not installed.
    TypeError
        If ``comm`` is not a communicator.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from cunorm.distributed import MpiEngine
    >>> MpiEngine(MPI.COMM_SELF).size
    1
    """

    def __init__(self, comm: Any = None) -> None:
        try:
            from mpi4py import MPI
        except ModuleNotFoundError as error:
            raise _missing(error, "MpiEngine", "mpi") from None
        if not isinstance(comm, (MPI.Intracomm, type(None))):
            raise TypeError(f"comm: {said(comm)}, expected an mpi4py.MPI.Intracomm")
        self._comm, self._in_place = MPI.COMM_WORLD if comm is None else comm, MPI.IN_PLACE
        self._size = int(self._comm.Get_size())

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._size

    def all_gather(self, send: Array, receive: Array) -> None:
        """Gather with ``Allgather``."""
        _wait_for_stream(send)
        self._comm.Allgather(send, receive)

    def all_reduce(self, buffer: Array) -> None:
        """Sum with ``Allreduce``, in place."""
        _wait_for_stream(buffer)
        self._comm.Allreduce(self._in_place, buffer)


def _wait_for_stream(array: Array) -> None:
    """Wait until an array of CuPy is written; MPI reads it at once."""
    if not isinstance(array, np.ndarray):
        import cupy

        cupy.cuda.get_current_stream(int(array.data.device_id)).synchronize()
