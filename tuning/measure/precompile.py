"""Compiles kernels in separate processes before they are measured. This only fills caches.

Both texts that `Plan.compile` compiles are compiled as plans do it: the generic one by `executor.compile`, whose binary
is in CuPy's cache (or in the CPU executor's), the specialised one by `executor.build`, which writes a file. The worker
then times the same kernels that users call. A generation is compiled before its race begins, so that nothing else uses
the GPU while times are taken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from cunorm.core.strategy import Tile
from cunorm.jit import sources
from cunorm.runtime.specialised import Specialised

from ..search.space import Space
from .session import Spec
from .worker import Worker

MOST = 4  # maximum number of processes: each occupies memory on the GPU
SECONDS = 180  # deadline for one kernel text


class Precompiler:
    """Processes that compile kernels ahead.

    Parameters
    ----------
    spec : Spec
        Spec of the worker whose caches are filled.
    processes : int
        Number of processes; with 0, nothing is compiled ahead.
    """

    def __init__(self, spec: Spec, processes: int) -> None:
        self._spec = replace(spec, clock=None)
        # The generic text is first: the plan needs it even if the specialised one does not compile.
        self._wanted = sources.TEXTS if Specialised(spec.kind, True).waiting else sources.TEXTS[:1]
        self._texts: queue.Queue[tuple[sources.Text, str, str] | None] = queue.Queue()
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
        """Queue the kernels of some tiles for compilation; returns at once."""
        if not self._threads:
            return
        for tile in tiles:
            strategy = space.strategy(tile)
            for launch in strategy.launches(space.problem, tile):
                for text in self._wanted:
                    code = sources.kernel_text(launch, space.problem, strategy, tile, text)
                    if code not in self._seen:
                        self._seen.add(code)
                        self._texts.put((text, code, launch.entry))

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until every submitted kernel has been compiled or has failed, or until `stopped` returns True."""
        while self._texts.unfinished_tasks and not stopped():
            self._over.wait(0.02)

    def _work(self) -> None:
        with Worker(self._spec, self._over.is_set) as worker:
            while (job := self._texts.get()) is not None:
                try:
                    if not self._over.is_set():
                        worker.ask("warm", *job, seconds=SECONDS)
                except Exception:  # the worker that measures will meet and report the same error
                    worker.close()
                finally:
                    self._texts.task_done()

    def close(self) -> None:
        """End the processes, even if they are busy."""
        self._over.set()
        for _ in self._threads:
            self._texts.put(None)
        for thread in self._threads:
            thread.join()
