"""Compiles kernels before they are measured, in processes of their own: that only warms caches.

They go the path that users go, `executor.compile`, and throw the kernel away: what is timed afterwards is the RawKernel
that users get, whose binary now comes out of CuPy's cache (or the CPU executor's). A generation is compiled before its
race begins, so that nothing else uses the GPU while the clock runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from cunorm.core.strategy import Tile
from cunorm.jit import sources

from ..search.space import Space
from .session import Spec
from .worker import Worker

MOST = 4  # processes that are worth their memory on a GPU
SECONDS = 180  # for one text


class Precompiler:
    """Processes that compile.

    Parameters
    ----------
    spec : Spec
        Of the worker whose caches are to be warm.
    processes : int
        With 0 nothing is compiled ahead.
    """

    def __init__(self, spec: Spec, processes: int) -> None:
        self._spec = replace(spec, clock=None)
        self._texts: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._seen: set[str] = set()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(processes)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, space: Space, tiles: Iterable[Tile]) -> None:
        """Have the kernels of some tiles compiled; returns at once."""
        if not self._threads:
            return
        for tile in tiles:
            strategy = space.strategy(tile)
            for launch in strategy.launches(space.problem, tile):
                text = sources.kernel_text(launch, space.problem, strategy, tile)
                if text not in self._seen:
                    self._seen.add(text)
                    self._texts.put((text, launch.entry))

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Until everything that was submitted is compiled, or has failed to be, or it is stopped."""
        while self._texts.unfinished_tasks and not stopped():
            self._over.wait(0.02)

    def _work(self) -> None:
        with Worker(self._spec, self._over.is_set) as worker:
            while (job := self._texts.get()) is not None:
                try:
                    if not self._over.is_set():
                        worker.ask("warm", *job, seconds=SECONDS)
                except Exception:  # whatever it is, the measuring worker meets the same, and says so
                    worker.close()
                finally:
                    self._texts.task_done()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._over.set()
        for _ in self._threads:
            self._texts.put(None)
        for thread in self._threads:
            thread.join()
