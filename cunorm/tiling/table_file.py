"""Writes the file of a tiling table: one writer at a time, and whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cunorm.core import cache
from cunorm.core.errors import TableError
from cunorm.core.files import write_whole

LOCK_SECONDS = 60  # that a writer waits for another
#: Of a table's file: some 150,000 entries. A larger one is read in no call.
MOST_BYTES = 64 << 20


def target(path: str | Path) -> Path:
    """The file that a table is written to: a link stays one.

    Raises
    ------
    TableError
        If it cannot be a table's: a folder, a pipe, a link to itself.
    """
    try:
        found = Path(path).resolve()
        if found.exists() and not found.is_file():
            raise TableError(f"{path}: no regular file")
    except (OSError, RuntimeError) as error:
        raise TableError(f"{path}: {error}") from None
    return found


def contents(path: Path) -> bytes:
    """What is in the file.

    Raises
    ------
    OSError
        If it cannot be read.
    TableError
        If it is larger than `MOST_BYTES`, or no file.
    """
    if path.exists() and not path.is_file():
        raise TableError(f"{path}: no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MOST_BYTES + 1) if size <= MOST_BYTES else b""
    if max(size, len(data)) > MOST_BYTES:
        raise TableError(f"{path}: {max(size, len(data)) / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}")
    return data


def check_writable(path: Path) -> None:
    """Whether the file can be written, before anybody works for what is to be in it.

    Raises
    ------
    TableError
        If it cannot.
    """
    import tempfile

    lock = _lock_of(path)
    try:
        cache.make(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
        if os.path.exists(lock) and not os.access(lock, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, f"{lock} is somebody else's")
    except OSError as error:
        raise TableError(f"{path}: cannot be written: {error.strerror or error}; name another file") from None


def _lock_of(path: Path) -> str:
    """The file that is locked while a table is written."""
    name = f"{path}.lock"
    if os.path.islink(name):  # filelock would refuse it, in the system's words
        raise TableError(f"{path}: {name} is a link, expected the lock's own file; delete it")
    return name


def write(path: Path, lines: Iterable[str]) -> None:
    """Replace the file as a whole: whoever reads it sees the old one or the new one. Under the lock.

    Raises
    ------
    OSError
        If it cannot be written.
    TableError
        If it would be larger than `MOST_BYTES`: nothing would read it.
    """
    import glob  # here, as filelock below: whoever only reads tables need not wait for them

    text = "\n".join(lines) + "\n"
    if len(text) > MOST_BYTES:
        raise TableError(f"{path}: would have {len(text) / 2**20:.0f} MiB, expected at most {MOST_BYTES >> 20}")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    write_whole(path, text, mode=path.stat().st_mode & 0o777 if path.exists() else 0o644, lasting=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a table's file; its folder is made if it is not there.

    Raises
    ------
    TableError
        If another process does not let go of it, or a link lies in its place.
    OSError
        If the folder cannot be written.
    """
    import filelock

    cache.make(path.parent)
    name = _lock_of(path)
    try:
        lock: filelock.BaseFileLock = filelock.FileLock(name, timeout=LOCK_SECONDS)
        lock.acquire()
    except NotImplementedError:  # a file system without locks
        lock = filelock.SoftFileLock(name, timeout=LOCK_SECONDS)
        lock.acquire()
    except filelock.Timeout:
        raise TableError(f"{path}: another process has held {name} for {LOCK_SECONDS} s") from None
    try:
        yield
    finally:
        lock.release()
