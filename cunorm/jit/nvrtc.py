"""NVRTC without CuPy and without a GPU: resource usage of kernels, for any architecture and NVRTC version.

The numbers come from the report of ptxas and from the PTX. CuPy loads one NVRTC. This module loads each installed
libnvrtc by its path, so that two versions can be compared in one process. Results are cached on disk, because ptxas is
slow. The key is a hash of all inputs.

Sources: NVRTC's documentation (``nvrtcCompileProgram``, "supported compile options") and the options that CuPy 14.2
passes for a RawKernel (``cupy/cuda/compiler.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cunorm.core import cache_folder
from cunorm.core.errors import CompileError, first_lines
from cunorm.core.files import write_whole

_COPY = r"cp\.async\.(?:cg\.shared\.global \[[^;]*, 16;|bulk\.shared::cluster\.global\b)"
_LOAD = re.compile(rf"\bld\.global(?:\.\w+)*\.(?:v4\.[ufb]32|v2\.[ufb]64)\b|\b{_COPY}")
_STORE = re.compile(r"\bst\.global(?:\.\w+)*\.(?:v4\.[ufb]32|v2\.[ufb]64)\b")
_WORDS = ", ".join([r"(%r\d+)"] * 4)
_APART = re.compile(
    rf"\bld\.global(?:\.\w+)*\.v4\.[ub]32\s+\{{{_WORDS}\}}[^;]*;\s+mov\.b32\s+\{{[^}}]*\}}, (?:\1|\2|\3|\4);"
)


@dataclass(frozen=True)
class Usage:
    """Resource usage of one kernel.

    Attributes
    ----------
    entry : str
        Name of the kernel.
    registers : int
        32-bit registers per thread.
    spill_bytes : int
        Bytes of spill stores and spill loads per thread.
    stack_bytes : int
        Bytes of the stack frame per thread, in local memory.
    shared_bytes : int
        Bytes of static shared memory per block.
    barriers : int
        Named barriers per block.
    loads_16, stores_16 : int
        16-byte accesses to global memory in the PTX, including asynchronous and bulk copies. ptxas does not split them.
    taken_apart : int
        The number of these loads whose words are split into 16-bit elements immediately after the load. A thread
        then waits for each load before it starts the next, and its data needs twice the registers.
    """

    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int
    loads_16: int
    stores_16: int
    taken_apart: int = 0


def usages_in(ptx: str, log: str) -> list[Usage]:
    """Parse the resource usage of a program's kernels from its PTX and from its log with the report of ptxas.

    Raises
    ------
    CompileError
        If the log does not have the known format.
    """
    bodies = {part.partition("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}
    found = []
    for part in log.split("Compiling entry function")[1:]:
        entry = re.search(r"'(\w+)'", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers(.*)", part)
        if entry is None or frame is None or used is None:
            raise CompileError(f"ptxas's report has an unknown format:\n{log}")
        shared, barriers = re.search(r"(\d+) bytes smem", used[2]), re.search(r"used (\d+) barriers", used[2])
        found.append(
            Usage(
                entry=entry[1],
                registers=int(used[1]),
                spill_bytes=int(frame[2]) + int(frame[3]),
                stack_bytes=int(frame[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                barriers=int(barriers[1]) if barriers else 0,
                loads_16=len(_LOAD.findall(bodies.get(entry[1], ""))),
                stores_16=len(_STORE.findall(bodies.get(entry[1], ""))),
                taken_apart=len(_APART.findall(bodies.get(entry[1], ""))),
            )
        )
    if not found:
        raise CompileError(f"ptxas reported no kernel:\n{log}")
    return found


#: Supported versions: from the first (included) to the second (excluded). CUDA 12.8 is the first that supports sm_100
#: and sm_120.
SUPPORTED: tuple[tuple[int, int], tuple[int, int]] = ((12, 8), (14, 0))
#: The wheels that provide the oldest and the newest supported version.
INSTALL: tuple[str, str] = ("nvidia-cuda-nvrtc-cu12==12.8.*", "nvidia-cuda-nvrtc>=13,<14")
#: Options that CuPy's RawKernel passes, in its order. With other options the machine code would differ from the code
#: that users run.
OPTIONS: tuple[str, ...] = ("--std=c++17", "--fmad=false", "-ftz=true", "--device-as-default-execution-space")
#: Compute capabilities for which kernels are checked: A100, L40, H100 and H200, B200, RTX 50.
ARCHITECTURES: tuple[str, ...] = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_REPORT = "--ptxas-options=-v"
#: Increment this when `Usage` or the parser of the log changes: older cache files are then misses.
_FORMAT = 2
#: Folders of libnvrtc, relative to an entry of ``sys.path`` (the wheels for CUDA 12 and 13) and to a CUDA toolkit.
_WHEELS = ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib")
_TOOLKITS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


@dataclass(frozen=True)
class Nvrtc:
    """One installed NVRTC.

    Attributes
    ----------
    version : str
        Version with the build number, for example ``12.8.93``.
    path : str
        Path of the library.
    """

    version: str
    path: str

    @property
    def number(self) -> tuple[int, ...]:
        """The version as a tuple of numbers, for sorting."""
        return tuple(map(int, self.version.split(".")))

    def compile(self, text: str, architecture: str) -> tuple[str, str]:
        """Compile a text to PTX. Return the PTX and the log with the report of ptxas. The function is thread-safe.

        Raises
        ------
        CompileError
            With the first lines of NVRTC's log.
        """
        return _compile(self.path, self.version, text, (*OPTIONS, _REPORT, f"-arch={architecture}"))

    def cubin(self, text: str, options: tuple[str, ...]) -> bytes:
        """Compile a text to machine code, with exactly these options.

        Raises
        ------
        CompileError
            With the first lines of NVRTC's log.
        """
        with _compiled(self.path, self.version, text, options) as program:
            return _bytes_of(*program, "CUBIN")


# ---- the library ----------------------------------------------------------------------------------------------------


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)  # a path keeps two libraries of the same name apart


def _bytes_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return a result of a program: ``PTX``, ``CUBIN`` or ``ProgramLog``."""
    count = ctypes.c_size_t()
    if getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(count)) != 0 or count.value == 0:
        return b""
    buffer = ctypes.create_string_buffer(count.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _text_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes_of(library, program, what).rstrip(b"\0").decode(errors="replace")


@contextlib.contextmanager
def _compiled(
    path: str, version: str, text: str, options: tuple[str, ...]
) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    """Compile a text; yield the library and the program, whose results can be read until the block ends."""
    library, program = _library(path), ctypes.c_void_p()
    if library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) != 0:
        raise CompileError(f"NVRTC {version}, {path}: nvrtcCreateProgram failed; reinstall it")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given) != 0:
            log = first_lines(_text_of(library, program, "ProgramLog"))
            raise CompileError(f"NVRTC {version} with {' '.join(options)}:\n{log}")
        yield library, program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(path: str, version: str, text: str, options: tuple[str, ...]) -> tuple[str, str]:
    """Compile a text; return the PTX and the log."""
    with _compiled(path, version, text, options) as program:
        return _text_of(*program, "PTX"), _text_of(*program, "ProgramLog")


