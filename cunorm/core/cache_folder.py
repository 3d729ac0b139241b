"""The cache folder: its creation and its permissions.

Code is loaded from it, so only its user and root may be able to write to it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shlex
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

from . import settings
from .errors import CacheWarning, CompileError

PRIVATE = 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make(path: Path) -> None:
    """Create a folder and its missing parents, each accessible to its owner only, whatever the umask.

    Raises
    ------
    OSError
        If a folder cannot be created, or its path exists and is not a folder.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path).st_mode):
            return
    if not path.parent.is_dir():
        make(path.parent)
    try:
        path.mkdir(PRIVATE)
    except FileExistsError:
        if path.is_dir():  # another process has created it
            return
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    path.chmod(PRIVATE)  # the umask may have removed some of the owner's rights


def _user(uid: int) -> str:
    """A user's name, or ``user UID`` if the system has no name for it."""
    import pwd  # imported here: only error messages need it

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def distrust(facts: os.stat_result, sticky: bool = False) -> str | None:
    """Why another user can write a file or folder; None if only this user and root can.

    Parameters
    ----------
    facts : os.stat_result
    sticky : bool
        Whether to accept a folder with the sticky bit, such as ``/tmp``: users cannot replace each other's files in it.

    Returns
    -------
    str or None
        The rest of a sentence that begins with the path: ``belongs to mallory, not to alice``.
    """
    if facts.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user(facts.st_uid)}, not to {_user(os.geteuid())}"
    if facts.st_mode & OTHERS_WRITE and not (sticky and facts.st_mode & stat.S_ISVTX):
        return f"may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def _fault(path: Path, sticky: bool = False) -> str | None:
    """See `distrust`. Of a symbolic link, the link's owner and the target are checked."""
    if (link := os.lstat(path)).st_uid not in (0, os.geteuid()):
        return distrust(link)
    return distrust(os.stat(path), sticky)


def _tighten(path: Path) -> None:
    """Remove other users' write permission, left by an old umask, from a folder that belongs to this user."""
    facts = os.stat(path)
    if facts.st_uid == os.geteuid() and facts.st_mode & OTHERS_WRITE and os.lstat(path).st_uid == facts.st_uid:
        with contextlib.suppress(OSError):  # on a read-only file system: `_fault` reports it afterwards
            path.chmod(stat.S_IMODE(facts.st_mode) & ~OTHERS_WRITE)


def _advice(path: Path) -> str:
    """The shell command that replaces or repairs an unsafe folder that ``CUNORM_CACHE_DIR`` names."""
    quoted = shlex.quote(str(path))
    if os.stat(path).st_uid == os.geteuid():
        return f"chmod go-w {quoted}"
    if os.access(path, os.W_OK):
        return f"export CUNORM_CACHE_DIR={shlex.quote(str(path / 'cunorm'))}"
    return 'export CUNORM_CACHE_DIR="$(mktemp -d)"'


@functools.cache
def _temporary(path: Path, sentence: str, process: int) -> Path:
    """Create a private folder that replaces an unsafe cache folder; it is deleted when the process ends."""
    made = Path(tempfile.mkdtemp(prefix="cunorm-"))

    def delete() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(delete)
    warnings.warn(
        f"the cache folder {path} {sentence}, and code is loaded from it; this process uses {made} instead and deletes "
        "it at exit; set CUNORM_CACHE_DIR to a folder that only you can write to",
        CacheWarning,
        stacklevel=2,
    )
    return made


def root() -> Path:
    """The cache folder. It is created if missing, and its permissions are checked.

    If the default folder belongs to this user, other users' write permission is removed. If it is still unsafe, the
    process gets a private temporary folder and a `CacheWarning`. The permissions of a folder that ``CUNORM_CACHE_DIR``
    names are not changed.

    Raises
    ------
    CompileError
        If ``CUNORM_CACHE_DIR`` names a folder that other users may write to; the text says what to type.
    OSError
        If the folder cannot be created or accessed.
    """
    path = settings.cache_dir().absolute()
    make(path)
    if not settings.cache_dir_named():
        _tighten(path)
    sentence = _fault(path, sticky=True)
    if sentence is None:
        return path
    if settings.cache_dir_named():
        raise CompileError(
            f"CUNORM_CACHE_DIR: {path} {sentence}, and code is loaded from it; expected a folder that only you can "
            f"write to; type: {_advice(path)}"
        )
    return _temporary(path, sentence, os.getpid())


def folder(name: str) -> Path:
    """A private subfolder of the cache folder; it is created if missing.

    Parameters
    ----------
    name : str

    Raises
    ------
    CompileError, OSError
        See `root`.
    """
    path = root() / name
    make(path)
    _tighten(path)
    if (sentence := _fault(path)) is None:
        return path
    if settings.cache_dir_named():
        raise CompileError(
            f"CUNORM_CACHE_DIR: {path} {sentence}, and code is loaded from it; expected a folder that only you can "
            'write to; type: export CUNORM_CACHE_DIR="$(mktemp -d)"'
        )
    made = _temporary(path, sentence, os.getpid()) / name
    make(made)
    return made
