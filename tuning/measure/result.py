"""What tuning a problem may cost, and what came of it: the result, and its entry in the table.

The only place that calls something measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cunorm.core.strategy import Tile
from cunorm.tiling.table import MEASURED, MODEL, Entry
from cunorm.traffic.sampling import floor_bytes

from ..search.space import SWEPT, Space
from .race import Timing

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
class TuningResult:
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


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def measured_entry(
    space: Space,
    tile: Tile,
    timings: Mapping[Tile, Timing],
    *,
    measures: bool,
    bandwidth: float,
    trials: int,
    default: bool,
) -> Entry:
    """The entry of a problem that was timed on its device.

    Parameters
    ----------
    space : Space
    tile : Tile
        The winner.
    timings : mapping of Tile to Timing
        Of the finalists and of the default.
    measures : bool
        Whether these are times of kernels on a GPU, as the worker's clock says.
    bandwidth : float
        Bytes per second of a copy on the device, from the same run.
    trials : int
        Tiles that were tried.
    default : bool
        Whether no tile beat the default by enough.

    Raises
    ------
    ValueError
        If they are not times of a GPU.
    """
    if not measures:
        raise ValueError("these timings are not those of a kernel on a GPU, and are never stored as measured")
    timing, floor = timings[tile], floor_bytes(space.problem)
    facts: dict[str, Any] = {
        "time_us": _us(timing.seconds),
        "q25_us": _us(timing.q25),
        "q75_us": _us(timing.q75),
        "samples": timing.samples,
        "gigabytes_per_s": round(floor / timing.seconds / 1e9, 1),
        "roofline": round(floor / timing.seconds / bandwidth, 3),
        "trials": trials,
    }
    if space.default in timings:
        facts["default_us"] = _us(timings[space.default].seconds)
    others = {one: found for one, found in timings.items() if one != tile}
    if others:
        second = min(others, key=lambda one: others[one].seconds)
        seconds = _us(others[second].seconds)
        facts["runner_up"] = {"strategy": second.strategy, "tile": second.as_dict(), "time_us": seconds}
    if default:
        facts["default"] = True
    return Entry(space.problem, tile, MEASURED, space.kernel(tile), facts)


def modelled_entry(space: Space, tile: Tile, *, trials: int, verified: str | None) -> Entry:
    """The entry of a problem that was not timed.

    Parameters
    ----------
    space : Space
    tile : Tile
        The winner.
    trials : int
    verified : str or None
        What the tile was verified on; None: it was not.
    """
    facts = {"predicted_us": _us(space.predicted(tile)), "trials": trials, "verified": verified or False}
    return Entry(space.problem, tile, MODEL, space.kernel(tile), facts)
