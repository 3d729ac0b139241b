"""How long a launch takes: CUDA graphs of launches that walk through sets of arrays larger than the L2 cache.

A clock turns "run this plan on set number i" into samples. `GraphClock` is the only one whose samples are a kernel's
times; tests put others in its place, and what those say is never stored as measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

from cunorm.core.devices import Device
from cunorm.core.strategy import Tile

#: Times the L2 that the sets of arrays hold together, so that no launch finds its own in it.
L2_TIMES = 3
MOST_SETS = 256
FREE_SHARE = 0.25  # of the free memory that the sets may take
SAMPLE_SECONDS = 200e-6  # that a sample lasts at least: 400 times the resolution of an event
FEWEST, MOST = 4, 256  # launches in a graph; whole walks through the sets, so up to one more
#: Of the copy that the roofline is measured with: its bytes, copies in a row that one sample takes, samples, and
#: seconds of copies before them, in which the GPU's clocks rise.
COPY_BYTES, COPIES, COPY_SAMPLES, WARM_SECONDS = 2**28, 4, 9, 0.1


def sets_of(nbytes: int, device: Device, free: int) -> int:
    """How many sets of arrays to walk through.

    Parameters
    ----------
    nbytes : int
        Of one set.
    device : Device
    free : int
        Bytes of memory that are free.
    """
    wanted = math.ceil(L2_TIMES * device.l2_bytes / max(1, nbytes))
    return max(1, min(wanted, MOST_SETS, int(FREE_SHARE * free) // max(1, nbytes)))


def lasting(made: Callable[[int], Callable[[], float]], sets: int) -> Callable[[], float]:
    """A sampler of so many launches that a sample lasts `SAMPLE_SECONDS`, whole walks through the sets.

    Parameters
    ----------
    made : callable
        A number of launches -> a sampler of them, in seconds a launch.
    sets : int
    """
    fewest = math.ceil(FEWEST / sets) * sets
    few = made(fewest)
    few()  # the first replay uploads a graph
    launches = max(fewest, min(MOST, math.ceil(SAMPLE_SECONDS / max(few(), 1e-9))))
    launches = math.ceil(launches / sets) * sets  # every set as often, or slow tiles would find theirs in the L2
    if launches == fewest:
        return few
    many = made(launches)
    many()
    return many


class Clock(Protocol):
    """What a worker measures with."""

    #: Whether the samples are times of kernels on a GPU.
    measures: bool

    def sets(self, nbytes: int, device: Device) -> int:
        """How many sets of arrays of that size to walk through."""

    def sampler(self, tile: Tile, run: Callable[[int], None], sets: int) -> Callable[[], float]:
        """What takes one sample, in seconds a launch.

        Parameters
        ----------
        tile : Tile
        run : callable
            Launches all kernels of the plan on one of the sets.
        sets : int
        """

    def bandwidth(self) -> float:
        """Bytes per second that a copy moves on this device."""


class GraphClock:
    """Times on CuPy's current device."""

    measures = True

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self._stream: Any = cupy.cuda.Stream(non_blocking=True)

    def sets(self, nbytes: int, device: Device) -> int:
        """As the protocol says; within the free memory."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        return sets_of(nbytes, device, int(self._cupy.cuda.runtime.memGetInfo()[0]))

    def _graph(self, run: Callable[[int], None], sets: int, launches: int) -> Callable[[], float]:
        begin, end = (self._cupy.cuda.Event() for _ in range(2))
        with self._stream:
            self._stream.begin_capture()
            try:
                for index in range(launches):
                    run(index % sets)
            finally:
                graph = self._stream.end_capture()

        def sample() -> float:
            graph.launch(self._stream)  # untimed: while it runs, the host gets ahead with what is timed
            begin.record(self._stream)
            graph.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            milliseconds = float(self._cupy.cuda.get_elapsed_time(begin, end))
            return milliseconds / 1e3 / launches

        return sample

    def sampler(self, tile: Tile | None, run: Callable[[int], None], sets: int) -> Callable[[], float]:
        """As the protocol says: one replay of a graph that lasts at least `SAMPLE_SECONDS`."""
        with self._stream:
            run(0)  # loads the kernel, and raises its shared memory's cap: neither can be captured
        self._stream.synchronize()
        return lasting(lambda launches: self._graph(run, sets, launches), sets)

    @functools.lru_cache(maxsize=1)  # noqa: B019  # one clock a process
    def bandwidth(self) -> float:
        """As the protocol says: of the faster of two copies, in their medians."""
        return max(self.copies().values())

    def copies(self) -> dict[str, float]:
        """Bytes per second, read and written, of copies from device memory to device memory: the driver's, and a
        kernel's with 16 bytes a thread; medians of what is measured now.
        """
        source, target = (self._cupy.zeros(COPY_BYTES // 16, self._cupy.complex128) for _ in range(2))
        kernel = self._cupy.ElementwiseKernel("complex128 x", "complex128 y", "y = x", "cunorm_copy")
        kind = self._cupy.cuda.runtime.memcpyDeviceToDevice
        self._cupy.cuda.Device().synchronize()  # the zeros come on another stream
        ways: dict[str, Callable[[], Any]] = {
            "driver": lambda: self._cupy.cuda.runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, COPY_BYTES, kind, self._stream.ptr
            ),
            "kernel": lambda: kernel(source, target),
        }
        return {name: 2 * COPY_BYTES / self._median(copy) for name, copy in ways.items()}

    def _median(self, copy: Callable[[], Any]) -> float:
        """Seconds of a copy."""
        begin, end = (self._cupy.cuda.Event() for _ in range(2))
        found: list[float] = []
        spent = 0.0
        with self._stream:
            copy()  # a kernel is compiled
            while spent < WARM_SECONDS or len(found) < COPY_SAMPLES:
                if spent < WARM_SECONDS:
                    found.clear()
                copy()  # untimed, as above
                begin.record(self._stream)
                for _ in range(COPIES):
                    copy()
                end.record(self._stream)
                end.synchronize()
                seconds = float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3
                spent += seconds
                found.append(seconds / COPIES)
        return sorted(found)[len(found) // 2]
