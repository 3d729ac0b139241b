"""Times launches: CUDA graphs of launches that walk through sets of arrays larger than the L2 cache.

A clock takes a function that runs a plan on set number i and returns samples. Only the samples of `GraphClock` are
times of kernels. Tests replace it by other clocks, whose samples are never stored as measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

from cunorm.core.devices import Device
from cunorm.core.strategy import Tile

#: Size of all sets of arrays together, in multiples of the L2 size. A launch must not find its own arrays in the L2.
L2_TIMES = 3
MOST_SETS = 256
FREE_SHARE = 0.25  # maximum share of the free memory that the sets occupy
SAMPLE_SECONDS = 200e-6  # minimum duration of a sample: 400 times the resolution of an event
FEWEST, MOST = 4, 256  # launches in a graph, rounded up to whole walks through the sets
#: The copy that measures the roofline: bytes, copies per sample, samples, and seconds of warm-up copies, during which
#: the GPU's clocks rise.
COPY_BYTES, COPIES, COPY_SAMPLES, WARM_SECONDS = 2**28, 4, 9, 0.1


def sets_of(nbytes: int, device: Device, free: int) -> int:
    """Number of sets of arrays to walk through.

    Parameters
    ----------
    nbytes : int
        Bytes of one set.
    device : Device
    free : int
        Bytes of free memory.
    """
    wanted = math.ceil(L2_TIMES * device.l2_bytes / max(1, nbytes))
    return max(1, min(wanted, MOST_SETS, int(FREE_SHARE * free) // max(1, nbytes)))


def lasting(made: Callable[[int], Callable[[], float]], sets: int) -> Callable[[], float]:
    """A sampler with enough launches for a sample of `SAMPLE_SECONDS`, at most `MOST`, in whole walks through the sets.

    Parameters
    ----------
    made : callable
        Number of launches -> a sampler of these launches, in seconds per launch.
    sets : int
    """
    fewest = math.ceil(FEWEST / sets) * sets
    few = made(fewest)
    few()  # the first replay uploads a graph
    launches = max(fewest, min(MOST, math.ceil(SAMPLE_SECONDS / max(few(), 1e-9))))
    launches = math.ceil(launches / sets) * sets  # else slow tiles would use few sets, which fit in the L2
    if launches == fewest:
        return few
    many = made(launches)
    many()
    return many


class Clock(Protocol):
    """The interface of a worker's clock."""

    #: Whether the samples are times of kernels on a GPU.
    measures: bool

    def sets(self, nbytes: int, device: Device) -> int:
        """Number of sets of `nbytes` to walk through."""

    def sampler(self, tile: Tile | None, run: Callable[[int], None], sets: int) -> Callable[[], float]:
        """A function that takes one sample, in seconds per launch.

        Parameters
        ----------
        tile : Tile or None
            Only clocks of tests read it: a sample depends on what ``run`` launches.
        run : callable
            Launches all kernels of the plan on one of the sets.
        sets : int
        """

    def bandwidth(self) -> float:
        """Bytes per second that a copy moves on this device."""


class GraphClock:
    """Times launches on CuPy's current device."""

    measures = True

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self._stream: Any = cupy.cuda.Stream(non_blocking=True)

    def sets(self, nbytes: int, device: Device) -> int:
        """See `Clock.sets`. The sets occupy at most `FREE_SHARE` of the free memory."""
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
            graph.launch(self._stream)  # untimed: while it runs, the host enqueues the timed launch
            begin.record(self._stream)
            graph.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            milliseconds = float(self._cupy.cuda.get_elapsed_time(begin, end))
            return milliseconds / 1e3 / launches

        return sample

    def sampler(self, tile: Tile | None, run: Callable[[int], None], sets: int) -> Callable[[], float]:
        """See `Clock.sampler`. A sample is one replay of a graph (see `lasting` for its length)."""
        with self._stream:
            run(0)  # loads the kernel and raises its limit of shared memory: neither can be captured
        self._stream.synchronize()
        return lasting(lambda launches: self._graph(run, sets, launches), sets)

    @functools.lru_cache(maxsize=1)  # noqa: B019  # one clock per process
    def bandwidth(self) -> float:
        """See `Clock.bandwidth`. The higher median of two kinds of copy."""
        return max(self.copies().values())

    def copies(self) -> dict[str, float]:
        """Measure two copies in device memory: the driver's copy, and a kernel with 16 bytes per thread.

        Returns
        -------
        dict of str to float
            Bytes read and written per second, by ``"driver"`` and ``"kernel"``; medians.
        """
        source, target = (self._cupy.zeros(COPY_BYTES // 16, self._cupy.complex128) for _ in range(2))
        kernel = self._cupy.ElementwiseKernel("complex128 x", "complex128 y", "y = x", "cunorm_copy")
        kind = self._cupy.cuda.runtime.memcpyDeviceToDevice
        self._cupy.cuda.Device().synchronize()  # the arrays are filled on another stream
        ways: dict[str, Callable[[], Any]] = {
            "driver": lambda: self._cupy.cuda.runtime.memcpyAsync(
                target.data.ptr, source.data.ptr, COPY_BYTES, kind, self._stream.ptr
            ),
            "kernel": lambda: kernel(source, target),
        }
        return {name: 2 * COPY_BYTES / self._median(copy) for name, copy in ways.items()}

    def _median(self, copy: Callable[[], Any]) -> float:
        """Median seconds of a copy."""
        begin, end = (self._cupy.cuda.Event() for _ in range(2))
        found: list[float] = []
        spent = 0.0
        with self._stream:
            copy()  # compiles the kernel
            while spent < WARM_SECONDS or len(found) < COPY_SAMPLES:
                if spent < WARM_SECONDS:
                    found.clear()
                copy()  # untimed: while it runs, the host enqueues the timed copies
                begin.record(self._stream)
                for _ in range(COPIES):
                    copy()
                end.record(self._stream)
                end.synchronize()
                seconds = float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3
                spent += seconds
                found.append(seconds / COPIES)
        return sorted(found)[len(found) // 2]
