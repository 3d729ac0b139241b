"""Shared objects of the CPU executor on disk: found by name, checked before they are loaded, built anew if damaged.

A build is a folder of the cache: ``kernel.so``, its whole source ``kernel.cpp``, and the seal, a checksum. Loading a
damaged shared object can end the process or compute something else, so nothing is loaded that does not fit its seal.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cunorm.core import cache
from cunorm.core.errors import CompileError

from . import cxx

OBJECT, SOURCE, SEAL = "kernel.so", "kernel.cpp", "kernel.sha256"
WORK = ".build-"  # begins the name of a folder in which somebody compiles
ABANDONED_SECONDS = 24 * 3600.0  # after which a work folder counts as left behind where folders cannot be locked
ATTEMPTS = 5


def load(
    source: str,
    entry: str,
    compiler: cxx.Compiler,
    options: tuple[str, ...],
    libraries: tuple[str, ...] = (),
) -> tuple[ctypes.CDLL, Path]:
    """The library of a source and its file, compiled if the cache does not have it whole.

    Parameters
    ----------
    source : str
        C++.
    entry : str
        What the build is called.
    compiler : Compiler
    options, libraries : tuple of str
        Of the compiler, and of its linking.

    Raises
    ------
    CompileError
        If it does not compile, or the cache folder cannot be used.
    """
    facts = (source, *options, *compiler.command, compiler.version, cxx.processor())
    digest = hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()
    try:
        folder = cache.folder("cpu") / f"{entry}-{digest[:32]}"
    except OSError as error:
        raise _unusable(entry, Path(error.filename or "."), error) from error
    for _ in range(2):  # at the moment of loading, another process may be putting its own build in its place
        if not _whole(folder):
            _build(source, entry, compiler, options, folder, libraries)
        try:
            return ctypes.CDLL(str(folder / OBJECT)), folder / OBJECT
        except OSError as error:
            failed = error
    raise CompileError(f"{entry}: {failed}; {_hint(folder.parent)}") from failed


def _hint(folder: Path) -> str:
    """Why the system's loader may not take a whole build, and what to do."""
    if re.search(r"\$\{?(ORIGIN|LIB|PLATFORM)", str(folder)):
        return "the loader replaces $ORIGIN, $LIB and $PLATFORM in paths; set CUNORM_CACHE_DIR to a path without them"
    return f"does {folder} allow execution? set CUNORM_CACHE_DIR to a folder that does"


def _unusable(entry: str, folder: Path, error: OSError) -> CompileError:
    return CompileError(
        f"{entry}: cannot write the cache folder {folder} ({error.strerror or error}); "
        "set CUNORM_CACHE_DIR to a folder that can be written"
    )


# ---- the seal -------------------------------------------------------------------------------------------------------


def _seal(name: str, data: bytes) -> str:
    """The checksum of a shared object, and of the name of its build: another's build in its place does not fit."""
    return hashlib.sha256(name.encode() + b"\0" + data).hexdigest()


def _whole(folder: Path) -> bool:
    """Whether a build is there as it was made, and nobody else could have made it."""
    try:
        if cache.distrust(os.stat(folder)) is not None:
            return False
        if not stat.S_ISREG(os.stat(folder / OBJECT).st_mode):
            return False  # a pipe would be waited for
        with (folder / OBJECT).open("rb") as file:
            if cache.distrust(os.fstat(file.fileno())) is not None:
                return False
            data = file.read()
        return (folder / SEAL).read_bytes() == _seal(folder.name, data).encode()
    except OSError:
        return False


def _finish(work: Path, name: str) -> None:
    """Write the seal, have the disk take what counts, and set modes, which must not depend on the umask."""
    (work / SEAL).write_text(_seal(name, (work / OBJECT).read_bytes()), encoding="ascii")
    for path in (work / OBJECT, work / SEAL, work):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    for path in work.iterdir():
        path.chmod(0o700 if path.name == OBJECT else 0o600)
    work.chmod(0o700)


# ---- making one -----------------------------------------------------------------------------------------------------


def _build(
    source: str,
    entry: str,
    compiler: cxx.Compiler,
    options: tuple[str, ...],
    folder: Path,
    libraries: tuple[str, ...],
) -> None:
    """Compile in a folder of its own, which is then renamed into place: nobody sees half of it."""
    kept = folder.parent
    try:
        _sweep(kept)
        with _working(kept) as work:
            (work / SOURCE).write_text(source, encoding="utf-8")
            cxx.shared_object(SOURCE, OBJECT, entry, compiler, options, libraries, work, kept / "zig")
            _finish(work, folder.name)
            _publish(work, folder)
    except OSError as error:
        raise _unusable(entry, kept, error) from error


def _publish(work: Path, folder: Path) -> None:
    """Put a finished build in its place; one that is there and whole stays, one that is damaged goes."""
    aside = work.with_name(f"{work.name}.old")
    for _ in range(ATTEMPTS):
        try:
            work.rename(folder)
            return
        except OSError as error:
            failed = error
        if _whole(folder):  # another process was first
            return
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        _remove(aside)
    raise failed


def _remove(path: Path) -> None:
    """Delete a folder or whatever else is there, as far as it can be deleted."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _lock(handle: int) -> bool | None:
    """Take the lock of an open folder: True taken, False somebody has it, None there are no locks here.

    The lock ends with its process, however that ends.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _claim(kept: Path) -> tuple[Path, int] | None:
    """A new folder to compile in, and its handle, locked; None if somebody swept it before it was."""
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=kept))
    try:
        handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _lock(handle) is not False and work.exists():
        return work, handle
    os.close(handle)
    return None


@contextlib.contextmanager
def _working(kept: Path) -> Iterator[Path]:
    """An empty folder to compile in. Its lock says to `_sweep` that somebody does."""
    claimed = next(filter(None, (_claim(kept) for _ in range(ATTEMPTS))), None)
    if claimed is None:
        raise OSError(errno.EBUSY, "somebody deletes the folders that are made there", str(kept))
    work, handle = claimed
    try:
        yield work
    finally:
        _remove(work)  # not there any more if it was published
        os.close(handle)


def _sweep(kept: Path) -> None:
    """Clear the folders in which compiles were killed."""
    for left in kept.glob(f"{WORK}*"):
        try:
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            free = _lock(handle)
            if free is None:
                free = time.time() - os.fstat(handle).st_mtime > ABANDONED_SECONDS
            if free:
                _remove(left)
        finally:
            os.close(handle)
