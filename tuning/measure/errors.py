"""Errors that can occur while a candidate is measured."""

from __future__ import annotations

#: Kind of an error that no candidate causes.
NO_COMPILER = "no compiler"


class CandidateError(Exception):  # expected during a search: not a bug of the tuner
    """A candidate failed.

    Parameters
    ----------
    kind : str
        compile, launch, memory, fault or wrong; simulator, which does not know an instruction; crash or hang, after
        which the worker's process is gone; or `NO_COMPILER`.
    sentence : str
    index : int, optional
        Index of the candidate in the request; None if the request contains one candidate or none was begun.
    """

    def __init__(self, kind: str, sentence: str, index: int | None = None) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind, self.sentence, self.index = kind, sentence, index


class Failed(CandidateError):
    """The candidate failed, and its worker still works."""


class Lost(CandidateError):
    """The worker died, or was killed at a deadline."""


class Stopped(Exception):
    """The run was stopped while a worker was busy."""
