"""What the bench keeps of a problem: who ran, how long it took, who did not run and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from cunorm.core.problem import Problem

__all__ = ["DEFAULT", "TABLE", "Contender", "DeviceLostError", "Outcome", "Spread"]

DEFAULT, TABLE = "cunorm, default tile", "cunorm, table tile"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples, in seconds."""

    seconds: float
    q25: float
    q75: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of one sample or more."""
        q25, _, q75 = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median(samples), q25, q75, len(samples))


@dataclass
class Contender:
    """What one implementation came to on a problem.

    Attributes
    ----------
    name : str
    state : {"timed", "rehearsed", "missing", "not offered", "failed", "wrong"}
    sentence : str
        Why it was not timed; of one that was, how: the tile, or what its kernels were timed by.
    error : float or None
        The largest share of a result's largest value that it is off by; None if that is no number.
    kernels, wall : Spread or None
        Of its kernels on the GPU, and of a call.
    """

    name: str
    state: str = "failed"
    sentence: str = ""
    error: float | None = None
    kernels: Spread | None = None
    wall: Spread | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a problem.

    Attributes
    ----------
    problem : Problem
    contenders : sequence of Contender
        cunorm's first, then the peers as they were named, those that did not run among them.
    walked : int
        Bytes of the inputs of all sets of arrays: kernels walk through them, a set after a set.
    """

    problem: Problem
    contenders: Sequence[Contender]
    walked: int

    @classmethod
    def failed(cls, problem: Problem, peers: Sequence[str], sentence: str) -> Outcome:
        """Of a problem that nobody could run."""
        return cls(problem, [Contender(name, "failed", sentence) for name in (DEFAULT, TABLE, *peers)], 0)


class DeviceLostError(Exception):
    """Nothing runs on the device any more; the sentence says who was the last to.

    Attributes
    ----------
    outcome : Outcome or None
        What there is of the problem.
    """

    outcome: Outcome | None = None
