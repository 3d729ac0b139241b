"""The GPU executor: one cupy.RawKernel per source text. The only module of cunorm that imports CuPy at its top."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import compiler, driver, runtime
from cupy.cuda import nvrtc as cupy_nvrtc

from cunorm.core.devices import KNOWN, PORTABLE_CLUSTER, Device
from cunorm.core.errors import CompileError, first_lines
from cunorm.core.locks import Lock
from cunorm.jit import cubins, nvrtc

#: Options of NVRTC, the same for every kernel: each distinct tuple costs CuPy one more compile.
OPTIONS = ("--std=c++17", "--fmad=false")
#: CUfunction_attribute NON_PORTABLE_CLUSTER_SIZE_ALLOWED, which a kernel with larger clusters than `PORTABLE_CLUSTER`
#: needs.
NON_PORTABLE = 14
#: Dynamic shared memory per block that a kernel may use without raising its limit.
DEFAULT_SHARED_BYTES = 48 * 1024
#: Compute capabilities with clusters of 16 blocks.
NON_PORTABLE_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
#: CUlaunchAttributeID CLUSTER_DIMENSION.
CLUSTER_DIMENSION = 4
#: Multiprocessors per texture processing cluster: processing clusters have an even number of them.
EVEN = 2
#: Sizes of the clusters that the driver is asked about. A processing cluster has at most 20 multiprocessors, so at most
#: one cluster of the `LARGE_CLUSTERS` is resident in it at a time, and at most two of `SMALL_CLUSTER`.
LARGE_CLUSTERS, SMALL_CLUSTER = (16, 14, 12), 8

#: See ``Step`` in `cunorm.runtime.specialised`.
Step = tuple["Kernel", int, int, int, Callable[[Any], Any], int, int]

_lock = Lock()


@dataclass
class Kernel:
    """A compiled kernel on one GPU."""

    raw: Any
    entry: str
    ordinal: int
    shared_bytes: int = DEFAULT_SHARED_BYTES


@functools.cache
def limits(ordinal: int = 0) -> Device:
    """Return the properties of a GPU, read from the driver.

    Parameters
    ----------
    ordinal : int
        CuPy's index of the GPU.
    """
    facts = runtime.getDeviceProperties(ordinal)
    name, multiprocessors = facts["name"].decode(), int(facts["multiProcessorCount"])
    capability = (int(facts["major"]), int(facts["minor"]))
    # Bandwidth from the memory clock and the bus width. Newer drivers report no clocks; then use the data sheet of the
    # known device with this name, else that of the H200. The driver's clock of the multiprocessors is their highest,
    # so the known one, under load, comes first.
    known = next((one for one in KNOWN.values() if one.name == name), None)
    bandwidth = 2.0 * int(facts.get("memoryClockRate") or 0) * 1e3 * int(facts["memoryBusWidth"]) / 8
    clock = float(facts.get("clockRate") or 0) * 1e3 if known is None else known.clock
    return Device(
        name=name,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        l2_bytes=int(facts["l2CacheSize"]),
        bandwidth=bandwidth or (known or KNOWN["H200"]).bandwidth,
        clock=clock or KNOWN["H200"].clock,
        shared_memory_per_block=int(facts["sharedMemPerBlockOptin"]),
        shared_memory_per_multiprocessor=int(facts["sharedMemPerMultiprocessor"]),
        shared_memory_reserved=int(facts.get("reservedSharedMemPerBlock", 1024)),
        registers_per_multiprocessor=int(facts["regsPerMultiprocessor"]),
        threads_per_multiprocessor=int(facts["maxThreadsPerMultiProcessor"]),
        blocks_per_multiprocessor=int(facts.get("maxBlocksPerMultiProcessor", 32)),
        largest_cluster=16 if capability in NON_PORTABLE_CAPABILITIES else 8 if capability >= (9, 0) else 1,
        processing_clusters=_processing_clusters(ordinal, name, capability, multiprocessors),
    )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver's interface."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver's interface."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attributes_count", ctypes.c_uint),
    )


def _full_clusters(ordinal: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """For each cluster size, the number of resident clusters of blocks that fill a multiprocessor each.

    None if the driver does not say. CuPy does not wrap the driver's function, so ctypes calls it.
    """
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):  # not Linux, or a driver older than CUDA 11.8
        return None
    with cupy.cuda.Device(ordinal):
        probe = cupy.RawKernel('extern "C" __global__ void fill_multiprocessor() {}', "fill_multiprocessor")
        shared = int(runtime.getDeviceProperties(ordinal)["sharedMemPerBlockOptin"])
        probe.max_dynamic_shared_size_bytes = shared
        driver.funcSetAttribute(probe.kernel.ptr, NON_PORTABLE, 1)
        found = []
        for size in sizes:
            attribute = _LaunchAttribute(id=CLUSTER_DIMENSION, value=(size, 1, 1))
            config = _LaunchConfig((size, 1, 1), (32, 1, 1), shared, None, ctypes.pointer(attribute), 1)
            count = ctypes.c_int()
            if ask(ctypes.byref(count), ctypes.c_void_p(probe.kernel.ptr), ctypes.byref(config)) != 0:
                return None
            found.append(count.value)
    return tuple(found)


def _processing_clusters(ordinal: int, name: str, capability: tuple[int, int], multiprocessors: int) -> tuple[int, ...]:
    """Multiprocessors of each processing cluster, or () if unknown.

    A processing cluster holds one thread-block cluster of ``size`` full blocks if it has that many multiprocessors, for
    each of `LARGE_CLUSTERS`, and ``n // size`` of `SMALL_CLUSTER`. These counts give the sizes below the largest. The
    other multiprocessors are shared among the largest. If the driver does not say, they are those of the known device
    with this name.
    """
    asked = (*LARGE_CLUSTERS, SMALL_CLUSTER)
    if capability in NON_PORTABLE_CAPABILITIES and (counts := _full_clusters(ordinal, asked)) is not None:
        clusters: list[int] = []
        for size, count in zip(LARGE_CLUSTERS, counts, strict=False):
            clusters += [size] * (count - len(clusters))
        clusters += [SMALL_CLUSTER] * (counts[-1] - sum(size // SMALL_CLUSTER for size in clusters))
        rest = multiprocessors - sum(clusters)
        if counts[0] > 0 and rest >= 0:
            for place in range(rest // EVEN):
                clusters[place % counts[0]] += EVEN
            return tuple(clusters)
    alike = (known for known in KNOWN.values() if (known.name, known.multiprocessors) == (name, multiprocessors))
    return next((known.processing_clusters for known in alike), ())


@functools.cache
def _compile(text: str, entry: str, ordinal: int) -> Kernel:
    with cupy.cuda.Device(ordinal):
        raw = cupy.RawKernel(text, entry, options=OPTIONS)
        try:
            raw.compile()
        except compiler.CompileException as error:
            architecture = limits(ordinal).architecture
            log = first_lines(error.get_message())
            raise CompileError(f"{entry} for {architecture} with {' '.join(OPTIONS)}:\n{log}") from error
    return Kernel(raw, entry, ordinal)


def compile(text: str, entry: str, ordinal: int = 0) -> Kernel:
    """Compile the kernel ``entry`` of a text for one GPU, once per process. CuPy caches the result on disk.

    Raises
    ------
    CompileError
        With the first lines of NVRTC's log.
    """
    with _lock.held:
        return _compile(text, entry, ordinal)


def build(text: str, entry: str, ordinal: int = 0) -> Path:
    """Compile a text for one GPU to a file of machine code, or find the file in the cache folder.

    No context and no module of a GPU is used, so that any thread may call this while another one captures a graph.

    Raises
    ------
    CompileError
        With the first lines of NVRTC's log, or if the cache folder cannot be used.
    """
    return build_for(text, entry, limits(ordinal).architecture)


def build_for(text: str, entry: str, architecture: str) -> Path:
    """The same for an architecture, such as ``sm_90``. This needs no GPU, but the NVRTC of the machine with the GPU."""
    options = (*nvrtc.OPTIONS, f"-arch={architecture}")
    version = ".".join(map(str, cupy_nvrtc.getVersion()))
    return cubins.cached(text, options, version, lambda: _machine_code(text, entry, options))


def _machine_code(text: str, entry: str, options: tuple[str, ...]) -> bytes:
    program = cupy_nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        cupy_nvrtc.compileProgram(program, options)
        return bytes(cupy_nvrtc.getCUBIN(program))
    except cupy_nvrtc.NVRTCError as error:
        log = first_lines(cupy_nvrtc.getProgramLog(program))
        raise CompileError(f"{entry} with {' '.join(options)}: {error}\n{log}") from error
    finally:
        cupy_nvrtc.destroyProgram(program)


@functools.cache
def _load(path: Path, entry: str, ordinal: int) -> Kernel:
    with cupy.cuda.Device(ordinal):
        raw = cupy.RawModule(path=str(path)).get_function(entry)
        raw.compile()
    return Kernel(raw, entry, ordinal)


def load(built: Path, entry: str, ordinal: int = 0) -> Kernel:
    """Load a kernel from a file that `build` returned, once per process. It stays loaded."""
    with _lock.held:
        return _load(built, entry, ordinal)


def loaded() -> int:
    """Number of kernels that `load` has loaded in this process."""
    return _load.cache_info().currsize


def allow_cluster(kernel: Kernel, blocks: int) -> None:
    """Allow launches of a kernel with ``blocks`` blocks per cluster."""
    if blocks > PORTABLE_CLUSTER:
        with cupy.cuda.Device(kernel.ordinal):
            driver.funcSetAttribute(kernel.raw.kernel.ptr, NON_PORTABLE, 1)


def launch(kernel: Kernel, grid: int, threads: int, shared_bytes: int, arguments: Sequence[int | float]) -> None:
    """Launch a kernel on its GPU, on CuPy's current stream, without waiting for its end.

    Parameters
    ----------
    grid, threads, shared_bytes : int
        Blocks in the grid, threads per block, bytes of dynamic shared memory per block.
    arguments : sequence of int or float
        Addresses and sizes as int (64 bits), floating-point numbers as float (64 bits).
    """
    run([(kernel, grid, threads, shared_bytes, tuple, 1, 0)], arguments, kernel.ordinal)


def run(steps: Sequence[Step], values: Sequence[int | float], ordinal: int) -> None:
    """Launch the kernels of a plan on their GPU, on CuPy's current stream, without waiting for their end.

    Parameters
    ----------
    steps : sequence of (kernel, grid, threads, shared_bytes, pick, cluster, resident)
        ``pick`` selects a launch's arguments from ``values``. The last two are for the CPU executor.
    values : sequence of int or float
        Addresses of arrays, then numbers.
    ordinal : int
        CuPy's index of the GPU.
    """
    if runtime.getDevice() == ordinal:
        _launch_all(steps, values)
    else:
        with cupy.cuda.Device(ordinal):
            _launch_all(steps, values)


def _launch_all(steps: Sequence[Step], values: Sequence[int | float]) -> None:
    """Launch kernels on the current GPU."""
    for kernel, grid, threads, shared_bytes, pick, _, _ in steps:
        if shared_bytes > kernel.shared_bytes:
            # The attribute is an upper limit, not an allocation. Raise it once to the device's limit per block, so that
            # no host thread can lower the limit that another host thread has set.
            cap = limits(kernel.ordinal).shared_memory_per_block
            kernel.raw.max_dynamic_shared_size_bytes = cap
            kernel.shared_bytes = cap
        kernel.raw((grid,), (threads,), pick(values), shared_mem=shared_bytes)


def synchronise(ordinal: int = 0) -> None:
    """Wait until all work that was launched on a GPU has finished."""
    with cupy.cuda.Device(ordinal) as device:
        device.synchronize()


def present() -> bool:
    """Whether the driver sees a GPU."""
    return bool(cupy.cuda.is_available())


def on(ordinal: int) -> AbstractContextManager[Any]:
    """Make a GPU the current one; a no-op if it is current already."""
    return nullcontext() if runtime.getDevice() == ordinal else cupy.cuda.Device(ordinal)


class _Foreign:
    """A stream of another library, as CUDA's stream protocol describes it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@functools.lru_cache(maxsize=256)
