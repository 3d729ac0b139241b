"""The CPU executor: the same CUDA C, compiled as C++ behind a small runtime and run on fibers. Exact, not fast.

``cpu_runtime.h`` says how a block runs. This file compiles a text once, keeps the result on disk, and spreads the
blocks of a launch over operating-system threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from cunorm import compilers, devices, settings
from cunorm.errors import CompileError, KernelFault

__all__ = ["Kernel", "compile", "launch", "limits", "synchronise"]

HEADERS = ("cpu_runtime.h", "cpu_scheduler.h", "cpu_builtins.h")
WARP = 32
MOST_THREADS = 1024
STACK_BYTES = 65536  # stack_bytes in cpu_runtime.h
FAULT_BYTES = 2048
SPREAD_SECONDS = 200e-6  # a launch is spread over cores if about this much work is left after its first block
# struct Launch in cpu_runtime.h: grid, threads, shared_bytes, order, seed, last; next, a cache line away; arguments.
LAUNCH = "@6q64xq64x"
LAUNCH_WORDS, LAST, NEXT = 23, 5, 14
ORDERS = {"ascending": 0, "descending": 1, "random": 2}
LETTERS = {"P": "pointer", "q": "long long", "d": "double"}


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    name : str
        The entry.
    path : Path
        The shared object; ``kernel.cpp`` beside it is the whole text that was compiled.
    signature : str
        A letter per parameter: P pointer, q long long, d double.
    """

    name: str
    path: Path
    signature: str
    _run: Callable[..., int] = field(repr=False, compare=False)
    _worker_bytes: int = field(repr=False, compare=False)
    _packer: struct.Struct = field(repr=False, compare=False)
    _buffer: type[ctypes.Array[ctypes.c_int64]] = field(repr=False, compare=False)


def limits(ordinal: int = 0) -> devices.Device:
    """The device that the CPU executor poses as (``CUNORM_CPU_DEVICE``)."""
    if ordinal != 0:
        raise ValueError(f"ordinal: {ordinal}, expected 0: the CPU executor is one device")
    return devices.known(settings.cpu_device())


def synchronise(ordinal: int = 0) -> None:
    """Nothing to wait for: a launch returns when the kernel has run."""


# ---- compiling ------------------------------------------------------------------------------------------------------

_kernels: dict[tuple[object, ...], Kernel] = {}


@cache
def _runtime() -> str:
    texts = {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in HEADERS}
    return "".join(f'#line 1 "cunorm/{name}"\n{text}' for name, text in texts.items())


def compile(
    text: str,
    entry: str,
    ordinal: int = 0,
    *,
    compiler: compilers.Compiler | None = None,
    defines: tuple[str, ...] = (),
) -> Kernel:
    """Compile a kernel, or take it from the process's or the disk's cache.

    Parameters
    ----------
    text : str
        CUDA C, complete: types, tile, includes expanded.
    entry : str
        Name of the ``extern "C" __global__`` function.
    ordinal : int
        Always 0.
    compiler : Compiler, optional
        Another than ``compilers.chosen()``.
    defines : tuple of str
        Macros for the runtime, for instance ``CUNORM_CPU_UCONTEXT``: switch fibers with ucontext on any machine.

    Raises
    ------
    CompileError
        If there is no compiler, the text does not compile, or the cache folder cannot be written.
    """
    folder = settings.cache_dir() / "cpu"
    key = (text, entry, compiler or settings.cxx(), defines, folder)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _compile(text, entry, compiler or compilers.chosen(), defines, folder)
    return kernel


def _compile(text: str, entry: str, compiler: compilers.Compiler, defines: tuple[str, ...], kept: Path) -> Kernel:
    macros = "".join(f"#define {name} 1\n" for name in defines)
    source = f'{macros}{_runtime()}\n#line 1 "{entry}.cu"\n{text}\n#line 1 "entry"\nCUNORM_CPU_ENTRY({entry})\n'
    options = compilers.flags(compiler)
    facts = (source, *options, *compiler.command, compiler.version, compilers.processor())
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    folder = kept / f"{entry}-{digest[:32]}"
    if not (folder / "kernel.so").exists():
        compilers.build(source, entry, compiler, options, folder)
    try:
        return _load(entry, folder / "kernel.so")
    except (OSError, AttributeError):  # damaged, for instance by a full disk: once more
        shutil.rmtree(folder, ignore_errors=True)
        compilers.build(source, entry, compiler, options, folder)
    try:
        return _load(entry, folder / "kernel.so")
    except (OSError, AttributeError) as error:
        raise CompileError(
            f"{entry}: {error}; does {kept} allow execution? set CUNORM_CACHE_DIR to a folder that does"
        ) from error


def _load(entry: str, path: Path) -> Kernel:
    library = ctypes.CDLL(str(path))  # its calls release the interpreter's lock
    library.cunorm_cpu_signature.restype = ctypes.c_char_p
    library.cunorm_cpu_worker_bytes.restype = ctypes.c_longlong
    signature: str = library.cunorm_cpu_signature().decode()
    run = library.cunorm_cpu_run
    run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int]
    run.restype = ctypes.c_int
    words = ctypes.c_int64 * (LAUNCH_WORDS + len(signature))
    packer = struct.Struct(LAUNCH + signature)
    return Kernel(entry, path, signature, run, library.cunorm_cpu_worker_bytes(), packer, words)


