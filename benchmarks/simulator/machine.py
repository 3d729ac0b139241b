"""Run launches of a kernel's machine code: compile the engine, describe the launch, translate faults."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator import cubin, decode, records
from benchmarks.simulator.cubin import WIDTH, Cubin, Place
from benchmarks.simulator.records import Counter, Instruction, Job
from benchmarks.simulator.records import Region as Bytes
from cunorm.core.errors import KernelFault
from cunorm.executors.cpu.guarded_arrays import Region
from cunorm.jit import cpu_builds, cxx

ENGINE = Path(__file__).with_name("engine")
#: The engine's files in their order of inclusion.
FILES = (
    "warp.h", "operands.h", "arithmetic.h", "floating.h", "memory.h", "accesses.h", "machine.h", "run.h", "clock.h",
)  # fmt: skip
_INCLUDES = (
    "algorithm", "cfenv", "cmath", "cstdarg", "cstdio", "cstring", "deque", "map", "memory", "queue", "string",
    "vector",
)  # fmt: skip
#: Registers are read as integers and as floats; no contraction, since the instructions say what is fused.
OPTIONS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall")
MESSAGE_BYTES = 1024
#: Offsets in constant bank 0: threads, blocks, the generic address of local memory, the stack pointer.
THREADS, BLOCKS, LOCAL, STACK = 0x0, 0xC, 0x20, 0x28


@functools.cache
def engine() -> ctypes.CDLL:
    """The compiled engine."""
    texts = [f"#include <{name}>" for name in _INCLUDES]
    texts.append(f"static {records.declarations()}".removeprefix("static "))
    for name in FILES:
        texts.append(f'#line 1 "benchmarks/simulator/engine/{name}"\n{(ENGINE / name).read_text(encoding="utf-8")}')
    library, _ = cpu_builds.load("\n".join(texts), "simulator", cxx.chosen(), OPTIONS)
    return library


@dataclass(frozen=True)
class Kernel:
    """A kernel for the simulator.

    Attributes
    ----------
    code : Cubin
        Its machine code.
    text : str or None
        The CUDA C that it was compiled from, by which source lines are found; None if it is unknown.
    """

    code: Cubin
    text: str | None = field(default=None, repr=False)

    @classmethod
    def of_text(cls, text: str, entry: str, architecture: str = "sm_90") -> Kernel:
        """Compile CUDA C. Parameters as of `cubin.compiled`."""
        return cls(cubin.compiled(text, entry, architecture), text)

    @functools.cached_property
    def instructions(self) -> ctypes.Array[Instruction]:
        """The decoded instructions."""
        return decode.program(self.code)

    def places(self, instruction: int) -> tuple[Place, ...]:
        """The source lines of an instruction, the innermost first; none if they are unknown."""
        if self.text is None:
            return ()
        return cubin.places(self.text, self.code.entry, self.code.architecture).get(instruction * WIDTH, ())


kernel_of = functools.lru_cache(maxsize=128)(Kernel.of_text)


def three(sizes: int | Sequence[int]) -> tuple[int, int, int]:
    """Sizes in three directions; the directions that are not given have the size 1."""
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True)
class Placed(Region):
    """An array at an address of the simulated GPU, which does not depend on where its bytes lie in this process.

    Attributes
    ----------
    host : int
        Address of the bytes in this process.
    """

    host: int = 0


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel on arrays.

    Attributes
    ----------
    kernel : Kernel
    grid, threads : int or tuple of int
        Blocks, and threads per block, in one to three directions.
    shared_bytes : int
        Dynamic shared memory per block.
    arguments : sequence of int or float, or bytes
        Addresses, integers and doubles, eight bytes each; or the bytes of the parameters as they lie in memory.
    memory : sequence of Region
        The arrays that the kernel may access. The address of an array is that of its bytes in this process, unless it
        is a `Placed`.
    cluster : int
        Blocks per cluster.
    resident : int
        Clusters that are alive at a time.
    """

    kernel: Kernel
    grid: int | tuple[int, ...]
    threads: int | tuple[int, ...]
    shared_bytes: int
    arguments: Sequence[int | float] | bytes
    memory: Sequence[Region]
    cluster: int = 1
    resident: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(three(self.grid))

    @property
    def block_threads(self) -> int:
        """Threads per block."""
        return math.prod(three(self.threads))


