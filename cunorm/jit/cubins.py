"""Machine code of specialised kernels, cached on disk: one file per text, options and version of the compiler.

The folder keeps at most `MOST_FILES` files; the ones that were not used for the longest time are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from cunorm.core import cache_folder
from cunorm.core.files import write_whole

#: Maximum number of files, of some 50 kB each.
MOST_FILES = 4096
#: When there are more, one of this many is deleted, the oldest.
DELETED = 4


def _folder() -> Path:
    return cache_folder.folder("cubins")


def cached(text: str, options: tuple[str, ...], version: str, compile: Callable[[], bytes]) -> Path:
    """Return the file with the machine code of a text. On a miss, compile the text and write the file.

    Parameters
    ----------
    text : str
        Complete CUDA C.
    options : tuple of str
        Options of the compiler, with the architecture.
    version : str
        Version of the compiler.
    compile : callable
        Returns the machine code.

    Raises
    ------
    CompileError, OSError
        If the cache folder cannot be used; see `cunorm.core.cache_folder.folder`.
    """
    name = hashlib.sha256(json.dumps([text, options, version]).encode()).hexdigest()
    file = _folder() / f"{name}.cubin"
    if file.exists() and cache_folder.distrust(file.stat()) is None:
        with contextlib.suppress(OSError):  # on a read-only file system
            os.utime(file)
        return file
    write_whole(file, compile(), mode=0o600)
    _prune(file.parent)
    return file


def _prune(folder: Path) -> None:
    """Delete the oldest files of a full folder."""
    files = list(folder.glob("*.cubin"))
    if len(files) <= MOST_FILES:
        return
    ages = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            ages.append((file.stat().st_mtime, file))
    for _, file in sorted(ages)[: len(files) // DELETED]:
        file.unlink(missing_ok=True)
