"""Prepares the inputs and the oracle of the next problems in other processes, while the GPU runs the present one.

The oracle is float64 NumPy: for a large problem it takes longer than all times of all contenders.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from cunorm.core import settings
from cunorm.core.problem import Problem

from ..verify.inputs import Inputs, inputs_of
from ..verify.oracle import Expected, expected

#: Inputs of a problem, and the results that the oracle computes from them.
Prepared = tuple[Inputs, list[Expected]]
#: Largest number of processes: each needs some gigabytes for a large problem.
MOST = 8


def prepared(problem: Problem, seed: int) -> Prepared:
    """The plain inputs of a problem and its oracle."""
    given = inputs_of(problem, seed, hostile=False)
    return given, expected(problem, given)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C


def prepared_in_turn(
    problems: Sequence[Problem], seed: int, processes: int | None = None
) -> Generator[Callable[[], Prepared], None, None]:
    """Yield for each problem, in their order, a function that waits for the result of `prepared` and returns it.

    Parameters
    ----------
    problems : sequence of Problem
    seed : int
    processes : int, optional
        Number of processes that prepare the next problems; with 0, this process prepares each when it is its turn.
        None: half of the cores, at most `MOST`, and none if there is only one problem.
    """
    if processes is None:
        processes = min(MOST, settings.cores() // 2) if len(problems) > 1 else 0
    if not processes:
        yield from (partial(prepared, problem, seed) for problem in problems)
        return
    context = multiprocessing.get_context("spawn")  # a forked child could not use the parent's CUDA context
    pool = ProcessPoolExecutor(processes, context, _ignore_interrupts)
    all_taken = False
    try:
        waiting: deque[Callable[[], Prepared]] = deque()
        for problem in problems:
            waiting.append(pool.submit(prepared, problem, seed).result)
            if len(waiting) > processes:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
        all_taken = True
    finally:
        # A function that was taken can still be called after the last turn, so its problem must not be cancelled.
        pool.shutdown(wait=False, cancel_futures=not all_taken)
