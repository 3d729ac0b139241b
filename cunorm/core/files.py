"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str, *, mode: int = 0o644, lasting: bool = False) -> None:
    """Write a file beside its place, then put it there: who reads it sees the old one or the new one.

    Parameters
    ----------
    path : Path
        In a folder that is there.
    text : str
    mode : int
        Of the file, whatever the umask says.
    lasting : bool
        Whether its bytes reach the disk before its name does.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
