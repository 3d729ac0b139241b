"""The budget of tuning one problem, its result, and its entry in the table.

Only `measured_entry` creates entries that are marked as measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cunorm.core.strategy import Tile
from cunorm.jit.sources import Text
from cunorm.tiling.table import MEASURED, MODEL, SIMULATED, Entry
from cunorm.traffic.sampling import floor_bytes

from ..search.space import PRIOR, SWEPT, Space
from .race import Timing

MORE = PRIOR + 96  # trials in a space that is not tried completely
SIMULATED_TRIALS = 12  # trials of the simulator, which takes seconds or minutes for one, without --trials and --seconds


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds for each kind of request to a worker."""

    open: float = 900.0
    compile: float = 180.0
    verify: float = 120.0
    sample: float = 20.0
    simulate: float = 3600.0


@dataclass
class Budget:
    """The budget of a problem.

    Attributes
    ----------
    trials : int or None
        Tiles to try; None: the whole space if it has at most `SWEPT` tiles, else `MORE`.
    seconds : float or None
        Time after which no new work begins; None: no limit.
    began : float
        Start time of `time.monotonic`.
    """

    trials: int | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    def wanted(self, space: Space) -> int:
        """Number of tiles to try if the time suffices."""
        return min(len(space), (len(space) if len(space) <= SWEPT else MORE) if self.trials is None else self.trials)

    def left(self, space: Space, tried: int) -> int:
        """Number of tiles that may still be tried; 0 if the time is up."""
        return 0 if self.over() else max(0, self.wanted(space) - tried)

    def over(self) -> bool:
        """Whether the time is up."""
        return self.seconds is not None and time.monotonic() - self.began >= self.seconds


@dataclass(frozen=True)
class Trial:
    """A tile that was tried: its time in seconds, measured, simulated or predicted, or its failure."""

    tile: Tile
    seconds: float | None
    failure: str | None = None
    sentence: str = ""


@dataclass
class TuningResult:
    """The result of tuning one problem.

    Attributes
    ----------
    space : Space
    source : str
        ``"measured"``, ``"simulated"`` or ``"model"``; ``"rehearsed"`` if the clock did not time a GPU.
    winner : Tile or None
        None if no tile was chosen; then ``sentence`` says why.
    entry : Entry or None
        Entry for the table; None if there is no winner, or if the run was a rehearsal.
    timings : dict of Tile to Timing
        Times of the finalists and the default.
    trials : list of Trial
        In the order in which the outcomes were known.
    sentence : str
        Why there is no winner; empty if there is one.
    interrupted : bool
    instead : str
        If the table keeps an entry with better evidence instead of this one, the source of that entry.
    seconds : float
        Duration of the tuning.
    bandwidth : float or None
        Bytes per second of a copy in the same run; of a simulated result, on the simulated GPU.
    software : dict
        Versions of the software that the worker runs.
    """

    space: Space
    source: str
    winner: Tile | None = None
    entry: Entry | None = None
    timings: dict[Tile, Timing] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    sentence: str = ""
    interrupted: bool = False
    instead: str = ""
    seconds: float = 0.0
    bandwidth: float | None = None
    software: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether the table contains the entry, if there is one."""
        return not self.instead

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
    text: Text,
) -> Entry:
    """The table entry of a problem that was timed on its device.

    Parameters
    ----------
    space : Space
    tile : Tile
        The winner.
    timings : mapping of Tile to Timing
        Times of the finalists and of the default.
    measures : bool
        Whether the worker's clock times kernels on a GPU.
    bandwidth : float
        Bytes per second of a copy on the device in the same run.
    trials : int
        Number of tiles that were tried.
    default : bool
        Whether no tile beat the default by enough.
    text : str
        Which of the kernels' texts was timed.

    Raises
    ------
    ValueError
        If the times do not come from a GPU.
    """
    if not measures:
        raise ValueError("timings: not measured on a GPU, so they cannot be stored as measured")
    timing, floor = timings[tile], floor_bytes(space.problem)
    facts: dict[str, Any] = {
        "time_us": _us(timing.seconds),
        "q25_us": _us(timing.q25),
        "q75_us": _us(timing.q75),
        "samples": timing.samples,
        "gigabytes_per_s": round(floor / timing.seconds / 1e9, 1),
        "roofline": round(floor / timing.seconds / bandwidth, 3),
        "trials": trials,
        "text": text,
    }
    facts |= _beside(space, tile, timings, "time_us")
    if default:
        facts["default"] = True
    return Entry(space.problem, tile, MEASURED, space.kernel(tile), facts)


def _beside(space: Space, tile: Tile, timings: Mapping[Tile, Timing], unit: str) -> dict[str, Any]:
    """The facts of an entry about other tiles: the default's time and the runner-up, whose time has the name `unit`."""
    facts: dict[str, Any] = {}
    if space.default in timings:
        facts["default_us"] = _us(timings[space.default].seconds)
    others = {one: found for one, found in timings.items() if one != tile}
    if others:
        second = min(others, key=lambda one: others[one].seconds)
        seconds = _us(others[second].seconds)
        facts["runner_up"] = {"strategy": second.strategy, "tile": second.as_dict(), unit: seconds}
    return facts


def simulated_entry(
    space: Space,
    tile: Tile,
    timings: Mapping[Tile, Timing],
    *,
    trials: int,
    default: bool,
    verified: str | None,
    text: Text,
) -> Entry:
    """The table entry of a problem whose machine code was simulated.

    Parameters
    ----------
    space : Space
    tile : Tile
        The winner.
    timings : mapping of Tile to Timing
        Simulated times.
    trials : int
    default : bool
        Whether no tile beat the default by enough.
    verified : str or None
        Executor and sizes on which the tile was verified; None: not verified.
    text : str
        Which of the kernels' texts was simulated.
    """
    facts: dict[str, Any] = {
        "simulated_us": _us(timings[tile].seconds),
        "predicted_us": _us(space.predicted(tile)),
        "trials": trials,
        "verified": verified or False,
        "text": text,
    }
    facts |= _beside(space, tile, timings, "simulated_us")
    if default:
        facts["default"] = True
    return Entry(space.problem, tile, SIMULATED, space.kernel(tile), facts)


def modelled_entry(space: Space, tile: Tile, *, trials: int, verified: str | None) -> Entry:
    """The table entry of a problem that was neither timed nor simulated.

    Parameters
    ----------
    space : Space
    tile : Tile
        The winner.
    trials : int
    verified : str or None
        Executor and sizes on which the tile was verified; None: not verified.
    """
    facts = {"predicted_us": _us(space.predicted(tile)), "trials": trials, "verified": verified or False}
    return Entry(space.problem, tile, MODEL, space.kernel(tile), facts)
