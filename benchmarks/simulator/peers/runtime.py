"""A CUDA runtime for PyTorch whose device is the simulator.

`load` must precede the import of torch. From then on PyTorch finds a GPU. Its host code chooses kernels, grids and
arguments as on a GPU; each launch runs on the simulator, with the machine code from PyTorch's own library. Results are
therefore complete and can be checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulator.clock import Gpu
from benchmarks.simulator.machine import Launch
from benchmarks.simulator.peers import cubins
from cunorm.executors.cpu.guarded_arrays import Region
from cunorm.jit import cpu_builds, cxx

NAME = "libcudart.so.13"
#: The library of the driver, which PyTorch asks only whether the device has a context.
DRIVER = "libcuda.so.1"
_DRIVER_TEXT = """
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}
EXPORT int cuGetErrorString(int, const char** text) {
    *text = "the simulator has no driver";
    return 0;
}
EXPORT int cuCtxGetCurrent(void** into) {
    *into = reinterpret_cast<void*>(1);
    return 0;
}
"""
_INCLUDES = ("cstdio", "cstdlib", "cstring", "map", "mutex", "string", "utility", "driver_types.h")
_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_ulonglong, ctypes.POINTER(ctypes.c_void_p)
)
_ON_FILL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong)
MOST_ALLOCATIONS = 4096
#: cudaErrorLaunchFailure.
FAILED = 719


class Facts(ctypes.Structure):
    """The facts of the device that the runtime reports."""

    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in (
                "multiprocessors", "threads_per_multiprocessor", "blocks_per_multiprocessor",
                "registers_per_multiprocessor", "shared_per_block", "shared_per_block_optin",
                "shared_per_multiprocessor", "shared_reserved", "l2_bytes", "major", "minor",
            )
        ),
        ("memory", ctypes.c_ulonglong),
    ]  # fmt: skip


@dataclass(frozen=True)
class Fill:
    """A call of cudaMemset: `nbytes` bytes from `address` become `value`."""

    address: int
    value: int
    nbytes: int


Step = Launch | Fill
"""What a call of PyTorch does on the GPU."""


@dataclass
class Runtime:
    """The loaded runtime.

    Attributes
    ----------
    library : ctypes.CDLL
    gpu : Gpu
    see : callable
        Receives each launch and runs it; receives each fill, which has happened.
    failed : BaseException or None
        What `see` raised.
    kept : tuple
        Objects that must live as long as the runtime.
    """

    library: ctypes.CDLL
    gpu: Gpu
    see: Callable[[Step], None]
    failed: BaseException | None = None
    kept: tuple[object, ...] = ()

    def memory(self) -> list[Region]:
        """The allocations of device memory."""
        pairs = (ctypes.c_ulonglong * (2 * MOST_ALLOCATIONS))()
        count = self.library.peers_memory(pairs, MOST_ALLOCATIONS)
        if count > MOST_ALLOCATIONS:
            raise ValueError(f"allocations: {count}, expected at most {MOST_ALLOCATIONS}; raise MOST_ALLOCATIONS")
        return [Region(f"segment {k}", pairs[2 * k], pairs[2 * k + 1], "in") for k in range(count)]

    @contextlib.contextmanager
    def seen_by(self, see: Callable[[Step], None]) -> Iterator[None]:
        """Within this context, `see` receives the launches. An exception in it is raised at the end of the context."""
        before, self.see, self.failed = self.see, see, None
        try:
            yield
        except Exception as error:
            if self.failed is None:
                raise
            raise self.failed from error
        finally:
            self.see = before
        if self.failed is not None:
            raise self.failed

    def passed(self, step: Step) -> int:
        """Pass a step to `see`; return an error of the CUDA runtime."""
        if self.failed is not None:
            return FAILED
        try:
            self.see(step)
        except BaseException as error:
            self.failed = error
            return FAILED
        return 0


def _source() -> str:
    include = "".join(f"#include <{name}>\n" for name in _INCLUDES)
    return f'{include}#line 1 "benchmarks/simulator/peers/cudart.h"\n{Path(__file__).with_name("cudart.h").read_text()}'


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The runtime and the driver. The loader finds them by their names when PyTorch asks for NVIDIA's."""
    # crt/host_defines.h is in a package that PyTorch does not need; Triton has a copy.
    headers = (cubins.toolkit() / "include", cubins.installed("triton") / "backends" / "nvidia" / "include")
    options = ("-std=c++20", "-O1", "-fPIC", *(f"-I{path}" for path in headers))
    compiler, versions = cxx.chosen(), "-Wl,--default-symver"
    runtime, _ = cpu_builds.load(_source(), "cudart", compiler, options, (f"-Wl,-soname,{NAME}", versions))
    driver, _ = cpu_builds.load(_DRIVER_TEXT, "cuda", compiler, options, (f"-Wl,-soname,{DRIVER}",))
    return runtime, driver


def load(gpu: Gpu, see: Callable[[Step], None]) -> Runtime:
    """Load the runtime in place of NVIDIA's.

    Parameters
    ----------
    gpu : Gpu
    see : callable
        Receives the steps in order. It must run the launches.

    Raises
    ------
    ImportError
        If torch has been imported already.
    """
    if "torch" in sys.modules:
        raise ImportError("torch was imported before the simulator's CUDA runtime; call runtime.load first")
    (library, driver), device = _libraries(), gpu.device
    runtime = Runtime(library, gpu, see)
    facts = Facts(
        device.multiprocessors,
        device.threads_per_multiprocessor,
        device.blocks_per_multiprocessor,
        device.registers_per_multiprocessor,
        48 * 1024,
        device.shared_memory_per_block,
        device.shared_memory_per_multiprocessor,
        device.shared_memory_reserved,
        device.l2_bytes,
        *device.compute_capability,
        64 << 30,
    )

    def on_launch(name: bytes, sizes: ctypes.Array[ctypes.c_uint], shared: int, values: Any) -> int:
        try:
            kernel = cubins.kernel(name.decode())
            arguments = cubins.arguments(kernel.code, values)
        except BaseException as error:
            runtime.failed = runtime.failed or error
            traceback.print_exc()
            return FAILED
        x, y, z, *block = (sizes[k] for k in range(6))
        memory = runtime.memory()
        return runtime.passed(Launch(kernel, (x, y, z), tuple(block), shared, arguments, memory))

    def on_fill(address: int, value: int, nbytes: int) -> None:
        runtime.passed(Fill(address, value, nbytes))

    callbacks = _ON_LAUNCH(on_launch), _ON_FILL(on_fill)
    runtime.kept = (*callbacks, driver)
    library.peers_configure(ctypes.byref(facts), *callbacks)
    return runtime
