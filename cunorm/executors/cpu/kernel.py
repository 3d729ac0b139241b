"""Kernels of the CPU executor: a kernel text behind some headers, compiled, linked with the runtime, cached, loaded.

One text has three builds: plain, checked (the runtime sees every memory access), and sanitised (for a process that has
the compiler's sanitisers loaded).
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
from cunorm.jit import cpu_builds, cxx

#: Folder of the runtime's headers in the compiler's messages.
INCLUDE = "cunorm/executors/cpu/include"
#: Headers that precede a kernel's text, and the headers of the runtime's object, in their order of inclusion.
KERNEL_HEADERS = ("runtime.h", "calls.h", "access.h", "instrumentation.h", "shuffles.h", "builtins.h", "entry.h")
RUNTIME_HEADERS = (
    "system.h",
    *KERNEL_HEADERS,
    "faults.h",
    "scheduler.h",
    "warps.h",
    "memory.h",
    "checked/clocks.h",
    "checked/races.h",
    "checked/events.h",
    "checked/counters.h",
    "checked/hooks.h",
    "checked/reports.h",
    "async.h",
    "launch.h",
    "os_threads.h",
)
# struct Launch in runtime.h: sixteen words; `next`, one cache line further; the arguments, another cache line further.
LAUNCH = "@16q64xq64x"
LAUNCH_WORDS = 33


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    name : str
        Name of the entry function.
    build : str
        One of `settings.BUILDS`.
    path : Path
        The shared object. ``kernel.cpp`` in the same folder is the text that was compiled.
    signature : str
        A letter per parameter: P pointer, q long long, d double.
    static_bytes : int
        Size of the section of ``__shared__`` variables in bytes; 0 if the text declares none.
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
        """Return the same kernel in another build."""
        return self if build == self.build else compile(self._text, self.name, build=build)


class Addresses(ctypes.Structure):
    """struct Scratch in calls.h: addresses of the memory of one operating-system thread of a launch."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("worker", "stacks", "arenas", "text")]


#: struct Interpreter in calls.h.
INTERPRETER = (ctypes.c_void_p * 3)(
    *[
        ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        for name in ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
    ]
)
#: launch, scratches, their count, arena_bytes, text_size, interpreter, whether to check for signals.
_RUN = ctypes.PYFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)
_kernels: dict[tuple[object, ...], Kernel] = {}


@cache
def _headers(names: tuple[str, ...]) -> str:
    folder = Path(__file__).with_name("include")
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in names}
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
    """Compile a kernel, or return it from the cache of the process or of the disk.

    Parameters
    ----------
    text : str
        Complete CUDA C: with types and tile, and with includes expanded.
    entry : str
        Name of the ``extern "C" __global__`` function.
    ordinal : int
        Always 0.
    compiler : Compiler, optional
        The compiler; None: ``cxx.chosen()``.
    defines : tuple of str
        Macros for the runtime, for example ``CUNORM_CPU_UCONTEXT`` (switch fibers with ucontext on every machine).
    build : str, optional
        One of ``settings.BUILDS``; None: ``CUNORM_CPU_BUILD``.

    Raises
    ------
    CompileError
        If there is no compiler, the text does not compile, or the cache folder cannot be used.
    ValueError
        If the build is `sanitised` in a process without the sanitiser's library.
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
    """Return all kernels of a text, in order, so that they share one build.

    If the pattern does not find `entry`, return `entry` alone.
    """
    found = _KERNEL.findall(_COMMENT.sub("", text))
    return found if entry in found else [entry]


def check_build(build: str) -> None:
    """Check that this process can load a build (ValueError)."""
    # Without the sanitiser's library, loading such a build would end the process.
    if build == "sanitised" and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise ValueError(
            "CUNORM_CPU_BUILD: 'sanitised' needs the sanitiser's library loaded before Python; "
            "type: pytest --sanitise -m sanitise"
        )


def _compile(text: str, entry: str, compiler: cxx.Compiler, defines: tuple[str, ...], build: str) -> Kernel:
    check_build(build)
    defines = (*defines, "CUNORM_CPU_CHECKED") if build == "checked" else defines
    macros = "".join(f"#define {name} 1\n" for name in defines)
    entries = _entries(text, entry)
    below = "".join(f"CUNORM_CPU_ENTRY({name})\n" for name in entries)
    source = f'{macros}{_headers(KERNEL_HEADERS)}\n#line 1 "{entries[0]}.cu"\n{text}\n#line 1 "entry"\n{below}'
    runtime = cpu_builds.Runtime(f"{macros}{_headers(RUNTIME_HEADERS)}", cxx.flags(compiler, build, runtime=True))
    libraries = cxx.SANITISERS if build == "sanitised" else ()
    library, path = cpu_builds.load(source, entries[0], compiler, cxx.flags(compiler, build), libraries, runtime)
    return _kernel(text, entry, build, library, path)


def _kernel(text: str, entry: str, build: str, library: ctypes.CDLL, path: Path) -> Kernel:
    """Return a kernel of a loaded library.

    Its run function releases the GIL, and raises the exception of a signal handler.
    """
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
