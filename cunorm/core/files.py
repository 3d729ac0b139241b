"""Files that a command writes: a check of their names, and atomic replacement."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

#: Suffixes of the formats in which commands write pictures.
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


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

    Raises
    ------
    OSError
        If the file cannot be written. It has the name of the file, not of the temporary one.
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
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def target(path: str | Path) -> Path:
    """The file to which a path leads. Of a symbolic link it is the target, so that a writer keeps the link.

    Raises
    ------
    OSError
        If it is not a regular file (a folder, a pipe), or is a link to itself.
    """
    try:
        found = Path(path).resolve()
    except RuntimeError as error:  # a link to itself
        raise OSError(errno.ELOOP, str(error), str(path)) from None
    if found.exists() and not found.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found


def file_to_write(
    option: str, name: str | None, suffixes: Sequence[str] = (), *, ours: Callable[[str], bool] | None = None
) -> Path | None:
    """The path that an option names for a result. It is checked before the result is computed, which may take an hour.

    Parameters
    ----------
    option : str
        Name of the option, for messages.
    name : str or None
        None: the option is absent.
    suffixes : sequence of str
        The suffixes that the name may have, in lower case; empty: any.
    ours : callable, optional
        Text of an existing file -> whether it is an earlier result, which may be replaced. None: any file may be.

    Returns
    -------
    Path or None
        See `target`.

    Raises
    ------
    ValueError
        If it is not a name of a file, the file cannot be written, or it exists and is no regular file or not ours.
    """
    if name is None:
        return None
    try:
        path = None if not name or Path(name).is_dir() else target(name)
    except OSError as error:
        raise ValueError(f"{option}: {name}: {error.strerror}") from None
    if path is None or not path.parent.is_dir():
        raise ValueError(f"{option}: {name!r}, expected a file in an existing folder")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option}: {name!r}, expected a name that ends in {', '.join(suffixes)}")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write in {path.parent}: {error.strerror}") from error
    text = path.read_text(encoding="utf-8", errors="replace") if ours is not None and path.exists() else ""
    if ours is not None and text and not ours(text):
        raise ValueError(f"{option}: {path} has other contents than an earlier result; delete it, or name another file")
    return path
