"""Run plans in the checked build: guard zones, detection of unwritten shared memory, counters, places of faults."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from cunorm.core.errors import KernelFault

from .guarded_arrays import GuardedCopies, Region

MOST_ARRAYS = 24
OTHER_POISON = 0x00
#: Files whose functions only forward a kernel's accesses, so that a fault is not attributed to them.
DOORS = re.compile(r"^(common/types\.cuh|common/async\.cuh|cunorm/executors/cpu/include/[\w/]+\.h)$")
SECTOR_BYTES = 32
#: struct Trace in counters.h.
TRACE = np.dtype([("sector", "u8"), ("block", "u4"), *((name, "u1") for name in ("warp", "phase", "region", "bytes"))])


@dataclass(frozen=True)
class Moves:
    """Traffic between kernels and global memory.

    Attributes
    ----------
    loaded, stored : int
        Bytes that warps access. A byte counts once per request, even if several lanes access it. A replay of the trace
        computes these.
    lane_loaded, lane_stored : int
        Bytes that lanes access through load and store, atomics and asynchronous copies, summed over the lanes.
    raw_loaded, raw_stored : int
        The same bytes, as counted by the compiler's hooks.
    load_requests, store_requests : int
        Requests of warps.
    load_sectors, store_sectors : int
        32-byte sectors that these requests touch.
    wide_bytes, wide_sectors : int
        Bytes and sectors of the 16-byte accesses.
    load_fetched, store_fetched : int
        32-byte sectors that blocks touch. A sector counts once per block and direction. A replay of the trace
        computes these.
    """

    loaded: int = 0
    stored: int = 0
    lane_loaded: int = 0
    lane_stored: int = 0
    raw_loaded: int = 0
    raw_stored: int = 0
    load_requests: int = 0
    store_requests: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    wide_bytes: int = 0
    wide_sectors: int = 0
    load_fetched: int = 0
    store_fetched: int = 0

    def __add__(self, other: Moves) -> Moves:
        return Moves(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Moves)))

    @property
    def nbytes(self) -> int:
        """Bytes that warps load and store."""
        return self.loaded + self.stored

    @property
    def lane_nbytes(self) -> int:
        """Bytes that lanes load and store."""
        return self.lane_loaded + self.lane_stored

    @property
    def fetched_nbytes(self) -> int:
        """Bytes of the sectors that blocks touch, one count per sector, block and direction."""
        return SECTOR_BYTES * (self.load_fetched + self.store_fetched)

    @property
    def efficiency(self) -> float:
        """Bytes that warps access / bytes of the sectors that their requests touch; 1 if there are no sectors."""
        sectors = self.load_sectors + self.store_sectors
        return self.nbytes / (SECTOR_BYTES * sectors) if sectors else 1.0

    @property
    def wide_efficiency(self) -> float:
        """Bytes of 16-byte accesses / bytes of the sectors that they touch; 1 if there are no sectors."""
        return self.wide_bytes / (SECTOR_BYTES * self.wide_sectors) if self.wide_sectors else 1.0


#: struct Moved in counters.h.
MOVED = (
    "lane_loaded", "lane_stored", "raw_loaded", "raw_stored",
    "load_requests", "store_requests", "load_sectors", "store_sectors", "wide_bytes", "wide_sectors",
)  # fmt: skip


class _Counters(ctypes.Structure):
    """struct Counters in counters.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("barriers", "meetings")),
        *((f"shared_{name}", ctypes.c_uint64) for name in ("requests", "wavefronts", "ideal")),
        *((f"unwritten{name}", ctypes.c_uint64) for name in ("", "_thread", "_block", "_site", "_byte")),
        ("traced", ctypes.c_uint64),
        ("trace", ctypes.c_void_p),
        ("trace_count", ctypes.c_uint64),
        ("trace_capacity", ctypes.c_uint64),
        ("moved", ctypes.c_uint64 * len(MOVED) * MOST_ARRAYS),
    ]


@dataclass
class Count:
    """Events and traffic of one launch.

    Attributes
    ----------
    kernel : str
    blocks, threads : int
        Blocks in the grid, threads per block.
    barriers : int
        ``__syncthreads``, summed over all blocks.
    shuffles : int
        Shuffles, votes and ``__syncwarp``, summed over all warps.
    shared_requests, shared_wavefronts, shared_ideal : int
        Requests of warps to shared memory; the wavefronts that they need because of bank conflicts; the wavefronts that
        they would need without.
    moved : dict of str to Moves
        Traffic by array name. The fields that a replay of the trace computes are 0.
    roles : dict of str to str
        Roles of the arrays, by name.
    starts : dict of str to int
        Addresses of the arrays, by name.
    trace : numpy.ndarray
        One record per request and sector, in the order of the requests within each block: sector, block, warp of the
        block, phase (the number of barriers that the block has passed, modulo 256), region (2 * array + is_store), and
        the number of bytes in the sector that the request accesses. Within a phase of a block, the order of the warps
        is the executor's.
    """

    kernel: str
    blocks: int
    threads: int
    barriers: int
    shuffles: int
    shared_requests: int
    shared_wavefronts: int
    shared_ideal: int
    moved: dict[str, Moves]
    roles: dict[str, str]
    starts: dict[str, int]
    trace: np.ndarray[Any, Any] = field(repr=False)


