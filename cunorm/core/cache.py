"""The cache folder: how it is made, and who may write to it. Code is loaded from it, so nobody else may."""

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
    """Make a folder and its missing parents, each for its owner alone, whatever the umask says.

    Raises
    ------
    OSError
        If one cannot be made, or something else lies there.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path).st_mode):
            return
    if not path.parent.is_dir():
        make(path.parent)
    try:
        path.mkdir(PRIVATE)
    except FileExistsError:
        if path.is_dir():  # another process was first
            return
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    path.chmod(PRIVATE)  # the umask may have taken more


def _user(uid: int) -> str:
    """A user's name, or the number of one that has none here."""
    import pwd  # here: it is needed for an error alone

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def distrust(facts: os.stat_result, sticky: bool = False) -> str | None:
    """Why a file or folder may hold what somebody else has put there; None if only its owner and root can.

    Parameters
    ----------
    facts : os.stat_result
    sticky : bool
        Whether a folder like ``/tmp`` will do, where nobody can replace what others have made.

    Returns
    -------
    str or None
        What follows its name in a sentence: ``belongs to mallory``.
    """
    if facts.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user(facts.st_uid)}, not to {_user(os.geteuid())}"
    if facts.st_mode & OTHERS_WRITE and not (sticky and facts.st_mode & stat.S_ISVTX):
        return f"may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def _fault(path: Path, sticky: bool = False) -> str | None:
    """As `distrust`; of a link, whether link and target can be trusted."""
    if (link := os.lstat(path)).st_uid not in (0, os.geteuid()):
        return distrust(link)
    return distrust(os.stat(path), sticky)


def _tighten(path: Path) -> None:
    """Take the right to write away from others, if the folder is this user's: an old umask gave it."""
    facts = os.stat(path)
    if facts.st_uid == os.geteuid() and facts.st_mode & OTHERS_WRITE and os.lstat(path).st_uid == facts.st_uid:
        with contextlib.suppress(OSError):  # on a read-only file system: the next look says what is wrong
            path.chmod(stat.S_IMODE(facts.st_mode) & ~OTHERS_WRITE)


def _advice(path: Path) -> str:
    """What to type about a folder that ``CUNORM_CACHE_DIR`` names and that is not safe."""
    quoted = shlex.quote(str(path))
    if os.stat(path).st_uid == os.geteuid():
        return f"chmod go-w {quoted}"
    if os.access(path, os.W_OK):
        return f"export CUNORM_CACHE_DIR={shlex.quote(str(path / 'cunorm'))}"
    return 'export CUNORM_CACHE_DIR="$(mktemp -d)"'


@functools.cache
def _temporary(path: Path, sentence: str, process: int) -> Path:
    """A private folder for one process, deleted at its end, in the place of one that is not safe."""
    made = Path(tempfile.mkdtemp(prefix="cunorm-"))

    def delete() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(delete)
    warnings.warn(
        f"the cache folder {path} {sentence}, and code is loaded from it; this process uses {made} and deletes it at "
        "its end; set CUNORM_CACHE_DIR to a folder of your own",
        CacheWarning,
        stacklevel=2,
    )
    return made


def root() -> Path:
    """The cache folder, made if it is not there, after a look at who may write to it.

    The default folder is taken from others if it is this user's; if it is somebody else's, the process gets a private
    temporary one, and a `CacheWarning`. One that ``CUNORM_CACHE_DIR`` names is left as it is.

    Raises
    ------
    CompileError
        If ``CUNORM_CACHE_DIR`` names a folder that others may write to; the text says what to type.
    OSError
        If it cannot be made or reached.
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
    """A folder of the cache, for its owner alone; made if it is not there.

    Parameters
    ----------
    name : str

    Raises
    ------
    CompileError, OSError
        As `root`.
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
