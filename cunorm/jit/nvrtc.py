"""NVRTC without CuPy and without a GPU: what ptxas and the PTX say of a kernel, for any architecture and version.

CuPy loads one NVRTC; here each installed libnvrtc is loaded by its path, so that two versions can be compared in one
process. Results are kept on disk under the hash of everything that they depend on, because ptxas is slow.

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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cunorm.core import cache
from cunorm.core.errors import CompileError
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
    """What one kernel uses.

    Attributes
    ----------
    entry : str
    registers : int
        32-bit registers of a thread.
    spill_bytes : int
        Of a thread, stores and loads together.
    stack_bytes : int
        Of a thread's frame in local memory.
    shared_bytes : int
        Static shared memory of a block.
    barriers : int
        Named barriers of a block.
    loads_16, stores_16 : int
        Accesses to global memory of 16 bytes in the PTX, asynchronous and bulk copies too; ptxas leaves them so.
    taken_apart : int
        Of those loads, the ones whose words are cut into 16-bit elements right where they are loaded: then a thread
        waits for each of its loads before it starts the next, and its data takes twice the registers.
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
    """What the kernels of a program use, from its PTX and its log with ptxas's report.

    Raises
    ------
    CompileError
        If the log does not say it in the known form.
    """
    bodies = {part.partition("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}
    found = []
    for part in log.split("Compiling entry function")[1:]:
        entry = re.search(r"'(\w+)'", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers(.*)", part)
        if entry is None or frame is None or used is None:
            raise CompileError(f"ptxas's report has an unknown form:\n{log}")
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


#: Supported versions, from and before. CUDA 12.8 is the first that knows sm_100 and sm_120.
SUPPORTED: tuple[tuple[int, int], tuple[int, int]] = ((12, 8), (14, 0))
#: The wheels that bring the oldest and the newest of them.
INSTALL: tuple[str, str] = ("nvidia-cuda-nvrtc-cu12==12.8.*", "nvidia-cuda-nvrtc>=13,<14")
#: What CuPy's RawKernel passes, in its order; without them the machine code would not be the one that users run.
OPTIONS: tuple[str, ...] = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
#: Compute capabilities of the GPUs that kernels are checked for: A100, L40, H100 and H200, B200, RTX 50.
ARCHITECTURES: tuple[str, ...] = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_REPORT = "--ptxas-options=-v"
#: Counts up when `Usage` or the reading of the log changes: older files of the cache are then misses.
_FORMAT = 2
_LOG_LINES = 40
#: Where libnvrtc lies below an entry of ``sys.path`` (the wheels for CUDA 12 and 13) and below a CUDA toolkit.
_WHEELS = ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib")
_TOOLKITS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


@dataclass(frozen=True)
class Nvrtc:
    """One installed NVRTC.

    Attributes
    ----------
    version : str
        With its build, ``12.8.93`` say.
    path : str
        Of the library.
    """

    version: str
    path: str

    @property
    def number(self) -> tuple[int, ...]:
        """The version as numbers, to sort by."""
        return tuple(map(int, self.version.split(".")))

    def compile(self, text: str, architecture: str) -> tuple[str, str]:
        """The PTX of a text, and the log with ptxas's report. Threads may compile at the same time.

        Raises
        ------
        CompileError
            With the first lines of NVRTC's log.
        """
        return _compile(self.path, self.version, text, (*OPTIONS, _REPORT, f"-arch={architecture}"))


# ---- the library ----------------------------------------------------------------------------------------------------


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)  # by its path: two libraries of one name are then two


def _text_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    """A text that a program has: ``PTX`` or ``ProgramLog``."""
    count = ctypes.c_size_t()
    if getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(count)) != 0 or count.value == 0:
        return ""
    buffer = ctypes.create_string_buffer(count.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode(errors="replace")


def _compile(path: str, version: str, text: str, options: tuple[str, ...]) -> tuple[str, str]:
    library, program = _library(path), ctypes.c_void_p()
    if library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) != 0:
        raise CompileError(f"NVRTC {version}, {path}: cannot make a program; reinstall it")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), given) != 0
        log = _text_of(library, program, "ProgramLog")
        if failed:
            lines = "\n".join(log.splitlines()[:_LOG_LINES])
            raise CompileError(f"NVRTC {version} with {' '.join(options)}:\n{lines}")
        return _text_of(library, program, "PTX"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _opened(path: str) -> Nvrtc | None:
    """The NVRTC of that path if it loads; its exact version stands in the head of the PTX that it makes."""
    try:
        ptx, _ = _compile(path, "?", "", (f"-arch=compute_{ARCHITECTURES[0].removeprefix('sm_')}",))
    except (OSError, AttributeError, CompileError):
        return None
    found = re.search(r"release [\d.]+, V(\d+(?:\.\d+)+)", ptx)
    return None if found is None else Nvrtc(found[1], path)


def _paths() -> Iterable[Path]:
    """Every libnvrtc of a CUDA major version on this machine, as far as it lies where wheels and toolkits put it."""
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
    """Every installed NVRTC of a supported version, oldest first; one of each version."""
    found: dict[str, Nvrtc] = {}
    for path in dict.fromkeys(path.resolve() for path in _paths()):
        nvrtc = _opened(str(path))
        if nvrtc is not None and SUPPORTED[0] <= nvrtc.number[:2] < SUPPORTED[1]:
            found.setdefault(nvrtc.version, nvrtc)
    return sorted(found.values(), key=lambda nvrtc: nvrtc.number)


def supported() -> str:
    """The supported versions in words."""
    return "{}.{} or newer, before {}.{}".format(*SUPPORTED[0], *SUPPORTED[1])


def ends() -> list[Nvrtc]:
    """The oldest and the newest installed NVRTC of the supported versions: two, one, or none."""
    found = installed()
    return found if len(found) < 2 else [found[0], found[-1]]


# ---- what ptxas says ------------------------------------------------------------------------------------------------


def usages(text: str, architecture: str, nvrtc: Nvrtc) -> list[Usage]:
    """What the kernels of a text use; from the cache, else compiled and kept there.

    Parameters
    ----------
    text, architecture : str
        CUDA C, complete; one of `ARCHITECTURES`.
    nvrtc : Nvrtc

    Raises
    ------
    CompileError
        If it does not compile; that is not kept. If others may write to the cache folder, see `cunorm.core.cache.root`.
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
    """The cache's file for a result: named by all that it depends on. None where no folder can be made for it."""
    depends = json.dumps([text, OPTIONS, _REPORT, architecture, nvrtc.version, _FORMAT])
    try:
        folder = cache.folder("nvrtc")
    except OSError:
        return None
    return folder / f"{hashlib.sha256(depends.encode()).hexdigest()}.json"


def _sealed(kept: list[dict[str, Any]]) -> str:
    """A checksum: half a file and a flipped bit are both damage."""
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> list[Usage] | None:
    """What a file of the cache says; None if it is not there, damaged, or may be somebody else's word."""
    try:
        if cache.distrust(file.stat()) is not None:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        return [Usage(**usage) for usage in found["usages"]] if found["sealed"] == _sealed(found["usages"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(file: Path, kept: list[Usage]) -> None:
    """Keep a result: written apart, then renamed, so that nobody reads half. An unwritable folder is no fault."""
    facts = [asdict(usage) for usage in kept]
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps({"sealed": _sealed(facts), "usages": facts}), mode=0o600)
