"""The tile chain: the choice of a problem's tile, and the look-up in tiling tables.

The tables, in order: the table that ``CUNORM_TILING_TABLE`` names, the device's table in the user's cache folder, and
the device's table in the package. A table is read when a plan is first made and again after its file has changed. An
existing plan keeps its tile. A fault in a table causes one `TableWarning`, and the table or entry is ignored.
"""

from __future__ import annotations

import functools
import heapq
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cunorm.core import cache_folder, settings
from cunorm.core.devices import Device
from cunorm.core.errors import TableError, UnsupportedTile
from cunorm.core.problem import Problem
from cunorm.core.strategy import Strategy, Tile
from cunorm.jit import sources

from . import costmodel, table
from .table import MEASURED, SIMULATED, Entry, Sizes, place_of, shown
from .table_index import Indexed, Stamp, warn

#: The nearest entry is used if its predicted time is at most this factor times that of the cost model's own choice.
NEAREST = 1.02
#: A tile that was chosen for another N is reused if the larger N is at most this factor of the smaller one, and the
#: tile is relatively as fast.
NEARLY = 1.25
#: What a stale entry is, as a text for users.
CHANGED = "its kernels have changed since it was tuned"


@dataclass(frozen=True)
class Found:
    """A legal entry that was found in a table.

    Attributes
    ----------
    strategy : Strategy
    tile : Tile
    entry : Entry
    path : Path
        Path of the table.
    distance : float
        Distance of the entry's sizes from those of the problem, see `distance`; 0 for the same sizes.
    """

    strategy: Strategy
    tile: Tile
    entry: Entry
    path: Path
    distance: float = 0.0


@dataclass(frozen=True)
class TableSource:
    """A possible path of a table, and whether ``CUNORM_TILING_TABLE`` names it or the package contains it."""

    path: Path
    named: bool
    shipped: bool


def user_table(device: Device) -> Path:
    """The device's table in the user's cache folder, which the tuner writes when none is named."""
    return settings.cache_dir() / "tiling" / f"{table.slug(device)}.json"


def places(device: Device) -> list[TableSource]:
    """The possible tables of a device, in the order in which they are searched."""
    named = settings.tiling_table()
    found = [] if named is None else [TableSource(named, True, False)]
    found.append(TableSource(user_table(device), False, False))
    return [*found, *_shipped(device, *sys.modules["cunorm"].__path__)]


@functools.lru_cache(maxsize=64)
def _shipped(device: Device, *entries: str) -> tuple[TableSource, ...]:
    """The tables in the package, whose ``__path__`` has these entries. Cached, because paths are slow to make."""
    name = f"{table.slug(device)}.json"
    return tuple(TableSource(Path(entry) / "tuning" / "tables" / name, False, True) for entry in entries)


def _stamp(path: Path) -> Stamp:
    try:
        facts = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, facts.st_mtime_ns, facts.st_size


def stamp(device: Device) -> tuple[Stamp, ...]:
    """The paths, times and sizes of a device's tables. They are part of the key of a plan."""
    return tuple(_stamp(place.path) for place in places(device))


def _distrust(path: Path) -> str | None:
    """Why a table in the cache folder is not trusted; None if only this user and root can write it."""
    try:
        return cache_folder.distrust(os.stat(path))
    except OSError:
        return None  # `table.load` raises the error


@functools.lru_cache(maxsize=16)
def _read(stamped: Stamp, place: TableSource) -> Indexed | str | None:
    """The table of a file; None if there is no file; if it cannot be read, why, of which the user was warned."""
    path = stamped[0]
    try:
        if not (place.named or place.shipped) and (sentence := _distrust(path)) is not None:
            raise TableError(f"{path}: {sentence}, expected a file that only you can write to")
        return Indexed(stamped, table.load(path))
    except (OSError, TableError) as error:
        absent, why = isinstance(error, FileNotFoundError), _unread(path, error)
        if place.named or not absent:
            warn(stamped, why)
        return None if absent else why


def unreadable(device: Device) -> Iterator[tuple[Path, str]]:
    """The tables of a device that exist and cannot be read, and why."""
    for place in places(device):
        if isinstance(found := _read(_stamp(place.path), place), str):
            yield place.path, found


def _unread(path: Path, error: Exception) -> str:
    """Why a table is not used. Only the table that ``CUNORM_TILING_TABLE`` names is expected to exist."""
    if isinstance(error, FileNotFoundError):
        return f"CUNORM_TILING_TABLE: {path}: no such file"
    return f"{path}: cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)


def environment_fault() -> str | None:
    """What is wrong with the table that ``CUNORM_TILING_TABLE`` names; None for nothing, or if none is named."""
    path = settings.tiling_table()
    if path is None:
        return None
    try:
        faults = table.read(path).faults
    except (OSError, TableError) as error:
        return _unread(path, error)
    return f"{path}: {faults[0]}" if faults else None


