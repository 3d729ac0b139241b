"""Which tables a call asks, and what they answer: an entry of its problem, or of the nearest one.

The tables, in order: the one that ``CUNORM_TILING_TABLE`` names, the device's in the user's cache folder, the device's
in the package. They are read when a plan is first made and again when a file has changed; a plan that exists keeps its
tile. What is wrong with a table is said once, as a `TableWarning`, and the call goes on.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import settings, sources, table
from .devices import Device
from .errors import TableError, TableWarning
from .problem import Problem
from .strategy import Strategy, Tile
from .table import Table
from .table_entry import MEASURED, Entry

__all__ = [
    "Found",
    "Indexed",
    "Place",
    "exact",
    "is_stale",
    "nearest",
    "places",
    "stamp",
    "state",
    "tables",
    "user_table",
]

#: Path, time of the last change in nanoseconds, size.
Stamp = tuple[Path, int, int]


@dataclass(frozen=True)
class Found:
    """What a table answers.

    Attributes
    ----------
    strategy : Strategy
    tile : Tile
    entry : Entry
    path : Path
        Of the table.
    distance : float
        From the problem that was asked for, see `nearest`; 0 for the same sizes.
    """

    strategy: Strategy
    tile: Tile
    entry: Entry
    path: Path
    distance: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a table may lie, and whether somebody named it."""

    path: Path
    named: bool
    shipped: bool


def user_table(device: Device) -> Path:
    """The device's table in the user's cache folder, which the tuner writes when none is named."""
    return settings.cache_dir() / "tiling" / f"{table.slug(device)}.json"


def places(device: Device) -> list[Place]:
    """Where the tables of a device may lie, in the order in which they are asked."""
    named = settings.tiling_table()
    found = [] if named is None else [Place(named, True, False)]
    found.append(Place(user_table(device), False, False))
    return [*found, *_shipped(device, *sys.modules["cunorm"].__path__)]


@functools.lru_cache(maxsize=64)
def _shipped(device: Device, *entries: str) -> tuple[Place, ...]:
    """The places in the package, which has these entries in its path; paths are slow to make."""
    return tuple(Place(Path(entry) / "tuning" / f"{table.slug(device)}.json", False, True) for entry in entries)


def _stamp(path: Path) -> Stamp:
    try:
        facts = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, facts.st_mtime_ns, facts.st_size


def stamp(device: Device) -> tuple[Stamp, ...]:
    """What changes when a table does: part of a plan's key."""
    return tuple(_stamp(place.path) for place in places(device))


@functools.lru_cache(maxsize=1024)
def _warn(stamped: Stamp, sentence: str) -> None:
    """Say it, once for each state of the file."""
    warnings.warn(f"{sentence}; calls go on without it", TableWarning, stacklevel=2)


def _loose(problem: Problem) -> Problem:
    """The problem without the dtypes of its parameters and statistics: none of them changes what moves."""
    return replace(problem, gamma_dtype=None, beta_dtype=None, stats_dtype="", others=())


class Indexed:
    """A table, its entries by problem without parameters' dtypes, and by all of that but the sizes."""

    def __init__(self, read: Table) -> None:
        self.table = read
        self.exact: dict[Problem, list[Entry]] = {}
        self.alike: dict[Problem, list[Entry]] = {}
        for entry in read.entries.values():
            loose = _loose(entry.problem)
            self.exact.setdefault(loose, []).append(entry)
            self.alike.setdefault(_sizeless(loose), []).append(entry)


def _sizeless(loose: Problem) -> Problem:
    return replace(loose, N=1, C=1, HxW=1, group=1)


@functools.lru_cache(maxsize=16)
def _read(stamped: Stamp, named: bool) -> Indexed | None:
    path = stamped[0]
    try:
        found = table.read(path)
    except FileNotFoundError:
        if named:
            _warn(stamped, f"CUNORM_TILING_TABLE: {path}: no such file")
        return None
    except OSError as error:
        _warn(stamped, f"{path}: cannot be read: {error.strerror or error}")
        return None
    except TableError as error:
        _warn(stamped, str(error))
        return None
    if found.faults:
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        _warn(stamped, f"{path}: {found.faults[0]}{more}")
    return Indexed(found)


