"""What tuning a problem may cost, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from cunorm.core.strategy import Tile
from cunorm.tiling.table_entry import Entry

from ..search.space import SWEPT, Space
from .race import Timing

__all__ = ["Budget", "Deadlines", "Result", "Trial"]

MORE = 116  # trials in a space larger than what is swept: the model's 20, and 96


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a worker has for each kind of request."""

    open: float = 900.0
    compile: float = 180.0
    verify: float = 120.0
    sample: float = 20.0


@dataclass
class Budget:
    """What a problem may cost: tiles to try, seconds to begin something new in; None: as the space asks, no limit."""

    trials: int | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    def wanted(self, space: Space) -> int:
        """Tiles that are to be tried, given the time."""
        return min(len(space), (len(space) if len(space) <= SWEPT else MORE) if self.trials is None else self.trials)

    def left(self, space: Space, tried: int) -> int:
        """Tiles that may still be tried."""
        return 0 if self.over() else max(0, self.wanted(space) - tried)

    def over(self) -> bool:
        """Whether the time is up."""
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds


@dataclass(frozen=True)
class Trial:
    """A tile that was tried: its time in seconds, measured or predicted, or what is wrong with it."""

    tile: Tile
    seconds: float | None
    failure: str | None = None
    sentence: str = ""


@dataclass
class Result:
    """What became of a problem.

    Attributes
    ----------
    space : Space
    source : str
        ``"measured"`` or ``"model"``; ``"rehearsed"`` where the clock was none of a GPU.
    winner : Tile or None
        None if nothing came of it; ``sentence`` says why.
    entry : Entry or None
        For the table; None where there is no winner, or it was rehearsed.
    timings : dict of Tile to Timing
        Of the finalists and the default.
    trials : list of Trial
        In the order in which they were told.
    interrupted : bool
    kept : bool
        Whether the entry went into the table: a modelled one does not replace a measured one.
    seconds : float
        That it took.
    bandwidth : float or None
        Bytes per second of a copy, from the same run.
    software : dict
        Versions that the worker runs.
    """

    space: Space
    source: str
    winner: Tile | None = None
    entry: Entry | None = None
    timings: dict[Tile, Timing] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    sentence: str = ""
    interrupted: bool = False
    kept: bool = True
    seconds: float = 0.0
    bandwidth: float | None = None
    software: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[Trial]:
        """The tiles that cannot be used."""
        return [trial for trial in self.trials if trial.failure is not None]
