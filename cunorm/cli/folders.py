"""What `cunorm doctor` says of the cache folders."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cunorm.core import cache, settings
from cunorm.core.errors import CacheWarning, CompileError

from .findings import Finding, size

__all__ = ["examine"]

GROUP = "Cache folders"


def _fault(name: str, folder: Path, text: str, advice: str) -> Finding:
    return Finding(GROUP, name, "fault", text, advice, {"path": str(folder), "writable": False, "bytes": 0})


def _folder(name: str, folder: Path, variable: str) -> Finding:
    facts: dict[str, Any] = {"path": str(folder), "writable": True, "bytes": 0}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        return _fault(name, folder, text, f'export {variable}="$(mktemp -d)"')
    for directory, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                facts["bytes"] += os.lstat(os.path.join(directory, file)).st_size
    return Finding(GROUP, name, "ok", f"{folder}, writable, {size(facts['bytes'])}", facts=facts)


def _own() -> Finding:
    """cunorm's: code is loaded from it, so nobody else may write to it."""
    folder = settings.cache_dir().absolute()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # it is a finding
            used = cache.root()
    except CompileError as error:
        text, _, command = str(error).partition("; type: ")
        return _fault("cunorm", folder, text, command)
    except OSError:  # in which way it cannot be written
        return _folder("cunorm", folder, "CUNORM_CACHE_DIR")
    if used != folder:
        text = f"{folder} may hold what somebody else has put there; each process uses a temporary one"
        return _fault("cunorm", folder, text, f"sudo rm -r {shlex.quote(str(folder))}")
    return _folder("cunorm", folder, "CUNORM_CACHE_DIR")


def examine() -> Iterator[Finding]:
    """The cache folders of cunorm and, if it is installed, of CuPy."""
    yield _own()
    if importlib.util.find_spec("cupy") is not None:
        chosen = os.environ.get("CUPY_CACHE_DIR")
        yield _folder("CuPy", Path(chosen) if chosen else Path.home() / ".cupy" / "kernel_cache", "CUPY_CACHE_DIR")
