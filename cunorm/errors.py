"""The exceptions of cunorm that are not plain ``TypeError`` or ``ValueError``."""

from __future__ import annotations

__all__ = ["CompileError", "KernelFault", "UnsupportedTile"]


class CompileError(RuntimeError):
    """A kernel did not compile, or no compiler was found; the text says what to do."""


class UnsupportedTile(ValueError):
    """A strategy or tile is not legal for a problem on a device; the text is ``refuses()``'s sentence."""


class KernelFault(RuntimeError):
    """A kernel broke the rules while the CPU executor ran it (deadlock, divergent barrier, misaligned access)."""
