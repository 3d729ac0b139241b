"""What can go wrong while a candidate is measured."""

from __future__ import annotations

#: No candidate's fault.
NO_COMPILER = "no compiler"


class CandidateError(Exception):  # not an error of the program: it happens to candidates
    """A candidate failed.

    Parameters
    ----------
    kind : str
        compile, launch, memory, fault or wrong; crash or hang, of which its process dies; or `NO_COMPILER`.
    sentence : str
    index : int, optional
        Which candidate of the request; None where there is but one, or none was begun.
    """

    def __init__(self, kind: str, sentence: str, index: int | None = None) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind, self.sentence, self.index = kind, sentence, index


class Failed(CandidateError):
    """It failed, and its worker is fine."""


class Lost(CandidateError):
    """It took its worker with it."""


class Stopped(Exception):
    """Somebody asked to stop while a worker was busy."""