def tables(device: Device, shipped: bool | None = None) -> Iterator[tuple[Path, Indexed]]:
    """The readable tables of a device, in the order in which they are searched.

    Parameters
    ----------
    device : Device
    shipped : bool, optional
        True: only the tables in the package. False: only the user's tables.
    """
    for place in places(device):
        if shipped is not None and place.shipped != shipped:
            continue
        stamped = _stamp(place.path)
        found = _read(stamped, place)
        if not isinstance(found, Indexed):
            continue
        if not table.for_device(found, device):
            name = shown(found.device.get("name"))
            warn(stamped, f"{place.path}: a table of {name}, not used on {device.name}")
            continue
        yield place.path, found


def is_stale(entry: Entry, strategies: Mapping[str, Strategy]) -> bool:
    """Whether the kernels of an entry have changed since it was tuned, or do not exist: somebody may have edited it."""
    strategy = strategies.get(entry.tile.strategy)
    if strategy is None or strategy.refuses_fields(entry.tile) is not None:
        return True
    try:
        return sources.kernel_digest(entry.problem, strategy, entry.tile) != entry.kernel
    except (ArithmeticError, LookupError, TypeError, ValueError):  # no launches: no device accepts the tile
        return True


def _legal(
    entry: Entry, path: Path, problem: Problem, strategies: Mapping[str, Strategy], device: Device
) -> Strategy | None:
    """The strategy of an entry if its tile is legal for the problem, else None.

    If the entry is illegal for its own problem, a `TableWarning` is issued.
    """
    strategy = strategies.get(entry.tile.strategy)
    if strategy is None:
        sentence: str | None = f"strategy {entry.tile.strategy!r}, expected one of {', '.join(strategies)}"
    else:
        sentence = strategy.refuses(problem, entry.tile, device)
    if sentence is None:
        return strategy
    if place_of(problem) == place_of(entry.problem):
        warn(_stamp(path), f"{path}: the entry of {entry.problem.describe()}: {sentence}")
    return None


