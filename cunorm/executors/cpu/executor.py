"""The CPU executor: runs the kernels' CUDA C as C++ on fibers, with a small runtime. Exact, not fast.

``runtime.h`` describes how a block runs. ``kernel.py`` compiles. This file launches kernels. If the blocks of a launch
do not wait for each other, it distributes them over operating-system threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from cunorm.core import devices, settings
from cunorm.core.devices import MOST_THREADS, WARP
from cunorm.core.errors import KernelFault

from . import checked as cpu_checked
from . import launch_memory as cpu_scratch
from .guarded_arrays import GUARD_BYTES, Region, regions_of
from .kernel import INTERPRETER, Addresses, Kernel
from .kernel import compile as compile  # part of the executor interface
from .launch_memory import FAULT_BYTES, Scratch

MOST_BLOCKS = 1024  # blocks alive at a time in one operating-system thread
LARGEST_CLUSTER = 16
MOST_WORKERS = 1024  # operating-system threads of a launch
POISON = 0xFF  # fill byte of shared memory at a block's start: NaN in every floating-point type
SPREAD_SECONDS = 200e-6  # a launch uses several cores if about this much work is left after its first cluster
LAST, WORKERS, MISSING, NEXT = 5, 12, 15, 24  # indices of words in struct Launch
FAULTED, FORKED = 1, 3  # exit states of a worker, from runtime.h
ORDERS = {"ascending": 0, "descending": 1, "random": 2}
LETTERS = {"P": "pointer", "q": "long long", "d": "double"}


def limits(ordinal: int = 0) -> devices.Device:
    """Return the device that the CPU executor simulates (``CUNORM_CPU_DEVICE``)."""
    if ordinal != 0:
        raise ValueError(f"ordinal: {ordinal}, expected 0: the CPU executor is one device")
    return devices.known(settings.cpu_device(), "CUNORM_CPU_DEVICE")


def build(text: str, entry: str, ordinal: int = 0) -> Kernel:
    """Compile a specialised kernel; see `kernel.compile`. Nothing is left to do for `load`."""
    return compile(text, entry, ordinal)


def load(built: Kernel, entry: str, ordinal: int = 0) -> Kernel:
    """The kernel that `build` returned."""
    return built


def loaded() -> int:
    """0: loaded kernels are cheap here, so they are not counted."""
    return 0


def fill(address: int, byte: int, nbytes: int, ordinal: int) -> None:
    """Set bytes of memory."""
    ctypes.memset(address, byte, nbytes)


def synchronise(ordinal: int = 0) -> None:
    """Do nothing: a launch returns when the kernel has finished."""


# ---- launching ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def order_of(text: str) -> tuple[int, int]:
    """The order that ``CUNORM_CPU_ORDER`` names, as the runtime's number, and its seed (ValueError)."""
    name, colon, seed = text.partition(":")
    # At most 18 digits, as in CUNORM_CPU_CORES, so that the seed fits in 64 bits.
    if name not in ORDERS or (colon and (name != "random" or not seed.isdecimal() or len(seed) > 18)):
        words = "expected ascending, descending, random or random:SEED with a SEED of up to 18 digits"
        raise ValueError(f"CUNORM_CPU_ORDER: {text[:80]!r}, {words}")
    return ORDERS[name], int(seed or 0)


@functools.cache  # warn once per process
def _warn_of_few() -> None:
    warnings.warn(
        "the system starts no more threads, or has no memory for their stacks: kernels run on fewer cores than "
        "CUNORM_CPU_CORES allows; raise the limit (ulimit -u, ulimit -v, or the container's) or lower CUNORM_CPU_CORES",
        RuntimeWarning,
        stacklevel=2,
    )


def _add(scratches: list[Scratch], count: int, cores: int, size: tuple[int, int, int]) -> None:
    """Add scratches to a launch until it has ``count`` of them.

    It gets fewer if the system lacks memory, or if other launches of the process use the cores.
    """
    try:
        while len(scratches) < count and cpu_scratch.lent() < cores:
            scratches.append(cpu_scratch.take(*size))
    except MemoryError:
        _warn_of_few()


