"""The exceptions of cunorm that are not plain ``TypeError`` or ``ValueError``; any exception in a sentence."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A kernel did not compile, or no compiler was found; the text says what to do."""


class CacheWarning(UserWarning):
    """The default cache folder is not safe to load code from; a private temporary one takes its place."""


class NoCompilerError(CompileError):
    """There is no C++ compiler for the CPU executor; the text says what to install."""


class UnsupportedTile(ValueError):
    """A strategy or tile is not legal for a problem on a device; the text is ``refuses()``'s sentence."""


class KernelFault(RuntimeError):
    """A kernel broke the rules while the CPU executor ran it (deadlock, divergent barrier, misaligned access)."""


class TableError(ValueError):
    """A tiling table cannot be used: no table, of a newer version, of another device; the text names the file."""


class TableWarning(UserWarning):
    """A tiling table, or an entry of it, is left out of a call, which goes on with what is next in the tile chain."""


class TraceError(ValueError):
    """A file is no trace of problems; the text names file and line."""


def sentence(error: BaseException) -> str:
    """The first line of an exception, and which kind it is."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