def exact(problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> Found | None:
    """The problem's entry in the first table with a legal entry; None if there is none.

    Entries with the same dtypes come before entries that differ only in dtypes of parameters, statistics or sums.
    """
    for shipped in (False, True):
        for path, read in tables(device, shipped):
            same = read.entries(*place_of(problem))
            for entry in sorted(same, key=lambda entry: (entry.problem != problem, entry.rank)):
                if (strategy := _legal(entry, path, problem, strategies, device)) is not None:
                    return Found(strategy, entry.tile, entry, path)
    return None


def _far(one: Sizes, other: Sizes) -> float:
    (N, C, HxW, group), (N_, C_, HxW_, group_) = one, other
    pairs = ((N, N_), (C // group, C_ // group_), (HxW, HxW_), (group, group_))
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def distance(one: Problem, other: Problem) -> float:
    """Distance of two problems: Euclidean, in the logarithms to base 2 of N, C/group, HxW and group."""
    return _far(place_of(one)[1], place_of(other)[1])


def alike(one: Problem, other: Problem) -> bool:
    """Whether two problems differ at most in sizes and in the dtypes of parameters and statistics."""
    return place_of(one)[0] == place_of(other)[0]


def nearest(problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> Found | None:
    """The legal entry of the same op, dtype, layout and outputs whose sizes are nearest; None if there is none.

    See `distance`: two problems of which one is twice as large in one size have distance 1.
    """
    kind, asked = place_of(problem)
    asking = list(tables(device))
    near = [
        (_far(asked, sizes), order, sizes)
        for order, (_, read) in enumerate(asking)
        for sizes in read.kinds.get(kind, {})
    ]
    heapq.heapify(near)  # a heap, because most are never popped
    while near:
        far, tied = near[0][0], []
        while near and near[0][0] == far:
            _, order, sizes = heapq.heappop(near)
            tied += [(entry.rank, order, str(entry.problem), entry) for entry in asking[order][1].entries(kind, sizes)]
        for _, order, _, entry in sorted(tied, key=lambda one: one[:3]) if far > 0 else ():
            path = asking[order][0]
            if (strategy := _legal(entry, path, problem, strategies, device)) is not None:
                return Found(strategy, entry.tile, entry, path, far)
    return None


def remarks(entry: Entry) -> list[str]:
    """What a user should know of an entry besides its tile and time."""
    found = ["NOT VERIFIED"] if entry.facts.get("verified") is False else []
    return found + (["no tile beat the default"] if entry.facts.get("default") is True else [])


def state(entry: Entry, strategies: Mapping[str, Strategy], device: Device) -> str:
    """How an entry of a device's table was obtained, as a text for users."""
    time = "" if entry.microseconds is None else f" {entry.microseconds:.1f} us"
    if entry.source == MEASURED:
        text = f"measured{time}"
    elif entry.source == SIMULATED:
        text = f"simulated on {device.name}, not measured:{time or ' no time'}"
    else:
        text = f"modelled, not measured{time and f': predicted{time}'}"
    if entry.text is not None:
        text += f", {entry.text} kernels"
    stale = [f"stale: {CHANGED}; run cunorm tune --stale"] if is_stale(entry, strategies) else []
    return "; ".join([text, *remarks(entry), *stale])


# ---- the tile chain -------------------------------------------------------------------------------------------------


#: By problem without its N: the N and the choice of the cost model's last ranking. An application has few such keys.
_chosen: dict[tuple[Problem, Device], tuple[int, costmodel.Choice]] = {}
MOST_CHOSEN = 4096


def _as_good(
    problem: Problem, found: costmodel.Choice, earlier: Problem, before: costmodel.Choice, device: Device
) -> bool:
    """Whether a tile is so fast for a problem that no ranking is needed; see `_modelled`."""
    over = 1.0
    if max(problem.N, earlier.N) <= NEARLY * min(problem.N, earlier.N):
        over = max(over, before.seconds / costmodel.least_seconds(earlier, before.launches, device))
    return found.seconds <= NEAREST * over * costmodel.least_seconds(problem, found.launches, device)


def _modelled(problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> tuple[costmodel.Choice, str]:
    """The cost model's choice, and a text for users if it was reused from another problem.

    The last tile chosen for a problem that differs only in N is reused without a ranking if its predicted time is at
    most `NEAREST` times `least_seconds`, a lower bound for all tiles: the time of the tensors at the bandwidth. If N
    differs by at most `NEARLY`, that time may exceed the bound by the factor by which it did for the earlier N.
    """
    key = replace(problem, N=0), device
    if (kept := _chosen.get(key)) is not None:
        rows, before = kept
        named = strategies.get(before.strategy.name)
        found = None if named is None else costmodel.evaluated(problem, named, before.tile, device)
        if found is not None and _as_good(problem, found, replace(problem, N=rows), before, device):
            if rows == problem.N:
                return found, ""
            return found, f"; same tile as for N={rows}, for which it was chosen, and relatively as fast"
    found = costmodel.choose(problem, strategies.values(), device)
    if len(_chosen) >= MOST_CHOSEN:
        _chosen.clear()
    _chosen[key] = problem.N, found
    return found, ""


def resolve(
    problem: Problem, strategies: Mapping[str, Strategy], device: Device, tile: Tile | None
) -> tuple[Strategy, Tile, str]:
    """The tile chain: the strategy and tile of a problem, and a text for users that says where they are from and why.

    The links of the chain, in order: the explicit tile; the problem's entry in the user's tables, then in the shipped
    tables; the nearest problem's entry, if its predicted time is within `NEAREST` of the cost model's choice; the cost
    model.

    Raises
    ------
    ValueError
        If ``tile`` names an unknown strategy.
    UnsupportedTile
        If ``tile`` is not legal for this problem on this device.
    """
    if tile is not None:
        strategy = strategies.get(tile.strategy)
        if strategy is None:
            raise ValueError(f"tile: strategy {tile.strategy!r}, expected one of {', '.join(strategies)}")
        if (sentence := strategy.refuses(problem, tile, device)) is not None:
            raise UnsupportedTile(f"tile: {sentence}")
        return strategy, tile, "the tile= argument"
    if (tuned := exact(problem, strategies, device)) is not None:
        reason = f"the problem's entry in {tuned.path}: {state(tuned.entry, strategies, device)}"
        if tuned.entry.problem != problem:
            reason += f"; tuned with {', '.join(map(' '.join, tuned.entry.problem.parameters))}"
        return tuned.strategy, tuned.tile, reason
    found, like = _modelled(problem, strategies, device)
    predicted = f"predicted {found.seconds * 1e6:.1f} us on {device.name}, not measured{like}"
    near = nearest(problem, strategies, device)
    if near is None:
        return found.strategy, found.tile, f"the cost model: no tiling table has an entry; {predicted}"
    seconds = costmodel.predict(problem, near.strategy, near.tile, device)
    where = f"the nearest entry in {near.path}, {near.entry.problem.sizes_text} at a distance of {near.distance:.2f}"
    if seconds > NEAREST * found.seconds:
        return found.strategy, found.tile, f"the cost model: {predicted}; {where}, is predicted {seconds * 1e6:.1f} us"
    reason = f"{where}: {state(near.entry, strategies, device)}; here predicted {seconds * 1e6:.1f} us"
    return near.strategy, near.tile, f"{reason}, the cost model's own choice {found.seconds * 1e6:.1f} us"