def stream_at(address: int, ordinal: int) -> Any:
    """The CuPy stream for the address of a ``cudaStream_t`` of another library, which keeps the stream alive.

    0 is the default stream.
    """
    if address == 0:
        return cupy.cuda.Stream.null
    with cupy.cuda.Device(ordinal):
        return cupy.cuda.Stream.from_external(_Foreign(address))


def fill(address: int, byte: int, nbytes: int, ordinal: int) -> None:
    """Set bytes of a GPU's memory, on CuPy's current stream."""
    with on(ordinal):
        runtime.memsetAsync(address, byte, nbytes, cupy.cuda.get_current_stream().ptr)


@contextmanager
def on_stream(ordinal: int, stream: Any) -> Iterator[None]:
    """Make a GPU the current one, and a CuPy stream current on it. With None, the GPU's current stream stays current.

    Raises
    ------
    TypeError, ValueError
        If `stream` is no CuPy stream, or belongs to another GPU.
    """
    if stream is not None and not (hasattr(stream, "ptr") and hasattr(type(stream), "__enter__")):
        advice = "a cupy.cuda.Stream (Stream.from_external wraps a foreign stream) or None for the current stream"
        raise TypeError(f"stream: {type(stream).__name__}, expected {advice}")
    home = getattr(stream, "device_id", None)  # -1: valid on every GPU, as the default streams are
    if home not in (None, -1, ordinal):
        raise ValueError(f"stream: belongs to GPU {home}, but the arrays are on GPU {ordinal}")
    with on(ordinal), nullcontext() if stream is None else stream:  # the GPU first: a stream is current per GPU
        yield


def count() -> int:
    """Number of GPUs that CuPy sees."""
    return int(runtime.getDeviceCount())


def current() -> int:
    """CuPy's index of the current GPU."""
    return int(runtime.getDevice())


def allocation_forbidden(ordinal: int) -> bool:
    """Whether the current stream is being captured into a graph; no memory may be taken from the pool then."""
    with on(ordinal):
        return bool(cupy.cuda.get_current_stream().is_capturing())
