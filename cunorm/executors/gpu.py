"""The GPU executor: one cupy.RawKernel per source text. The only module of cunorm that imports CuPy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import compiler, driver, runtime
from cupy.cuda import nvrtc as cupy_nvrtc

from cunorm.core.devices import KNOWN, Device
from cunorm.core.errors import CompileError
from cunorm.core.locks import Lock
from cunorm.jit import cubins, nvrtc

#: Options of NVRTC, the same for every kernel: each distinct tuple costs CuPy one more compile.
OPTIONS = ("--std=c++17", "--fmad=false")
#: Largest cluster size, in blocks, that every GPU with clusters supports; and the CUfunction_attribute
#: NON_PORTABLE_CLUSTER_SIZE_ALLOWED, which a kernel with larger clusters needs.
PORTABLE_CLUSTER, NON_PORTABLE = 8, 14
#: Dynamic shared memory per block that a kernel may use without raising its limit.
DEFAULT_SHARED_BYTES = 48 * 1024
LOG_LINES = 40

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
    name = facts["name"].decode()
    capability = (int(facts["major"]), int(facts["minor"]))
    # Bandwidth from the memory clock and the bus width. Newer drivers report no clock; then use the data sheet of the
    # known device with this name, else that of the H200.
    clock = int(facts.get("memoryClockRate") or 0)
    bandwidth = 2.0 * clock * 1e3 * int(facts["memoryBusWidth"]) / 8
    if bandwidth == 0:
        bandwidth = next((known.bandwidth for known in KNOWN.values() if known.name == name), KNOWN["H200"].bandwidth)
    return Device(
        name=name,
        compute_capability=capability,
        multiprocessors=int(facts["multiProcessorCount"]),
        l2_bytes=int(facts["l2CacheSize"]),
        bandwidth=bandwidth,
        shared_memory_per_block=int(facts["sharedMemPerBlockOptin"]),
        shared_memory_per_multiprocessor=int(facts["sharedMemPerMultiprocessor"]),
        shared_memory_reserved=int(facts.get("reservedSharedMemPerBlock", 1024)),
        registers_per_multiprocessor=int(facts["regsPerMultiprocessor"]),
        threads_per_multiprocessor=int(facts["maxThreadsPerMultiProcessor"]),
        blocks_per_multiprocessor=int(facts.get("maxBlocksPerMultiProcessor", 32)),
        largest_cluster=16 if capability in ((9, 0), (10, 0), (10, 3)) else 8 if capability >= (9, 0) else 1,
    )


@functools.cache
def _compile(text: str, entry: str, ordinal: int) -> Kernel:
    with cupy.cuda.Device(ordinal):
        raw = cupy.RawKernel(text, entry, options=OPTIONS)
        try:
            raw.compile()
        except compiler.CompileException as error:
            log = "\n".join(error.get_message().splitlines()[:LOG_LINES])
            architecture = limits(ordinal).architecture
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
    options = (*nvrtc.OPTIONS, f"-arch={limits(ordinal).architecture}")
    version = ".".join(map(str, cupy_nvrtc.getVersion()))
    return cubins.cached(text, options, version, lambda: _machine_code(text, entry, options))


def _machine_code(text: str, entry: str, options: tuple[str, ...]) -> bytes:
    program = cupy_nvrtc.createProgram(text, f"{entry}.cu", (), ())
    try:
        cupy_nvrtc.compileProgram(program, options)
        return bytes(cupy_nvrtc.getCUBIN(program))
    except cupy_nvrtc.NVRTCError as error:
        log = "\n".join(cupy_nvrtc.getProgramLog(program).splitlines()[:LOG_LINES])
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
    if shared_bytes > kernel.shared_bytes:
        # The attribute is an upper limit, not an allocation. Raise it once to the device's limit per block, so that no
        # host thread can lower the limit that another host thread has set.
        cap = limits(kernel.ordinal).shared_memory_per_block
        with cupy.cuda.Device(kernel.ordinal):
            kernel.raw.max_dynamic_shared_size_bytes = cap
        kernel.shared_bytes = cap
    with on(kernel.ordinal):
        kernel.raw((grid,), (threads,), tuple(arguments), shared_mem=shared_bytes)


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
    with cupy.cuda.Device(ordinal):
        return bool(cupy.cuda.get_current_stream().is_capturing())