# ---- launching ------------------------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """Memory of one operating-system thread for the fibers' stacks, the shared-memory arena and the worker's state.

    Pages are taken from the system when first touched. Kept from launch to launch, and given back with the thread.
    """

    def __init__(self) -> None:
        self.capacity = (0, 0, 0)
        self.text = ctypes.create_string_buffer(FAULT_BYTES)

    def ready(self, threads: int, shared_bytes: int, worker_bytes: int) -> None:
        if threads <= self.capacity[0] and shared_bytes <= self.capacity[1] and worker_bytes <= self.capacity[2]:
            return
        wanted = (threads, -(-shared_bytes // 4096) * 4096, worker_bytes)
        threads, shared_bytes, worker_bytes = map(max, self.capacity, wanted)
        size = (threads + 1) * STACK_BYTES + shared_bytes + worker_bytes
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would cover 32 stacks and commit them all
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.stacks = -(-address // STACK_BYTES) * STACK_BYTES
        self.arena = self.stacks + threads * STACK_BYTES
        self.worker = self.arena + shared_bytes
        self.capacity = (threads, shared_bytes, worker_bytes)


_scratch = _Scratch()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(settings.cpu_cores(), "cunorm-cpu")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has none of the threads


@lru_cache(maxsize=64)
def _order(text: str) -> tuple[int, int]:
    name, colon, seed = text.partition(":")
    if name not in ORDERS or (colon and (name != "random" or not seed.isdecimal())):
        raise ValueError(f"CUNORM_CPU_ORDER: {text!r}, expected ascending, descending, random or random:SEED")
    return ORDERS[name], int(seed or 0) & (2**63 - 1)


def _work(kernel: Kernel, buffer: ctypes.Array[ctypes.c_int64], threads: int, shared_bytes: int) -> str | None:
    """Take blocks of a launch until none is left; the fault's sentence if there is one."""
    scratch = _scratch
    scratch.ready(threads, shared_bytes, kernel._worker_bytes)
    if kernel._run(buffer, scratch.worker, scratch.stacks, scratch.arena, scratch.text, FAULT_BYTES) == 0:
        return None
    return scratch.text.value.decode(errors="replace")


def launch(
    kernel: Kernel,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: Sequence[int | float],
    *,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Run a kernel to its end.

    Parameters
    ----------
    kernel : Kernel
    grid, threads : int
        Blocks, and threads of each: whole warps.
    shared_bytes : int
        Dynamic shared memory of a block.
    arguments : sequence of int or float
        Addresses, ints and floats, as the kernel's parameters ask.
    blocks : tuple of int, optional
        Run only the blocks [first, last) of the grid.

    Raises
    ------
    ValueError, TypeError
        If the launch itself is not legal.
    KernelFault
        If the kernel broke a rule; the text names kernel, block and thread. What it had written stays written.
    """
    if not 1 <= grid < 2**31:
        raise ValueError(f"grid: {grid} blocks, expected 1 to 2^31 - 1")
    if not WARP <= threads <= MOST_THREADS or threads % WARP != 0:
        raise ValueError(f"threads: {threads}, expected whole warps of {WARP}, up to {MOST_THREADS}")
    most = limits().shared_memory_per_block
    if not 0 <= shared_bytes <= most:
        raise ValueError(f"shared_bytes: {shared_bytes}, expected 0 to {most}, what a block of the device may have")
    first, last = blocks if blocks is not None else (0, grid)
    if not 0 <= first <= last <= grid:
        raise ValueError(f"blocks: {blocks}, expected a part of the grid's {grid}")
    order, seed = _order(settings.cpu_order())
    buffer = kernel._buffer()
    try:
        kernel._packer.pack_into(buffer, 0, grid, threads, shared_bytes, order, seed, last, first, *arguments)
    except struct.error as error:
        wanted = ", ".join(LETTERS[letter] for letter in kernel.signature)
        raise TypeError(f"arguments: {tuple(arguments)}, {kernel.name} takes ({wanted}): {error}") from None

    def work() -> str | None:
        return _work(kernel, buffer, threads, shared_bytes)

    cores = min(settings.cpu_cores(), last - first)
    if cores > 1:  # one block alone, to see whether the others are worth more threads
        buffer[LAST] = first + 1
        began = time.perf_counter()
        fault = work()
        seconds = (time.perf_counter() - began) * (last - first - 1)
        if fault is not None:
            raise KernelFault(fault)
        buffer[LAST], buffer[NEXT] = last, first + 1
        cores = min(cores, last - first - 1) if seconds > SPREAD_SECONDS else 1
    helpers = [_pool().submit(work) for _ in range(cores - 1)]
    try:
        fault = work()
    finally:
        buffer[NEXT] = last
        faults = [helper.result() for helper in helpers if not helper.cancel()]
    for sentence in (fault, *faults):
        if sentence is not None:
            raise KernelFault(sentence)
