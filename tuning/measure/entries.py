"""From what was measured, or predicted, to entries of the table. The only place that calls something measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cunorm.core.strategy import Tile
from cunorm.tiling.table_entry import MEASURED, MODEL, Entry
from cunorm.traffic.sampling import floor_bytes

from ..search.space import Space
from .race import Timing

__all__ = ["measured", "modelled"]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def measured(
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


def modelled(space: Space, tile: Tile, *, trials: int, verified: str | None) -> Entry:
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
