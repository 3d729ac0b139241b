"""Engines of ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

#: Seconds that a rank waits for another one.
PATIENCE = 30


class Threads:
    """Engines of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier, self.sent = threading.Barrier(size, timeout=PATIENCE), [np.empty(0)] * size
        self.ranks = [self.Rank(self, rank) for rank in range(size)]

    class Rank:
        def __init__(self, group: Threads, rank: int) -> None:
            self.group, self.rank, self.size = group, rank, len(group.sent)

        def _exchange(self, array: np.ndarray) -> list[np.ndarray]:
            self.group.barrier.wait()
            self.group.sent[self.rank] = array.copy()
            self.group.barrier.wait()
            return self.group.sent

        def all_gather(self, send: np.ndarray, receive: np.ndarray) -> None:
            for rank, array in enumerate(self._exchange(send)):
                words = min(array.size, send.size)
                receive[rank, :words] = array[:words]

        def all_reduce(self, buffer: np.ndarray) -> None:
            buffer[:] = sum(self._exchange(buffer))

    def run(self, work: Callable[[Any, int], None]) -> list[BaseException | None]:
        """Run ``work(engine, rank)`` on all ranks. Return their exceptions."""
        ended: list[BaseException | None] = [None] * len(self.ranks)

        def guarded(rank: int) -> None:
            try:
                work(self.ranks[rank], rank)
            except BaseException as error:
                ended[rank] = error

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ended