def tables(device: Device, shipped: bool | None = None) -> Iterator[tuple[Path, Indexed]]:
    """The readable tables of a device, in the order in which they are asked.

    Parameters
    ----------
    device : Device
    shipped : bool, optional
        Only those of the package, or only the user's.
    """
    for place in places(device):
        if shipped is not None and place.shipped != shipped:
            continue
        stamped = _stamp(place.path)
        found = _read(stamped, place.named)
        if found is None:
            continue
        if not table.for_device(found.table, device):
            name = ascii(found.table.device.get("name")).strip("'")
            _warn(stamped, f"{place.path}: a table of {name}, not used on {device.name}")
            continue
        yield place.path, found


def is_stale(entry: Entry, strategies: Mapping[str, Strategy]) -> bool:
    """Whether the kernels of an entry have changed since it was made; True also where they no longer exist."""
    strategy = strategies.get(entry.tile.strategy)
    if strategy is None or {name for name, _ in entry.tile.fields} != set(strategy.space):
        return True
    return sources.kernel_digest(entry.problem, strategy, entry.tile) != entry.kernel


def _legal(
    entry: Entry, path: Path, problem: Problem, strategies: Mapping[str, Strategy], device: Device
) -> Strategy | None:
    """The strategy of an entry that may run the problem; None, with a word if it is the entry's own fault."""
    strategy = strategies.get(entry.tile.strategy)
    if strategy is None:
        sentence: str | None = f"strategy {entry.tile.strategy!r}, expected one of {', '.join(strategies)}"
    else:
        sentence = strategy.refuses(problem, entry.tile, device)
    if sentence is None:
        return strategy
    if _loose(problem) == _loose(entry.problem):
        _warn(_stamp(path), f"{path}: the entry of {entry.problem.describe()}: {sentence}")
    return None


def exact(problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> Found | None:
    """The entry of a problem in the first table that has a legal one; None if there is none.

    An entry of the same sizes with other dtypes of gamma, beta, statistics or sums serves too, after one of the same.
    """
    loose = _loose(problem)
    for shipped in (False, True):
        for path, read in tables(device, shipped):
            same = read.exact.get(loose, ())
            for entry in sorted(same, key=lambda entry: (entry.problem != problem, entry.source != MEASURED)):
                if (strategy := _legal(entry, path, problem, strategies, device)) is not None:
                    return Found(strategy, entry.tile, entry, path)
    return None


def distance(one: Problem, other: Problem) -> float:
    """How far two problems lie apart: Euclid's, in the logarithms to base 2 of N, C/group, HxW and group."""
    pairs = (
        (one.N, other.N),
        (one.group_channels, other.group_channels),
        (one.HxW, other.HxW),
        (one.group, other.group),
    )
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def alike(one: Problem, other: Problem) -> bool:
    """Whether two problems differ in sizes and dtypes of parameters alone."""
    return _sizeless(_loose(one)) == _sizeless(_loose(other))


def nearest(problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> Found | None:
    """The legal entry of the same op, dtype, layout and outputs whose sizes are nearest; None if there is none.

    See `distance`: 1 is twice as much of one size.
    """
    alike, near = _sizeless(_loose(problem)), []
    for order, (path, read) in enumerate(tables(device)):
        for entry in read.alike.get(alike, ()):
            one = entry.problem
            near.append((distance(problem, one), entry.source != MEASURED, order, str(one), path, entry))
    for far, _, _, _, path, entry in sorted(near, key=lambda one: one[:4]):
        if far > 0 and (strategy := _legal(entry, path, problem, strategies, device)) is not None:
            return Found(strategy, entry.tile, entry, path, far)
    return None


def state(entry: Entry, strategies: Mapping[str, Strategy]) -> str:
    """What an entry rests on, for people."""
    time = "" if entry.microseconds is None else f" {entry.microseconds:.1f} us"
    text = f"measured{time}" if entry.source == MEASURED else f"modelled, not measured: predicted{time}"
    if entry.facts.get("verified") is False:
        text += "; NOT VERIFIED"
    if entry.facts.get("default") is True:
        text += "; no tile beat the default"
    if is_stale(entry, strategies):
        text += "; stale: its kernels have changed since"
    return text
