"""Shared objects of the CPU executor on disk: found by name, verified before loading, rebuilt if damaged.

A build is a folder in the cache. It contains ``kernel.so``, its source ``kernel.cpp``, and the seal (a checksum). A
shared object may contain another object, the runtime, which has a build of its own with ``runtime.o``. Loading a
damaged object can end the process or compute wrong results. So an object is loaded or linked only if it matches its
seal.
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
from typing import NamedTuple

from cunorm.core import cache_folder
from cunorm.core.errors import CompileError

from . import cxx

#: Objects of a build: what is loaded, and what is linked to it. The source and the seal have the same stem.
LOADED, LINKED = "kernel.so", "runtime.o"
WORK = ".build-"  # prefix of the names of folders in which a process compiles
ABANDONED_SECONDS = 24 * 3600.0  # age at which a work folder counts as abandoned, if folders cannot be locked
ATTEMPTS = 5


class Runtime(NamedTuple):
    """An object that is compiled once, and linked to the object of each source that needs it.

    Attributes
    ----------
    text : str
        C++ text.
    options : tuple of str
        Options for compiling.
    """

    text: str
    options: tuple[str, ...]


def load(
    source: str,
    entry: str,
    compiler: cxx.Compiler,
    options: tuple[str, ...],
    libraries: tuple[str, ...] = (),
    runtime: Runtime | None = None,
) -> tuple[ctypes.CDLL, Path]:
    """Load the library of a source, compiling it if the cache contains no intact build. Return it and its path.

    Parameters
    ----------
    source : str
        C++ text.
    entry : str
        Name of the build, for its folder and for error messages.
    compiler : Compiler
    options, libraries : tuple of str
        Options for compiling, and extra options for linking.
    runtime : Runtime, optional
        An object that is linked to the source's.

    Raises
    ------
    CompileError
        If the source does not compile, or the cache folder cannot be used.
    """
    parts = () if runtime is None else (runtime.text, *runtime.options)
    folder = _folder(source, entry, compiler, options, *libraries, *parts)
    for _ in range(2):  # another process may replace the build between the check and the load
        if not _whole(folder):
            linked = None if runtime is None else _object_of(runtime, entry, compiler)
            with _building(source, entry, folder, LOADED) as (work, zig_cache):
                more = libraries
                if linked is not None:
                    (work / LINKED).write_bytes(linked)
                    more = (LINKED, *libraries)
                names = (_named(LOADED, ".cpp"), LOADED)
                cxx.shared_object(*names, entry, compiler, options, more, work, zig_cache)
                (work / LINKED).unlink(missing_ok=True)
        try:
            return ctypes.CDLL(str(folder / LOADED)), folder / LOADED
        except OSError as error:
            failed = error
    raise CompileError(f"{entry}: {failed}; {_hint(folder.parent)}") from failed


def _object_of(runtime: Runtime, entry: str, compiler: cxx.Compiler) -> bytes:
    """Return the runtime's object, compiling it if the cache contains no intact build.

    The caller links these bytes: another process may replace the file. Messages name `entry`, the build that needs it.
    """
    folder = _folder(runtime.text, "runtime", compiler, runtime.options)
    found = _read(folder, LINKED)
    if found is None:
        with _building(runtime.text, entry, folder, LINKED) as (work, zig_cache):
            cxx.object_file(_named(LINKED, ".cpp"), LINKED, entry, compiler, runtime.options, work, zig_cache)
            found = (work / LINKED).read_bytes()
    return found


def _folder(source: str, entry: str, compiler: cxx.Compiler, options: tuple[str, ...], *others: str) -> Path:
    """Return the folder of a build. Its name depends on the texts, the options, the compiler and the processor."""
    facts = (source, *others, *options, *compiler.command, compiler.version, cxx.processor())
    digest = hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()
    try:
        return cache_folder.folder("cpu") / f"{entry}-{digest[:32]}"
    except OSError as error:
        raise _unusable(entry, Path(error.filename or "."), error) from error


def _hint(folder: Path) -> str:
    """Return why the system's loader may reject an intact build, and what to do."""
    if re.search(r"\$\{?(ORIGIN|LIB|PLATFORM)", str(folder)):
        return "the loader replaces $ORIGIN, $LIB and $PLATFORM in paths; set CUNORM_CACHE_DIR to a path without them"
    return f"{folder} may not allow execution; set CUNORM_CACHE_DIR to a folder that does"


