"""Atomic replacement of files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_whole(path: Path, contents: str | bytes, *, mode: int = 0o644, lasting: bool = False) -> None:
    """Write a temporary file in the same folder and rename it: a reader sees the old or the new contents.

    Parameters
    ----------
    path : Path
        A path in an existing folder.
    contents : str or bytes
        A text is written in UTF-8.
    mode : int
        Permissions of the file, whatever the umask.
    lasting : bool
        Whether to flush the contents to the disk before the file is renamed.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
