"""Run the launches of plans on the simulator in place of an executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.simulator import machine
from benchmarks.simulator.machine import Launch
from cunorm.executors.cpu.guarded_arrays import Region, regions_of
from cunorm.jit.sources import Text
from cunorm.runtime.plans import Plan
from cunorm.runtime.specialised import are_assumed

#: Clusters that are alive at a time if blocks wait for each other.
WAITING = 4


def launches(
    plan: Plan, values: Sequence[int | float], memory: Sequence[Region], text: Text = "generic"
) -> list[Launch]:
    """The launches of a plan.

    Parameters
    ----------
    plan : Plan
    values : sequence of int or float
        Addresses and numbers, as in `Plan.run`.
    memory : sequence of Region
        The arrays at these addresses.
    text : str
        Which of the kernels' texts.
    """
    steps, constants = plan.steps(machine.kernel_of, text)
    everything = (*values, *constants)
    found = []
    for kernel, grid, threads, shared_bytes, pick, cluster, resident in steps:
        alive = min(resident, WAITING) if resident else 1
        found.append(Launch(kernel, grid, threads, shared_bytes, pick(everything), memory, cluster, alive))
    return found


@contextlib.contextmanager
def simulated(
    see: Callable[[Launch, np.ndarray[Any, Any]], None] | None = None, text: Text = "generic"
) -> Iterator[None]:
    """Within this context, calls with arrays on the CPU run the machine code of their kernels on the simulator.

    Parameters
    ----------
    see : callable, optional
        Receives each launch and its counters.
    text : str
        Which of the kernels' texts. A call with a misaligned array always runs the generic one.
    """

    def run(plan: Plan, values: Sequence[int | float], sizes: Sequence[int] = (), assumed: bool | None = None) -> None:
        assumed = are_assumed([int(values[place]) for place in plan.assumed_addresses()])
        for launch in launches(plan, values, regions_of(plan.names, values, sizes), text if assumed else "generic"):
            counters = machine.run(launch)
            if see is not None:
                see(launch, counters)

    with mock.patch.object(Plan, "run", run):
        yield