def _unusable(entry: str, folder: Path, error: OSError) -> CompileError:
    return CompileError(
        f"{entry}: cannot write the cache folder {folder} ({error.strerror or error}); "
        "set CUNORM_CACHE_DIR to a folder that can be written"
    )


# ---- the seal -------------------------------------------------------------------------------------------------------


def _seal(name: str, data: bytes) -> str:
    """Return the checksum of an object and its build's name, so that a seal does not fit another build."""
    return hashlib.sha256(name.encode() + b"\0" + data).hexdigest()


def _named(name: str, suffix: str) -> str:
    """Return the name of an object's source (.cpp) or seal (.sha256)."""
    return str(Path(name).with_suffix(suffix))


def _whole(folder: Path, name: str = LOADED) -> bool:
    """Whether a build exists, is undamaged, and can only have been written by a trusted user."""
    return _read(folder, name) is not None


def _read(folder: Path, name: str) -> bytes | None:
    """Return the object of a build; None unless it is undamaged and can only have been written by a trusted user."""
    try:
        if cache_folder.distrust(os.stat(folder)) is not None:
            return None
        if not stat.S_ISREG(os.stat(folder / name).st_mode):
            return None  # opening a pipe would block
        with (folder / name).open("rb") as file:
            if cache_folder.distrust(os.fstat(file.fileno())) is not None:
                return None
            data = file.read()
        seal = (folder / _named(name, ".sha256")).read_bytes()
    except OSError:
        return None
    return data if seal == _seal(folder.name, data).encode() else None


def _finish(work: Path, build: str, name: str) -> None:
    """Write the seal, flush folder, object and seal to disk, and set modes independently of the umask."""
    seal = work / _named(name, ".sha256")
    seal.write_text(_seal(build, (work / name).read_bytes()), encoding="ascii")
    for path in (work / name, seal, work):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    for path in work.iterdir():
        path.chmod(0o700 if path.name == LOADED else 0o600)
    work.chmod(0o700)


# ---- building -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _building(source: str, entry: str, folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a separate folder with the source, to compile in, and zig's cache. Then rename the folder into place.

    So no process sees a partial build.
    """
    kept = folder.parent
    try:
        _sweep(kept)
        with _working(kept) as work:
            (work / _named(name, ".cpp")).write_text(source, encoding="utf-8")
            yield work, kept / "zig"
            _finish(work, folder.name, name)
            _publish(work, folder, name)
    except OSError as error:
        raise _unusable(entry, kept, error) from error


def _publish(work: Path, folder: Path, name: str) -> None:
    """Rename a finished build into place. Keep an intact build that exists already; replace a damaged one."""
    aside = work.with_name(f"{work.name}.old")
    for _ in range(ATTEMPTS):
        try:
            work.rename(folder)
            return
        except OSError as error:
            failed = error
        if _whole(folder, name):  # another process was first
            return
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        _remove(aside)
    raise failed


def _remove(path: Path) -> None:
    """Delete a path, be it a folder or not, as far as permissions allow."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _lock(handle: int) -> bool | None:
    """Lock an open folder. True: locked; False: another process holds the lock; None: the file system has no locks.

    The system releases the lock when the process ends, even if the process is killed.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _claim(kept: Path) -> tuple[Path, int] | None:
    """Create a folder to compile in, and lock it. Return it and its handle, or None if `_sweep` deleted it first."""
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
    """Yield an empty folder to compile in. Its lock prevents `_sweep` of other processes from deleting it."""
    claimed = next(filter(None, (_claim(kept) for _ in range(ATTEMPTS))), None)
    if claimed is None:
        raise OSError(errno.EBUSY, "another process deletes new folders in it", str(kept))
    work, handle = claimed
    try:
        yield work
    finally:
        _remove(work)  # a no-op if it was published, because it was renamed
        os.close(handle)


def _sweep(kept: Path) -> None:
    """Delete the work folders of compiles that were killed."""
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
