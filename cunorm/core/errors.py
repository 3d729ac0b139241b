"""The exceptions and warnings that cunorm defines, and an exception as one line of text."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A kernel did not compile, or no compiler was found; the text says what to do."""


class CacheWarning(UserWarning):
    """The default cache folder is not safe to load code from; the process uses a private temporary folder."""


class NoCompilerError(CompileError):
    """There is no C++ compiler for the CPU executor; the text says what to install."""


class UnsupportedTile(ValueError):
    """A strategy or tile is not legal for a problem on a device; the text is the message of ``refuses()``.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> tile = cunorm.Tile("warp", threads=128, lanes=1, packs_per_thread=1, rows_per_team=1)
    >>> cunorm.layer_norm(np.ones((2, 4096), np.float32), 4096, tile=tile)
    Traceback (most recent call last):
        ...
    cunorm.core.errors.UnsupportedTile: ...
    """


class KernelFault(RuntimeError):
    """The CPU executor found a fault in a kernel, such as a deadlock, a divergent barrier or a misaligned access."""


class TableError(ValueError):
    """A tiling table cannot be used; the text names the file.

    The file is not a tiling table, has another version's schema, or is for another device.
    """


class TableWarning(UserWarning):
    """A tiling table or one of its entries is ignored; the call takes its tile from elsewhere."""


class TraceError(ValueError):
    """A file is not a trace of problems; the text names the file and, if a line is wrong, the line."""


#: Lines of a compiler's log in the text of an error.
_LOG_LINES = 40


def first_lines(log: str) -> str:
    """The first lines of a compiler's log, and how many there are besides."""
    lines = log.splitlines()
    more = [f"... {len(lines) - _LOG_LINES} more lines"] if len(lines) > _LOG_LINES else []
    return "\n".join(lines[:_LOG_LINES] + more)


def sentence(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def reason_of(error: OSError) -> str:
    """The reason of a failed access to a file, without the file's name."""
    return "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def about_file(error: Exception, path: object = None) -> str:
    """The text of an error about a file, with the file's name: an OSError's reason, or the text of any other error.

    Parameters
    ----------
    error : Exception
    path : str or path, optional
        The name as the user knows it. None: that of the OSError, if it has one.
    """
    if not isinstance(error, OSError):
        return str(error)
    named = error.filename if path is None else path
    return reason_of(error) if named is None else f"{named}: {reason_of(error)}"