def _run(kernel: Kernel, buffer: ctypes.Array[ctypes.c_int64], scratches: list[Scratch], arena: int) -> str | None:
    """Run a launch on one operating-system thread per scratch; return the fault message, or None.

    No thread of the launch runs any more when this returns or raises: they all run inside one call of the library.
    """
    # Signal handlers do not run during a kernel with static shared memory: a launch from a handler would overwrite it.
    watched = kernel.static_bytes == 0 and threading.get_ident() == threading.main_thread().ident
    count = len(scratches)
    buffer[WORKERS] = count
    array = (Addresses * count)(*[scratch.addresses for scratch in scratches]) if count > 1 else scratches[0].addresses
    here, interpreter = ctypes.addressof(array), ctypes.addressof(INTERPRETER)
    status = kernel._run(ctypes.addressof(buffer), here, count, arena, FAULT_BYTES, interpreter, watched)
    if status == FORKED:
        raise RuntimeError(f"kernel {kernel.name}: a signal handler forked while it ran; the child has no results")
    if buffer[MISSING]:
        _warn_of_few()
    return next(filter(None, (scratch.fault() for scratch in scratches))) if status == FAULTED else None


def _spread(
    kernel: Kernel,
    buffer: ctypes.Array[ctypes.c_int64],
    scratches: list[Scratch],
    size: tuple[int, int, int],
    arena: int,
    blocks: tuple[int, int],
    cluster: int,
    cores: int,
) -> str | None:
    """Run a launch, on several threads if it is long enough. Add their scratches to the list."""
    (first, last), clusters = blocks, (blocks[1] - blocks[0]) // cluster
    if min(cores, clusters) > 1:  # time one cluster, to decide whether the others need more threads
        buffer[LAST] = first + cluster
        began = time.perf_counter()
        fault = _run(kernel, buffer, scratches, arena)
        seconds = (time.perf_counter() - began) * (clusters - 1)
        if fault is not None:
            return fault
        if seconds > SPREAD_SECONDS:
            _add(scratches, min(cores, clusters - 1), cores, size)
        buffer[LAST], buffer[NEXT] = last, first + cluster
    return _run(kernel, buffer, scratches, arena)


def _check(
    grid: int, threads: int, shared_bytes: int, blocks: tuple[int, int], cluster: int, resident: int, most: int
) -> None:
    """Raise ValueError if a launch is not legal."""
    if not 1 <= grid < 2**31:
        raise ValueError(f"grid: {grid} blocks, expected 1 to 2^31 - 1")
    if not WARP <= threads <= MOST_THREADS or threads % WARP != 0:
        raise ValueError(f"threads: {threads}, expected whole warps of {WARP}, up to {MOST_THREADS}")
    if not 0 <= shared_bytes <= most:
        raise ValueError(f"shared_bytes: {shared_bytes}, expected 0 to {most}, the limit per block of the device")
    if not 1 <= cluster <= LARGEST_CLUSTER or grid % cluster:
        raise ValueError(f"cluster: {cluster} blocks, expected 1 to {LARGEST_CLUSTER}, a divisor of grid = {grid}")
    first, last = blocks
    if not 0 <= first <= last <= grid or first % cluster or last % cluster:
        raise ValueError(f"blocks: {blocks}, expected a range within grid = {grid}, in whole clusters")
    if resident < 1:
        raise ValueError(f"resident: {resident} clusters, expected at least 1")
    if resident * cluster > MOST_BLOCKS:
        raise ValueError(f"resident: {resident} clusters of {cluster} blocks, expected at most {MOST_BLOCKS} blocks")