@functools.cache
def _opened(path: str) -> Nvrtc | None:
    """Return the NVRTC at a path, or None if it does not load. The header of its PTX contains the exact version."""
    try:
        ptx, _ = _compile(path, "?", "", (f"-arch=compute_{ARCHITECTURES[0].removeprefix('sm_')}",))
    except (OSError, AttributeError, CompileError):
        return None
    found = re.search(r"release [\d.]+, V(\d+(?:\.\d+)+)", ptx)
    return None if found is None else Nvrtc(found[1], path)


def _paths() -> Iterable[Path]:
    """Yield every libnvrtc (one suffix, the CUDA major version) in the folders that wheels and toolkits use."""
    folders = [Path(entry or ".") / below for entry in sys.path for below in _WHEELS]
    roots = [
        os.environ.get("CUDA_PATH"),
        os.environ.get("CUDA_HOME"),
        *sorted(map(str, Path("/usr/local").glob("cuda*"))),
    ]
    folders += [Path(root) / below for root in roots if root for below in _TOOLKITS]
    for folder in folders:
        yield from (path for path in sorted(folder.glob("libnvrtc.so.*")) if path.name.count(".") == 2)


def installed() -> list[Nvrtc]:
    """Return the installed NVRTCs of supported versions, oldest first, one per version."""
    found: dict[str, Nvrtc] = {}
    for path in dict.fromkeys(path.resolve() for path in _paths()):
        nvrtc = _opened(str(path))
        if nvrtc is not None and SUPPORTED[0] <= nvrtc.number[:2] < SUPPORTED[1]:
            found.setdefault(nvrtc.version, nvrtc)
    return sorted(found.values(), key=lambda nvrtc: nvrtc.number)


def supported() -> str:
    """Describe the supported versions in words."""
    return "{}.{} or newer, before {}.{}".format(*SUPPORTED[0], *SUPPORTED[1])


def ends() -> list[Nvrtc]:
    """Return the oldest and the newest installed NVRTC of the supported versions: two, one, or none."""
    found = installed()
    return found if len(found) < 2 else [found[0], found[-1]]


# ---- resource usage -------------------------------------------------------------------------------------------------


def usages(text: str, architecture: str, nvrtc: Nvrtc) -> list[Usage]:
    """Return the resource usage of a text's kernels from the cache; on a miss, compile the text and cache the result.

    Parameters
    ----------
    text, architecture : str
        Complete CUDA C; one of `ARCHITECTURES`.
    nvrtc : Nvrtc

    Raises
    ------
    CompileError
        If the text does not compile (this is not cached), or if other users may write to the cache folder (see
        `cunorm.core.cache_folder.root`).
    """
    file = _file(text, architecture, nvrtc)
    kept = None if file is None else _read(file)
    if kept is None:
        kept = usages_in(*nvrtc.compile(text, architecture))
        if file is not None:
            _write(file, kept)
    return kept


# ---- the cache ------------------------------------------------------------------------------------------------------


def _file(text: str, architecture: str, nvrtc: Nvrtc) -> Path | None:
    """Return the cache file of a result, named by the hash of its inputs; None if its folder cannot be created."""
    depends = json.dumps([text, OPTIONS, _REPORT, architecture, nvrtc.version, _FORMAT])
    try:
        folder = cache_folder.folder("nvrtc")
    except OSError:
        return None
    return folder / f"{hashlib.sha256(depends.encode()).hexdigest()}.json"


def _sealed(kept: list[dict[str, Any]]) -> str:
    """Return a checksum of results. It detects truncated files and flipped bits."""
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> list[Usage] | None:
    """Read a cache file; None if it is missing, damaged, or may have been written by another user."""
    try:
        if cache_folder.distrust(file.stat()) is not None:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        return [Usage(**usage) for usage in found["usages"]] if found["sealed"] == _sealed(found["usages"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(file: Path, kept: list[Usage]) -> None:
    """Cache a result. The file is written elsewhere and renamed, so that no reader sees a partial file.

    An unwritable folder is not an error.
    """
    facts = [asdict(usage) for usage in kept]
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps({"sealed": _sealed(facts), "usages": facts}), mode=0o600)