def _arguments(code: Cubin, launch: Launch) -> bytes:
    """Constant bank 0: the sizes of the launch, the stack pointer, the arguments."""
    bank = bytearray(code.constants[0])
    struct.pack_into("<3I", bank, THREADS, *three(launch.threads))
    struct.pack_into("<3I", bank, BLOCKS, *three(launch.grid))
    struct.pack_into("<Q", bank, LOCAL, records.LOCAL_WINDOW << 32)
    struct.pack_into("<I", bank, STACK, code.local_bytes)
    given = launch.arguments
    if not isinstance(given, bytes):
        given = b"".join(struct.pack("<d" if isinstance(value, float) else "<q", value) for value in given)
    if len(given) != len(bank) - code.parameters:
        raise ValueError(f"arguments: {len(given)} bytes, kernel {code.entry} takes {len(bank) - code.parameters}")
    bank[code.parameters :] = given
    return bytes(bank) + bytes(-len(bank) % 8)  # constants are read in words


def job_of(launch: Launch, first: int, blocks: int) -> tuple[Job, ctypes.Array[Counter], list[Any]]:
    """The engine's description of a launch, its counters, and what must live as long as it."""
    code, instructions = launch.kernel.code, launch.kernel.instructions
    counters = (Counter * len(instructions))()
    regions = (Bytes * max(1, len(launch.memory)))()
    for index, region in enumerate(launch.memory):
        host = region.host if isinstance(region, Placed) else region.address
        regions[index] = Bytes(region.address, region.nbytes, host)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    banks = {**code.constants, 0: _arguments(code, launch)}
    kept: list[Any] = [instructions, counters, regions, message, banks]
    job = Job(
        program=ctypes.cast(instructions, ctypes.POINTER(Instruction)),
        instructions=len(instructions),
        regions=ctypes.cast(regions, ctypes.POINTER(Bytes)),
        regions_count=len(launch.memory),
        counters=ctypes.cast(counters, ctypes.POINTER(Counter)),
        cluster=launch.cluster,
        first=first,
        blocks=blocks,
        resident=launch.resident,
        shared_bytes=code.shared_bytes + launch.shared_bytes,
        local_bytes=code.local_bytes,
        registers=code.registers,
        message=ctypes.cast(message, ctypes.c_void_p),
        message_bytes=MESSAGE_BYTES,
    )
    job.grid[:], job.threads[:] = three(launch.grid), three(launch.threads)
    for bank, contents in banks.items():
        buffer = ctypes.create_string_buffer(contents, len(contents))
        kept.append(buffer)
        job.constants[bank], job.constant_bytes[bank] = ctypes.addressof(buffer), len(contents)
    return job, counters, kept


def run(launch: Launch, first: int = 0, blocks: int | None = None) -> np.ndarray[Any, Any]:
    """Run a launch, or some of its blocks; return what each instruction did.

    Parameters
    ----------
    launch : Launch
    first, blocks : int
        The first block that runs and the number of blocks, in whole clusters; None: all.

    Returns
    -------
    numpy.ndarray
        A record per instruction, with the fields of `records.Counter`.

    Raises
    ------
    KernelFault
        If the kernel accesses memory outside its arrays or misaligned, or waits forever. The message names the kernel,
        the block, the warp, and the source line.
    UnknownInstruction
        If the kernel has an instruction that the decoder does not know.
    """
    job, counters, kept = job_of(launch, first, launch.blocks - first if blocks is None else blocks)
    if engine().simulator_run(ctypes.byref(job)) != 0:
        raise KernelFault(sentence(launch, job, kept[3].value.decode()))
    return np.ctypeslib.as_array(counters)


def sentence(launch: Launch, job: Job, text: str) -> str:
    """The message of a fault."""
    pc, block, warp = job.fault
    for index, region in enumerate(launch.memory):
        text = text.replace(f"#{{{index}}}", region.name)
    where = launch.kernel.places(pc) if pc >= 0 else ()
    line = f" at {where[0][0]}:{where[0][1]}" if where else ""
    code = f" ({launch.kernel.code.lines[pc]})" if 0 <= pc < len(launch.kernel.code.lines) else ""
    return f"kernel {launch.kernel.code.entry}, block {block}, warp {warp}: {text}{line}{code}"