def launch(  # noqa: PLR0913  # the executor interface; the rarely used arguments are keyword-only
    kernel: Kernel,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: Sequence[int | float],
    *,
    blocks: tuple[int, int] | None = None,
    cluster: int = 1,
    resident: int | None = None,
    memory: Sequence[Region] = (),
    poison: int = POISON,
    counters: int = 0,
    device: devices.Device | None = None,
    order: str | None = None,
) -> None:
    """Run a kernel and return when it has finished.

    Parameters
    ----------
    kernel : Kernel
    grid, threads : int
        Number of blocks, and threads per block (a multiple of the warp size).
    shared_bytes : int
        Dynamic shared memory per block, in bytes.
    arguments : sequence of int or float
        Addresses, ints and floats, one per kernel parameter.
    blocks : tuple of int, optional
        Run only the blocks [first, last) of the grid.
    cluster : int
        Blocks per thread-block cluster.
    resident : int, optional
        Number of clusters that are alive at a time, on one core; for kernels whose blocks wait for each other. None:
        blocks run one after another, on each of several cores.
    memory : sequence of Region
        The arrays that the kernel may access. Empty: they are unknown, and bounds are not checked.
    poison : int
        The byte with which shared memory is filled before a block starts.
    counters : int
        Address of the checked build's counters; 0 for none.
    device : Device, optional
        The device whose limits apply; None: the one that ``CUNORM_CPU_DEVICE`` names.
    order : str, optional
        Order in which threads run; None: ``CUNORM_CPU_ORDER``.

    Raises
    ------
    ValueError, TypeError
        If the launch itself is not legal.
    KernelFault
        If the kernel broke a rule. The message names kernel, block and thread, and file and line if they can be found.
        The kernel's earlier stores remain in the arrays.
    """
    first, last = blocks if blocks is not None else (0, grid)
    waiting, resident = resident is not None, 1 if resident is None else resident  # blocks may wait for each other
    most = (device or limits()).shared_memory_per_block
    _check(grid, threads, shared_bytes, (first, last), cluster, resident, most)
    if len(memory) > cpu_checked.MOST_ARRAYS:
        raise ValueError(f"memory: {len(memory)} arrays, expected at most {cpu_checked.MOST_ARRAYS}")
    turns, seed = order_of(order or settings.cpu_order())
    table = (ctypes.c_int64 * (3 * len(memory)))(*[word for region in memory for word in region.words])
    known = (len(memory), ctypes.addressof(table) if memory else 0)
    numbers = (grid, threads, shared_bytes, turns, seed, last, cluster, resident, poison, *known, counters, 1, 0, 0, 0)
    buffer = kernel._buffer()
    try:
        kernel._packer.pack_into(buffer, 0, *numbers, first, *arguments)
    except struct.error as error:
        wanted = ", ".join(LETTERS[letter] for letter in kernel.signature)
        raise TypeError(f"arguments: {tuple(arguments)}, {kernel.name} takes ({wanted}): {error}") from None
    arena = (-(-shared_bytes // GUARD_BYTES) + 1) * GUARD_BYTES  # plus a gap for overruns of the last array

    slots = resident * cluster
    size = (slots * threads, slots * arena, kernel._worker_bytes(slots, threads))
    # The checks cover one operating-system thread only. Static shared memory exists once per library.
    alone = waiting or kernel.build == "checked" or kernel.static_bytes > 0
    cores = 1 if alone else min(settings.cpu_cores(), MOST_WORKERS)
    scratches = [cpu_scratch.take(*size)]
    try:
        fault = _spread(kernel, buffer, scratches, size, arena, (first, last), cluster, cores)
    finally:  # no thread of the launch runs any more, even after an exception
        while scratches:
            cpu_scratch.give_back(scratches.pop())
    if fault is not None:
        raise KernelFault(cpu_checked.located(fault, kernel.path, memory))


Step = tuple[Kernel, int, int, int, Callable[[Any], Any], int, int]
#: Clusters that are alive at a time in a launch whose blocks wait for each other. A launch that is counted keeps as
#: many alive as the device would, up to MOST_BLOCKS.
WAITING_CLUSTERS = 4


def together(cluster: int, resident: int, most: int) -> dict[str, Any]:
    """Return the launch options for clusters, with at most ``most`` clusters alive at a time."""
    return {"cluster": cluster, "resident": min(resident, most) if resident else None}


def run(
    steps: Sequence[Step],
    values: Sequence[int | float],
    names: Sequence[str],
    sizes: Sequence[int],
    record: list[cpu_checked.Count] | None = None,
    device: devices.Device | None = None,
    order: str | None = None,
) -> None:
    """Run the launches of a plan.

    Parameters
    ----------
    steps : sequence of (kernel, grid, threads, shared_bytes, pick, cluster, resident)
        ``pick`` selects a launch's arguments from ``values``. ``resident`` is the number of blocks that the device runs
        at once if the blocks wait for each other, else 0.
    values : sequence of int or float
        Addresses of arrays, then numbers.
    names : sequence of str
        Names of the values.
    sizes : sequence of int
        Bytes of the array at each address; 0: no array.
    record : list, optional
        Receives a `cunorm.executors.cpu.checked.Count` per launch. If it is passed, the checked build runs, regardless
        of ``CUNORM_CPU_BUILD``.
    device : Device, optional
        The device whose limits apply; None: the one that ``CUNORM_CPU_DEVICE`` names.
    order : str, optional
        Order in which threads run; None: ``CUNORM_CPU_ORDER``.
    """
    build = settings.cpu_build() if record is None else "checked"
    memory = regions_of(names, values, sizes)
    if build == "checked":
        most = WAITING_CLUSTERS if record is None else MOST_BLOCKS
        moved = [(*step[:5], together(*step[5:], most)) for step in steps]
        cpu_checked.run(functools.partial(launch, device=device, order=order), moved, values, sizes, memory, record)
        return
    for kernel, grid, threads, shared_bytes, pick, cluster, resident in steps:
        options = together(cluster, resident, WAITING_CLUSTERS) | {"device": device, "order": order}
        launch(kernel.built(build), grid, threads, shared_bytes, pick(values), memory=memory, **options)
