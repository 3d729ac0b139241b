"""The file of a tiling table: writers lock it and replace it atomically."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cunorm.core import cache_folder, files
from cunorm.core.errors import TableError
from cunorm.core.files import write_whole

LOCK_SECONDS = 60  # for which a writer waits for another writer
#: Maximum size of a table's file: some 150,000 entries. A larger file is never read.
MOST_BYTES = 64 << 20


def target(path: str | Path) -> Path:
    """The file to which a table is written. Of a symbolic link it is the target, so that the link is kept.

    Raises
    ------
    TableError
        If it is not a regular file (a folder, a pipe), or is a link to itself.
    """
    try:
        return files.target(path)
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}") from None


def contents(path: Path) -> bytes:
    """The contents of the file.

    Raises
    ------
    OSError
        If the file cannot be read.
    TableError
        If the file is larger than `MOST_BYTES`, or not a regular file.
    """
    if path.exists() and not path.is_file():
        raise TableError(f"{path}: not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MOST_BYTES + 1) if size <= MOST_BYTES else b""
    if max(size, len(data)) > MOST_BYTES:
        raise TableError(f"{path}: {max(size, len(data)) / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}")
    return data


def check_writable(path: Path) -> None:
    """Check that the file can be written, before its contents are computed.

    Raises
    ------
    TableError
        If the file cannot be written.
    """
    import tempfile

    lock = _lock_of(path)
    try:
        cache_folder.make(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
        if os.path.exists(lock) and not os.access(lock, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, f"no permission to read and write {lock}")
    except OSError as error:
        raise TableError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None


def _lock_of(path: Path) -> str:
    """The path of the lock file that is held while a table is written."""
    name = f"{path}.lock"
    if os.path.islink(name):  # filelock would refuse it too, but with an unclear message
        raise TableError(f"{path}: {name} is a link, expected a regular lock file; delete it")
    return name


def write(path: Path, lines: Iterable[str]) -> None:
    """Replace the file atomically: a reader sees the old or the new contents. The caller holds the lock.

    Raises
    ------
    OSError
        If the file cannot be written.
    TableError
        If the file would be larger than `MOST_BYTES`, and so could not be read.
    """
    import glob  # imported here, as filelock below, because calls that only read tables do not need it

    text = "\n".join(lines) + "\n"
    if len(text) > MOST_BYTES:
        raise TableError(f"{path}: would be {len(text) / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # left by a killed writer
        left.unlink(missing_ok=True)
    write_whole(path, text, mode=path.stat().st_mode & 0o777 if path.exists() else 0o644, lasting=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a table's file; its folder is created if missing.

    Raises
    ------
    TableError
        If another process holds the lock for more than `LOCK_SECONDS`, or the lock file is a link.
    OSError
        If the folder cannot be written.
    """
    import filelock

    cache_folder.make(path.parent)
    name = _lock_of(path)
    try:
        lock: filelock.BaseFileLock = filelock.FileLock(name, timeout=LOCK_SECONDS)
        lock.acquire()
    except NotImplementedError:  # a file system without locks
        lock = filelock.SoftFileLock(name, timeout=LOCK_SECONDS)
        lock.acquire()
    except filelock.Timeout:
        raise TableError(f"{path}: another process has held {name} for {LOCK_SECONDS} s; try again later") from None
    try:
        yield
    finally:
        lock.release()
