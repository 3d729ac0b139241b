"""Time launches on the simulated clock: the facts of each GPU, the blocks that are resident, and what a launch took.

The times are simulated, never measured. `docs/speed/simulated.md` says how far they are from published ones.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.simulator import machine
from benchmarks.simulator.cubin import Cubin
from benchmarks.simulator.machine import Launch
from benchmarks.simulator.records import PIPES, REASONS, Facts, Times
from cunorm.core.devices import PARTS, Device, known
from cunorm.core.errors import KernelFault

#: The L1 cache and shared memory share these bytes of a multiprocessor; the carve-outs that the driver chooses from.
SHARED_AND_L1 = 256 * 1024
CARVE_OUTS = tuple(1024 * size for size in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228))
LINE, HALF_LINE = 128, 64


@dataclass(frozen=True)
class Gpu:
    """What the clock knows of a GPU beyond the library's facts of the device.

    Attributes
    ----------
    device : Device
    clock : float
        Frequency of the multiprocessors under load, in Hz.
    copy : float
        Bytes per second that a copy reads and writes: the usable bandwidth of the DRAM.
    cycles : dict of str to float
        The other members of `records.Facts`.
    """

    device: Device
    clock: float
    copy: float
    cycles: dict[str, float] = field(default_factory=dict)


#: Latencies in cycles and rates in bytes per cycle of compute capability 9.0. Sources: Luo et al., "Benchmarking and
#: dissecting the Nvidia Hopper GPU architecture via microbenchmarking" (2024), for the caches, shared memory and
#: distributed shared memory. `peers.calibration` fitted dram_latency, block_latency and launch_latency to published
#: times. The fitted latency of the DRAM is twice that of an idle one (about 480 cycles in the same source): it also
#: stands for contention that the clock does not simulate. The others are estimates.
_HOPPER = {
    "l2_bytes": 3400.0,
    "port_bytes": 64.0,
    "l1_latency": 38.0,
    "l2_latency": 262.0,
    "dram_latency": 925.0,
    "shared_latency": 29.0,
    "remote_latency": 180.0,
    "shuffle_latency": 23.0,
    "constant_latency": 30.0,
    "special_latency": 25.0,
    "atomic_latency": 400.0,
    "barrier_latency": 20.0,
    "cluster_latency": 190.0,
    "fence_latency": 250.0,
    "launch_latency": 1110.0,
    "block_latency": 475.0,
}
GPUS: dict[str, Gpu] = {
    "H100": Gpu(known("H100"), 1.755e9, 3.07e12, _HOPPER | {"l2_capacity": 25e6, "dirty_capacity": 10e6}),
    "H200": Gpu(known("H200"), 1.755e9, 4.176e12, _HOPPER | {"l2_capacity": 30e6, "dirty_capacity": 10e6}),
}


@dataclass(frozen=True)
class Timing:
    """What the clock found of one launch.

    Attributes
    ----------
    seconds : float
    resident : int
        Blocks of the launch that fit on a multiprocessor together.
    issue : float
        Share of the issue slots that are used.
    dram : float
        Share of the time in which the DRAM transfers.
    pipes, waits : dict of str to float
        Share of the time in which each pipe is occupied; share of each reason in the time that warps wait.
    dram_read, dram_written, l2_hit : int
        Bytes.
    block_seconds : float
        Mean life of a block.
    counters : numpy.ndarray
        A record per instruction; see `records.Counter`.
    """

    seconds: float
    resident: int
    issue: float
    dram: float
    pipes: dict[str, float]
    waits: dict[str, float]
    dram_read: int
    dram_written: int
    l2_hit: int
    block_seconds: float
    counters: np.ndarray[Any, Any] = field(repr=False)


class Cache:
    """What the L2 cache holds before and after a launch. Launches of one call share a cache.

    A line is in the cache while less than its capacity has entered since the line was last used.

    Parameters
    ----------
    dirty : float
        Bytes that earlier launches wrote and the DRAM has not received yet.
    """

    def __init__(self, dirty: float = 0.0) -> None:
        self.dirty = dirty
        self.traffic = 1
        self._uses: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def uses(self, start: int, nbytes: int) -> np.ndarray[Any, Any]:
        """A word per half line of an array, see `records.Region`; 0: never used."""
        key = (start, nbytes)
        if key not in self._uses:
            self._uses[key] = np.zeros(nbytes // HALF_LINE + 2, np.uint64)
        return self._uses[key]


def flushed(gpu: Gpu) -> Cache:
    """The cache after much unrelated data was written, as benchmarks do: all that a launch writes costs a transfer."""
    return Cache(dirty=gpu.cycles["dirty_capacity"])


def resident(code: Cubin, launch: Launch, device: Device) -> int:
    """Blocks of a launch that a multiprocessor can hold, by its registers, shared memory, threads and blocks."""
    shared = code.shared_bytes + launch.shared_bytes
    return device.fitting_blocks(launch.block_threads, code.registers, shared, PARTS)


def _l1_lines(code: Cubin, launch: Launch, device: Device, blocks: int) -> int:
    """Lines of the L1 cache beside the shared memory of the resident blocks."""
    used = blocks * (code.shared_bytes + launch.shared_bytes + device.shared_memory_reserved)
    carved = next((size for size in CARVE_OUTS if size >= used), CARVE_OUTS[-1])
    return (SHARED_AND_L1 - carved) // LINE


def facts_of(gpu: Gpu, launch: Launch) -> Facts:
    """The engine's facts for a launch on a GPU.

    Raises
    ------
    ValueError
        If a multiprocessor cannot hold a block of the launch.
    """
    code, device = launch.kernel.code, gpu.device
    blocks = resident(code, launch, device)
    if blocks < 1:
        raise ValueError(f"{launch.kernel.code.entry}: a multiprocessor of {device.name} cannot hold one of its blocks")
    facts = Facts(multiprocessors=device.multiprocessors, resident=blocks)
    for index, size in enumerate(device.processing_clusters):
        facts.groups[index] = size
    for name, value in gpu.cycles.items():
        setattr(facts, name, value)
    facts.dram_bytes = gpu.copy / gpu.clock
    facts.l1_lines = _l1_lines(code, launch, device, blocks)
    return facts


def timed(launch: Launch, gpu: Gpu, cache: Cache | None = None) -> Timing:
    """Run a launch on the simulated clock.

    Parameters
    ----------
    launch : Launch
    gpu : Gpu
    cache : Cache, optional
        The L2 cache before the launch, which becomes the one after it. None: an empty one.

    Raises
    ------
    KernelFault
        See `machine.run`.
    ValueError
        See `facts_of`.
    """
    cache = cache or Cache()
    facts, times = facts_of(gpu, launch), Times(traffic=cache.traffic, dirty=cache.dirty)
    job, counters, kept = machine.job_of(launch, 0, launch.blocks)
    for index, region in enumerate(launch.memory):
        job.regions[index].uses = cache.uses(region.address, region.nbytes).ctypes.data
    if machine.engine().simulator_time(ctypes.byref(job), ctypes.byref(facts), ctypes.byref(times)) != 0:
        raise KernelFault(machine.sentence(launch, job, kept[3].value.decode()))
    cache.traffic, cache.dirty = times.traffic, times.dirty
    slots = times.cycles * PARTS * facts.multiprocessors
    waited = sum(times.waited) or 1.0
    return Timing(
        seconds=times.cycles / gpu.clock,
        resident=facts.resident,
        issue=times.issued / slots,
        dram=times.dram_busy / times.cycles,
        pipes={name: busy / slots for name, busy in zip(PIPES, times.pipe_busy, strict=True)},
        waits={name: part / waited for name, part in zip(REASONS, times.waited, strict=True)},
        dram_read=times.dram_read,
        dram_written=times.dram_written,
        l2_hit=times.l2_hit,
        block_seconds=times.block_cycles / gpu.clock,
        counters=np.ctypeslib.as_array(counters),
    )
