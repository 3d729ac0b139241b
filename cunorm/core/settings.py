"""All environment variables that cunorm reads.

=======================  ==================================================================  =================
variable                 meaning                                                             default
=======================  ==================================================================  =================
``CUNORM_CACHE_DIR``     folder for all that is kept: builds, machine code, tables, studies  user cache dir
``CUNORM_TILING_TABLE``  a tiling table that is searched before all others                   none
``CUNORM_TRACE``         a file in which the problems that run are recorded for cunorm tune  none
``CUNORM_CPU_DEVICE``    the GPU whose limits and tiles the CPU executor uses                ``H200``
``CUNORM_CXX``           the C++ compiler of the CPU executor                                g++, clang++, zig
``CUNORM_CPU_ORDER``     order of the CPU executor's threads: ascending, descending, random  ``ascending``
``CUNORM_CPU_CORES``     operating-system threads that the CPU executor spreads blocks over  all cores
``CUNORM_CPU_BUILD``     plain: for normal use; checked: all accesses checked and counted    ``plain``
``CUNORM_SPECIALISE``    when kernels with a problem's sizes as constants are compiled:      ``background``
                         in the background, always (the first call waits), never
=======================  ==================================================================  =================
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

#: The names of all variables. Any other CUNORM_ name in the environment is probably a spelling mistake.
VARIABLES = (
    "CUNORM_CACHE_DIR",
    "CUNORM_TILING_TABLE",
    "CUNORM_TRACE",
    "CUNORM_CPU_DEVICE",
    "CUNORM_CXX",
    "CUNORM_CPU_ORDER",
    "CUNORM_CPU_CORES",
    "CUNORM_CPU_BUILD",
    "CUNORM_SPECIALISE",
)
#: How the CPU executor compiles kernels; `sanitised` is for child processes, see tests/executors/run_sanitised.py.
BUILDS = ("plain", "checked", "sanitised")

#: When specialised kernels are compiled, see `cunorm.runtime.specialised`.
SPECIALISE = ("background", "always", "never")


def _path(chosen: str) -> Path:
    """The path in a variable. A file of settings, unlike a shell, leaves ``~`` as it is."""
    return Path(os.path.expanduser(chosen))


def cache_dir_named() -> bool:
    """Whether ``CUNORM_CACHE_DIR`` names the cache folder."""
    return bool(os.environ.get("CUNORM_CACHE_DIR"))


def cache_dir() -> Path:
    """The folder for builds, machine code, tables and studies. `cunorm.core.cache_folder` creates it.

    Without ``CUNORM_CACHE_DIR`` it is in the user's cache folder. If the user has no home folder, it is ``cunorm-UID``
    in the folder for temporary files.
    """
    chosen = os.environ.get("CUNORM_CACHE_DIR")
    if chosen:
        return _path(chosen)
    try:
        found = platformdirs.user_cache_dir("cunorm", appauthor=False)
    except RuntimeError:  # the user has no home folder
        found = ""
    if os.path.isabs(found):
        return Path(found)
    return Path(tempfile.gettempdir()) / f"cunorm-{os.getuid()}"


def cpu_device() -> str:
    """Name of the device whose limits and tiles the CPU executor uses."""
    return os.environ.get("CUNORM_CPU_DEVICE") or "H200"


def tiling_table() -> Path | None:
    """The tiling table that is searched before all others, or None."""
    chosen = os.environ.get("CUNORM_TILING_TABLE")
    return _path(chosen) if chosen else None


def trace() -> Path | None:
    """The file in which the problems that run are recorded, or None."""
    chosen = os.environ.get("CUNORM_TRACE")
    return _path(chosen) if chosen else None


def cxx() -> str | None:
    """The C++ compiler that ``CUNORM_CXX`` names, or None."""
    return os.environ.get("CUNORM_CXX") or None


def cpu_order() -> str:
    """The order in which the CPU executor resumes the threads of a block."""
    return os.environ.get("CUNORM_CPU_ORDER") or "ascending"


def cpu_build() -> str:
    """Which of `BUILDS` the CPU executor runs."""
    build = os.environ.get("CUNORM_CPU_BUILD") or "plain"
    if build not in BUILDS:
        raise ValueError(f"CUNORM_CPU_BUILD: {build!r}, expected plain or checked")
    return build


def specialise() -> str:
    """When specialised kernels are compiled: one of `SPECIALISE`."""
    chosen = os.environ.get("CUNORM_SPECIALISE") or "background"
    if chosen not in SPECIALISE:
        raise ValueError(f"CUNORM_SPECIALISE: {chosen!r}, expected {', '.join(SPECIALISE[:-1])} or {SPECIALISE[-1]}")
    return chosen


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_cores() -> int:
    """Number of operating-system threads that run the blocks of a kernel on the CPU executor."""
    text = os.environ.get("CUNORM_CPU_CORES")
    if text is None or text == "":
        return cores()
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise ValueError(f"CUNORM_CPU_CORES: {text!r}, expected a whole number from 1 up")
    return int(text)
