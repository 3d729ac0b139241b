"""Kernels of the CPU executor: a text behind the runtime's headers, compiled once, kept on disk, loaded.

Three builds of one text: plain, checked (every access is seen), and sanitised (for a process that has the compiler's
sanitisers loaded).
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cunorm.core import settings
from cunorm.jit import builds, cxx

#: Where the compiler's messages say that the runtime's headers are, and the headers in their order.
INCLUDE = "cunorm/executors/cpu/include"
HEADERS = (
    "runtime.h",
    "faults.h",
    "scheduler.h",
    "warps.h",
    "memory.h",
    "checked/clocks.h",
    "checked/races.h",
    "checked/events.h",
    "checked/counters.h",
    "checked/hooks.h",
    "notes.h",
    "async.h",
    "launch.h",
    "threads.h",
    "builtins.h",
)
# struct Launch in runtime.h: sixteen words, next a cache line away, the arguments another one.
LAUNCH = "@16q64xq64x"
LAUNCH_WORDS = 33


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    name : str
        The entry.
    build : str
        One of `settings.BUILDS`.
    path : Path
        The shared object; ``kernel.cpp`` beside it is the whole text that was compiled.
    signature : str
        A letter per parameter: P pointer, q long long, d double.
    static_bytes : int
        Whether it declares ``__shared__`` variables; 0 if not.
    """

    name: str
    build: str
    path: Path
    signature: str
    static_bytes: int
    _text: str = field(repr=False)
    _run: Callable[..., int] = field(repr=False, compare=False)
    _worker_bytes: Callable[[int, int], int] = field(repr=False, compare=False)
    _packer: struct.Struct = field(repr=False, compare=False)
    _buffer: type[ctypes.Array[ctypes.c_int64]] = field(repr=False, compare=False)
    _free: Callable[[int], None] = field(repr=False, compare=False)

    def built(self, build: str) -> Kernel:
        """The same kernel in another build."""
        return self if build == self.build else compile(self._text, self.name, build=build)


class Addresses(ctypes.Structure):
    """struct Scratch in launch.h: where the memory of one operating-system thread of a launch lies."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("worker", "stacks", "arenas", "text")]


#: struct Interpreter in threads.h.
INTERPRETER = (ctypes.c_void_p * 3)(
    *[
        ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        for name in ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
    ]
)
#: launch, scratches, their count, arena_bytes, text_size, interpreter, whether signals are looked at.
_RUN = ctypes.PYFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)
_kernels: dict[tuple[object, ...], Kernel] = {}


@cache
def _runtime() -> str:
    folder = Path(__file__).with_name("include")
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in HEADERS}
    return "".join(f'#line 1 "{INCLUDE}/{name}"\n{text}' for name, text in texts.items())


def compile(
    text: str,
    entry: str,
    ordinal: int = 0,
    *,
    compiler: cxx.Compiler | None = None,
    defines: tuple[str, ...] = (),
    build: str | None = None,
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
    build : str, optional
        One of ``settings.BUILDS``; None: as ``CUNORM_CPU_BUILD`` says.

    Raises
    ------
    CompileError
        If there is no compiler, the text does not compile, or the cache folder cannot be used.
    ValueError
        If the build is `sanitised` in a process that has no sanitiser's library.
    """
    build = build or settings.cpu_build()
    key = (text, entry, compiler or settings.cxx(), defines, build, settings.cache_dir())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _compile(text, entry, compiler or cxx.chosen(), defines, build)
    return kernel


_KERNEL = re.compile(
    r"""^extern "C" __global__ void\s+(?:CLUSTER\s+)?(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\(""",
    re.MULTILINE,
)

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def _entries(text: str, entry: str) -> list[str]:
    """All kernels of a text, in order, for one build of all; of a text that is written otherwise, that entry alone."""
    found = _KERNEL.findall(_COMMENT.sub("", text))
    return found if entry in found else [entry]


def _compile(text: str, entry: str, compiler: cxx.Compiler, defines: tuple[str, ...], build: str) -> Kernel:
    if build == "sanitised" and not hasattr(ctypes.CDLL(None), "__asan_init"):  # its library would end the process
        raise ValueError(
            "CUNORM_CPU_BUILD: 'sanitised' needs the sanitiser's library loaded before Python; "
            "type: pytest --sanitise -m sanitise"
        )
    defines = (*defines, "CUNORM_CPU_CHECKED") if build == "checked" else defines
    macros = "".join(f"#define {name} 1\n" for name in defines)
    entries = _entries(text, entry)
    below = "".join(f"CUNORM_CPU_ENTRY({name})\n" for name in entries)
    source = f'{macros}{_runtime()}\n#line 1 "{entries[0]}.cu"\n{text}\n#line 1 "entry"\n{below}'
    libraries = cxx.SANITISERS if build == "sanitised" else ()
    library, path = builds.load(source, entries[0], compiler, cxx.flags(compiler, build), libraries)
    return _kernel(text, entry, build, library, path)


def _kernel(text: str, entry: str, build: str, library: ctypes.CDLL, path: Path) -> Kernel:
    """A kernel of a loaded library. Its run lets other Python threads go on, and raises what a handler raised."""
    signed = library[f"cunorm_cpu_signature_{entry}"]
    signed.restype = ctypes.c_char_p
    library.cunorm_cpu_static_bytes.restype = ctypes.c_longlong
    worker_bytes = library.cunorm_cpu_worker_bytes
    worker_bytes.argtypes, worker_bytes.restype = [ctypes.c_longlong] * 2, ctypes.c_longlong
    signature: str = signed().decode()
    run = _RUN((f"cunorm_cpu_run_{entry}", library))
    free = library.cunorm_cpu_free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    words = ctypes.c_int64 * (LAUNCH_WORDS + len(signature))
    packer = struct.Struct(LAUNCH + signature)
    static = library.cunorm_cpu_static_bytes()
    return Kernel(entry, build, path, signature, static, text, run, worker_bytes, packer, words, free)