def _count(found: _Counters, name: str, grid: int, threads: int, memory: Sequence[Region]) -> Count:
    trace = np.empty(found.trace_count, TRACE)
    if found.trace:
        ctypes.memmove(trace.ctypes.data, found.trace, trace.nbytes)
    moved = {
        region.name: Moves(**dict(zip(MOVED, counted, strict=True)))
        for region, counted in zip(memory, found.moved, strict=False)
    }
    roles = {region.name: region.role for region in memory}
    starts = {region.name: region.address for region in memory}
    shared = (found.shared_requests, found.shared_wavefronts, found.shared_ideal)
    return Count(name, grid, threads, found.barriers, found.meetings, *shared, moved, roles, starts, trace)


def run(
    launch: Callable[..., None],
    steps: Sequence[Any],
    values: Sequence[int | float],
    sizes: Sequence[int],
    memory: Sequence[Region],
    record: list[Count] | None,
) -> None:
    """Run the launches of a plan in the checked build, on copies of its arrays between guard zones.

    Parameters
    ----------
    launch : callable
        `cunorm.executors.cpu.executor.launch`.
    steps, values, sizes
        See `cunorm.executors.cpu.executor.run`.
    memory : sequence of Region
        The arrays.
    record : list, optional
        Receives a `Count` with a trace per launch.

    Raises
    ------
    KernelFault
        If a kernel broke a rule. The kernel's earlier stores remain in the arrays.
    """
    guarded = GuardedCopies(memory)
    places: list[int | float] = list(values)
    places[: len(sizes)] = [guarded.moved(int(address), size) for address, size in zip(values, sizes, strict=False)]
    try:
        for kernel, grid, threads, shared_bytes, pick, together in steps:
            checked(launch, kernel, grid, threads, shared_bytes, pick(places), guarded, record, **together)
    finally:
        guarded.give_back()


def checked(
    launch: Callable[..., None],
    kernel: Any,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: Sequence[int | float],
    guarded: GuardedCopies,
    record: list[Count] | None = None,
    **options: Any,
) -> None:
    """Run one launch of a plan.

    Parameters
    ----------
    launch : callable
        `cunorm.executors.cpu.executor.launch`.
    kernel : Kernel
        The kernel, in any build.
    grid, threads, shared_bytes, arguments
        See `cunorm.executors.cpu.executor.launch`. Addresses are those of the copies.
    guarded : GuardedCopies
        The copies.
    record : list, optional
        Receives a `Count` with a trace.
    **options
        Other options of `cunorm.executors.cpu.executor.launch`.

    Raises
    ------
    KernelFault
        If the kernel broke a rule, or if its results depend on shared memory that no thread wrote.
    """
    kernel = kernel.built("checked")
    before = guarded.contents() if shared_bytes or kernel.static_bytes else []
    counters = _Counters(traced=record is not None)
    place = ctypes.addressof(counters)
    try:
        launch(kernel, grid, threads, shared_bytes, arguments, memory=guarded.memory, counters=place, **options)
        if record is not None:
            record.append(_count(counters, kernel.name, grid, threads, guarded.memory))
    finally:
        kernel._free(counters.trace)
    if counters.unwritten and before:
        # A thread read shared memory that no thread had written. This is a fault only if a result depends on the value:
        # run the launch again with another poison and compare.
        after = guarded.contents()
        guarded.fill(before)
        launch(kernel, grid, threads, shared_bytes, arguments, memory=guarded.memory, poison=OTHER_POISON, **options)
        if guarded.contents() != after:
            sentence = (
                f"kernel {kernel.name}, block {counters.unwritten_block}: thread {counters.unwritten_thread}: reads "
                f"byte {counters.unwritten_byte} of shared memory at @{{{counters.unwritten_site:x}}}, which no "
                "thread wrote, and the results depend on such reads"
            )
            raise KernelFault(located(sentence, kernel.path, guarded.memory))


# ---- places ---------------------------------------------------------------------------------------------------------


def located(sentence: str, library: Path, memory: Sequence[Region]) -> str:
    """Replace #{number} by the name of an array, and @{address} by file:line, in a fault message.

    Parameters
    ----------
    sentence : str
        The message that the runtime wrote.
    library : Path
        The kernel's shared object.
    memory : sequence of Region
        The arrays, indexed by number.
    """
    sentence = re.sub(r"#\{(\d+)\}", lambda found: memory[int(found[1])].name, sentence)
    return re.sub(r"@\{([0-9a-f]+)\}", lambda found: _line(library, int(found[1], 16)), sentence)


def _line(library: Path, address: int) -> str:
    """Return ``file:line`` of the kernel's code for an address, skipping the functions that only forward accesses."""
    tool = shutil.which("addr2line")
    if tool is None or address == 0:
        return "an unknown place (set CUNORM_CPU_BUILD=checked and install binutils)"
    done = subprocess.run([tool, "-i", "-e", str(library), hex(address)], capture_output=True, text=True, timeout=60)
    places = [line.partition(" (")[0] for line in done.stdout.splitlines() if not line.startswith("??")]
    places = [re.sub(r"^.*/\.build-[^/]*/", "", place) for place in places]  # the compiler's working folder
    own = [place for place in places if not DOORS.match(place.rpartition(":")[0])]
    return (own or places or ["an unknown place"])[0]
