"""The clocks of the bench: they time kernels in graphs, and whole calls until their results exist.

The tuner's `GraphClock` times cunorm's launches. Torch's launches are captured into a graph by torch, because torch's
allocator must know of the capture, and are timed in the same way. Calls that cannot be captured are timed by events
around them. Before these calls, a kernel that only waits delays the GPU, so that the GPU does not wait for the host
between the calls. A clock reports which method it used.
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

#: The kernel that delays the GPU for calls that cannot be captured: its duration in multiples of the host's time for
#: the calls, its maximum duration in seconds, and the clock cycles per second, which no current GPU exceeds.
HELD, MOST_HELD, CYCLES = 2, 0.2, 3e9
WARM = 3  # maximum number of runs of a peer before the capture


class BenchClock(Protocol):
    """The interface of the bench's clocks."""

    #: Whether the samples are times of kernels on a GPU.
    measures: bool

    def sets(self, nbytes: int, device: Device) -> int:
        """Number of sets of `nbytes` to walk through."""

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """The method by which a run's kernels are timed, and a function that takes one sample, in seconds per run.

        Parameters
        ----------
        run : callable
            Launches the timed kernels on one of the sets.
        sets : int
        by_torch : bool
            Whether torch launches the kernels.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """The context in which torch's calls are prepared for `kernels`, and in which torch launches its kernels."""

    def wall(self, call: Callable[[], Any]) -> float:
        """Seconds of one call until its results exist, including the time in Python."""

    def copies(self) -> dict[str, float]:
        """Measure the bytes per second of copies on this device, by the copy's name."""

    def sound(self) -> bool:
        """Whether the device still works: after some CUDA errors every call fails."""


class GpuClock:
    """Times kernels and calls on CuPy's current device."""

    measures = True

    def __init__(self) -> None:
        self._own = GraphClock()
        import cupy

        self._cupy: Any = cupy
        self._stream: Any = None  # torch's stream, created when first needed
        self._failed: list[Any] = []

    def sets(self, nbytes: int, device: Device) -> int:
        """See `BenchClock.sets`. First frees the memory of the previous problem, so that it counts as free."""
        gc.collect()  # autograd's graphs contain reference cycles
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return self._own.sets(nbytes, device)

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """See `BenchClock.kernels`. A sample is a replay of a graph if the launches can be captured."""
        if not by_torch:
            return "graph", self._own.sampler(None, run, sets)
        torch = importlib.import_module("torch")
        with self.beside():
            for index in range(min(sets, WARM)):
                run(index)  # the first runs compile, tune and allocate
        torch.cuda.synchronize()
        try:
            return "graph", lasting(lambda launches: self._captured(torch, run, sets, launches), sets)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the run waits for the GPU, or allocates in a way that cannot be captured
            torch.cuda.synchronize()
            held = lasting(lambda launches: self._held(torch, run, sets, launches), sets)
            reason = str(error).strip().partition("\n")[0]
            return f"events, because a graph cannot capture it: {reason}", held

    def beside(self) -> AbstractContextManager[Any]:
        """See `BenchClock.beside`. Autograd runs a gradient on its forward's stream, and this stream is captured."""
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
            torch.cuda.set_stream(before)  # the capture does not restore the stream if its end fails
            self._failed.append(graph)  # keep it: torch's allocator still calls it to find the owner of memory
            raise

        def sample(keep: Any = kept) -> float:
            with self.beside():
                graph.replay()  # untimed: while it runs, the host enqueues the timed replay
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
                torch.cuda._sleep(cycles)  # meanwhile the host enqueues the timed calls
                return _timed(torch, lambda: _walk(run, launches, kept), launches)

        return sample

    def wall(self, call: Callable[[], Any]) -> float:
        """See `BenchClock.wall`."""
        self._cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        call()
        self._cupy.cuda.Device().synchronize()
        return time.perf_counter() - begin

    def copies(self) -> dict[str, float]:
        """See `BenchClock.copies`."""
        return self._own.copies()

    def sound(self) -> bool:
        """See `BenchClock.sound`."""
        try:
            self._cupy.cuda.Device().synchronize()
            return bool(self._cupy.ones(1).get()[0] == 1)
        except Exception:  # any error means that the device is unusable
            return False


def _walk(run: Callable[[int], Any], launches: int, kept: list[Any]) -> None:
    """Launch on the sets in turn, and keep the results of each set until its next launch.

    Otherwise the allocator would reuse the memory of the results for the next launch, which would find it in the L2.
    """
    for index in range(launches):
        kept[index % len(kept)] = run(index % len(kept))


def _timed(torch: Any, work: Callable[[], Any], launches: int) -> float:
    """Seconds per launch between two events on torch's current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / launches


class RehearsalClock:
    """Runs everything on the CPU executor and times nothing: its samples are all zero."""

    measures = False

    def sets(self, nbytes: int, device: Device) -> int:
        """At most two sets: one set would not test the walk through the sets."""
        return min(2, sets_of(nbytes, device, 2**62))

    def kernels(self, run: Callable[[int], Any], sets: int, by_torch: bool) -> tuple[str, Callable[[], float]]:
        """See `BenchClock.kernels`. A sample runs every set once and is 0."""

        def sample() -> float:
            for index in range(sets):
                run(index)
            return 0.0

        return "rehearsed", sample

    def beside(self) -> AbstractContextManager[Any]:
        """See `BenchClock.beside`. The context does nothing."""
        return contextlib.nullcontext()

    def wall(self, call: Callable[[], Any]) -> float:
        """Run the call once and return 0."""
        call()
        return 0.0

    def copies(self) -> dict[str, float]:
        """Return no bandwidths."""
        return {}

    def sound(self) -> bool:
        """Return True: the CPU is always usable."""
        return True
