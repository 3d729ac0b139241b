"""A driver for Triton whose device is the simulator: Triton compiles for sm_90 and launches as on a GPU."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.simulator import cubin
from benchmarks.simulator.machine import Kernel, Launch
from benchmarks.simulator.peers.runtime import Runtime

#: How an argument is packed, by its type in Triton's signatures. Types that begin with * are pointers.
FORMATS = {
    "i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d",
}  # fmt: skip


def packed(code: cubin.Cubin, types: list[str], values: list[Any]) -> bytes:
    """The bytes of a launch's arguments.

    Triton appends pointers to scratch memory to the arguments of the signature; the simulated kernels use none.

    Raises
    ------
    ValueError
        If a type is not known, or the kernel has fewer arguments.
    """
    places = cubin.arguments_of(code.image, code.entry)
    if len(places) < len(values):
        raise ValueError(f"{code.entry}: {len(values)} arguments, the kernel has {len(places)}")
    bank = bytearray(max((offset + size for offset, size in places), default=0))
    for (offset, size), kind, value in zip(places, types, values, strict=False):
        if kind.startswith("*"):
            bits = struct.pack("<Q", 0 if value is None else value.data_ptr())
        elif kind in FORMATS:
            bits = struct.pack(FORMATS[kind], value)
        else:
            raise ValueError(
                f"{code.entry}: an argument has the type {kind!r}, expected a pointer or {', '.join(FORMATS)}"
            )
        if len(bits) != size:
            raise ValueError(f"{code.entry}: an argument of type {kind} has {len(bits)} bytes, the kernel has {size}")
        bank[offset : offset + size] = bits
    return bytes(bank)


class Driver:
    """The parts of Triton's driver that its JIT calls."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            get_device_properties=lambda device: {
                "max_shared_mem": runtime.gpu.device.shared_memory_per_block,
                "multiprocessor_count": runtime.gpu.device.multiprocessors,
            },
        )

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        major, minor = self.runtime.gpu.device.compute_capability
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """The number of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The stream; there is one."""
        return 0

    def load_binary(self, name: str, image: bytes, shared: int, device: int) -> tuple[Any, Kernel, int, int, int]:
        """Read a kernel: module, kernel, registers, spilled bytes, the most threads of a block."""
        major, minor = self.runtime.gpu.device.compute_capability
        kernel = Kernel(cubin.read(bytes(image), name, f"sm_{major}{minor}"))
        return kernel, kernel, kernel.code.registers, kernel.code.local_bytes, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The function that launches a compiled kernel."""
        types = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
            values = rest[4:]  # after the packed metadata, the launch's metadata and two hooks
            pairs = [(kind, value) for kind, value in zip(types, values, strict=True) if kind != "constexpr"]
            arguments = packed(kernel.code, [kind for kind, _ in pairs], [value for _, value in pairs])
            threads = 32 * metadata.num_warps
            made = Launch(kernel, (x, y, z), threads, metadata.shared, arguments, self.runtime.memory())
            if self.runtime.passed(made) != 0:
                raise RuntimeError("the simulator refused a launch of Triton")

        return launch


def activate(runtime: Runtime) -> None:
    """Make Triton's JIT launch on the simulator."""
    importlib.import_module("triton.runtime").driver.set_active(Driver(runtime))
