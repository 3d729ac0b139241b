"""The shortlist: the tiles that the cost model evaluates, a few dozen of the thousands of tiles of an op.

The list is ``shortlist.json``, which ``python benchmarks/make_shortlist.py`` writes. For each strategy of each op it
contains the tiles without which some problem would get a worse tile than a ranking of all tiles selects: one whose
predicted time differs by more than 2 %, or that keeps fewer multiprocessors busy. The problems are those of the named
workloads and a random sample, on every known device.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cunorm.core.strategy import Strategy, Tile

PATH = Path(__file__).with_name("shortlist.json")
#: The indices of a tile's field values in its strategy's space, and the tile.
Placed = tuple[tuple[int, ...], Tile]


@functools.cache
def _document() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def place_in(strategy: Strategy, tile: Tile) -> tuple[int, ...]:
    """The indices of a tile's field values in the space. They sort tiles in the order of the space."""
    known = dict(tile.fields)
    return tuple(values.index(known[name]) for name, values in strategy.space.items())


class Shortlist:
    """The shortlisted tiles of one strategy, and their neighbours.

    Attributes
    ----------
    strategy : Strategy
    tiles : sequence of Placed
        The tiles, in the order of the space.
    """

    def __init__(self, strategy: Strategy, tiles: Sequence[Tile]) -> None:
        self.strategy = strategy
        self.tiles = sorted((place_in(strategy, tile), tile) for tile in tiles)
        self._near: dict[tuple[int, ...], list[Placed]] = {}

    def near(self, place: tuple[int, ...]) -> list[Placed]:
        """The tiles that differ from the tile at that place by one step in one field."""
        if place not in self._near:
            space = self.strategy.space
            moved = [
                (*place[:axis], place[axis] + step, *place[axis + 1 :])
                for axis, values in enumerate(space.values())
                for step in (-1, 1)
                if 0 <= place[axis] + step < len(values)
            ]
            self._near[place] = [(one, self._tile_at(one)) for one in moved]
        return self._near[place]

    def _tile_at(self, place: tuple[int, ...]) -> Tile:
        fields = zip(self.strategy.space.items(), place, strict=True)
        return Tile(self.strategy.name, **{name: values[at] for (name, values), at in fields})


_kept: dict[int, tuple[Strategy, Shortlist]] = {}


def shortlist_of(strategy: Strategy) -> Shortlist:
    """The shortlist of a strategy; all tiles of its space if ``shortlist.json`` has none for it."""
    kept = _kept.get(id(strategy))
    if kept is None or kept[0] is not strategy:
        listed = _document().get(strategy.op, {}).get(strategy.name)
        if listed is None:
            tiles: Sequence[Tile] = list(strategy.tiles())
        else:
            tiles = [
                Tile(strategy.name, **dict(zip(listed["fields"], values, strict=True))) for values in listed["tiles"]
            ]
        kept = _kept[id(strategy)] = strategy, Shortlist(strategy, tiles)
    return kept[1]
