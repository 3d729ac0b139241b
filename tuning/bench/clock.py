"""The clocks of the bench: kernels in graphs, and whole calls as a caller waits for them.

`Clock` and `GraphClock` of the tuner time cunorm's launches. What torch launches is captured into a graph by torch,
whose allocator has to know of it, and timed the same way; what cannot be captured, by events around calls that the GPU
is kept behind with, so that it does not wait for the host between them. A clock says which of these it was.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cunorm.core.devices import Device

from ..measure.clock import GraphClock, lasting, sets_of

#: For calls that cannot be captured, a kernel that only waits holds the queue: as many times as long as the host took
#: for such calls, at most so many seconds, at so many clock cycles a second, which no GPU of today exceeds.
HELD, MOST_HELD, CYCLES = 2, 0.2, 3e9
WARM = 3  # runs of a peer before anything is captured


class BenchClock(Protocol):
    """What the bench measures with."""

    #: Whether the samples are times of kernels on a GPU.
    measures: bool

    def sets(self, nbytes: int, device: Device) -> int:
        """How many sets of arrays of that size to walk through."""

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """How the kernels of a run are timed, and what takes one sample, in seconds a run.

        Parameters
        ----------
        run : callable
            Launches what is timed on one of the sets.
        sets : int
        by_torch : bool
            Whether torch launches it.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """Where torch works: what is prepared for `kernels` is prepared in it, and what torch launches runs in it."""

    def wall(self, call: Callable[[], Any]) -> float:
        """Seconds of one call until its results are there, Python's share included."""

    def copies(self) -> dict[str, float]:
        """Bytes per second that copies move on this device now, by the copy's name."""

    def sound(self) -> bool:
        """Whether the device still works: an error of CUDA may be one after which nothing does."""


class GpuClock:
    """Times on CuPy's current device."""

    measures = True

    def __init__(self) -> None:
        self._own = GraphClock()
        import cupy

        self._cupy: Any = cupy
        self._stream: Any = None  # torch's, once there is one
        self._failed: list[Any] = []

    def sets(self, nbytes: int, device: Device) -> int:
        """As the protocol says; within the free memory, of which what the problem before left is part."""
        gc.collect()  # autograd's graphs hold each other
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return self._own.sets(nbytes, device)

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """As the protocol says; by replays of a graph, where the launches can be captured."""
        if not by_torch:
            return "graph", self._own.sampler(None, run, sets)
        torch = importlib.import_module("torch")
        with self.beside():
            for index in range(min(sets, WARM)):
                run(index)  # compiles, tunes, allocates
        torch.cuda.synchronize()
        try:
            return "graph", lasting(lambda launches: self._captured(torch, run, sets, launches), sets)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it waits for the GPU, or allocates what cannot be captured
            torch.cuda.synchronize()
            held = lasting(lambda launches: self._held(torch, run, sets, launches), sets)
            reason = str(error).strip().partition("\n")[0]
            return f"events, since a graph cannot capture it: {reason}", held

    def beside(self) -> AbstractContextManager[Any]:
        """As the protocol says: autograd runs a gradient on the stream of its forward, and that is what is captured."""
        torch = importlib.import_module("torch")
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def _captured(self, torch: Any, run: Callable[[int], Any], sets: int, launches: int) -> Callable[[], float]:
        graph, kept = torch.cuda.CUDAGraph(), [None] * sets
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                _walk(run, launches, kept)
        except RuntimeError:
            torch.cuda.set_stream(before)  # which the capture leaves out when its end fails
            self._failed.append(graph)  # torch's allocator goes on asking it whose memory it takes
            raise

        def sample(keep: Any = kept) -> float:
            with self.beside():
                graph.replay()  # untimed: while it runs, the host gets ahead with what is timed
                return _timed(torch, graph.replay, launches)

        return sample

    def _held(self, torch: Any, run: Callable[[int], Any], sets: int, launches: int) -> Callable[[], float]:
        kept = [None] * sets
        with self.beside():
            begun = time.perf_counter()
            _walk(run, launches, kept)
            host = time.perf_counter() - begun
        cycles = int(CYCLES * min(MOST_HELD, HELD * host))

        def sample() -> float:
            with self.beside():
                torch.cuda._sleep(cycles)  # the host gets ahead meanwhile
                return _timed(torch, lambda: _walk(run, launches, kept), launches)

        return sample

    def wall(self, call: Callable[[], Any]) -> float:
        """As the protocol says."""
        self._cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        self._cupy.cuda.Device().synchronize()
        return time.perf_counter() - begin

    def copies(self) -> dict[str, float]:
        """As the protocol says."""
        return self._own.copies()

    def sound(self) -> bool:
        """As the protocol says."""
        try:
            self._cupy.cuda.Device().synchronize()
            return bool(self._cupy.ones(1).get()[0] == 1)
        except Exception:  # that is the answer
            return False


def _walk(run: Callable[[int], Any], launches: int, kept: list[Any]) -> None:
    """Launch on the sets in turn. Each has its own results, as it has its own arrays: an allocator that got them back
    at once would give the same ones to the next, which would find them in the L2.
    """
    for index in range(launches):
        kept[index % len(kept)] = run(index % len(kept))


def _timed(torch: Any, work: Callable[[], Any], launches: int) -> float:
    """Seconds a launch, between events on torch's current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / launches


class RehearsalClock:
    """Runs everything on the CPU executor and times nothing that is worth telling: its samples are all zero."""

    measures = False

    def sets(self, nbytes: int, device: Device) -> int:
        """One would do; two, so that the walk through them is walked."""
        return min(2, sets_of(nbytes, device, 2**62))

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """As the protocol says."""

        def sample() -> float:
            for index in range(sets):
                run(index)
            return 0.0

        return "rehearsed", sample

    def beside(self) -> AbstractContextManager[Any]:
        """As the protocol says."""
        return contextlib.nullcontext()

    def wall(self, call: Callable[[], Any]) -> float:
        """As the protocol says."""
        call()
        return 0.0

    def copies(self) -> dict[str, float]:
        """None is known."""
        return {}

    def sound(self) -> bool:
        """There is no device to lose."""
        return True
