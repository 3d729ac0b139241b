"""The tiles that the cost model looks at: those that it prefers for some problem, a few dozen of an op's thousands.

The list is ``shortlist.json``, which ``python benchmarks/shortlist.py`` makes: of each strategy of each op the tiles
without which some problem, of the named workloads or drawn at random, would get a tile that is predicted more than 2 %
slower or faster than the one that a ranking of all tiles gives it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cunorm.core.strategy import Strategy, Tile

PATH = Path(__file__).with_name("shortlist.json")
#: Where the values of a tile's fields stand in its strategy's space, and the tile.
Placed = tuple[tuple[int, ...], Tile]


@functools.cache
def _document() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def place_in(strategy: Strategy, tile: Tile) -> tuple[int, ...]:
    """Where the values of a tile's fields stand in the space: tiles compare by it as the space enumerates them."""
    known = dict(tile.fields)
    return tuple(values.index(known[name]) for name, values in strategy.space.items())


class Shortlist:
    """The tiles of one strategy, and their neighbours.

    Attributes
    ----------
    strategy : Strategy
    tiles : sequence of Placed
        In the order of the space.
    """

    def __init__(self, strategy: Strategy, tiles: Sequence[Tile]) -> None:
        self.strategy = strategy
        self.tiles = sorted((place_in(strategy, tile), tile) for tile in tiles)
        self._near: dict[tuple[int, ...], list[Placed]] = {}

    def near(self, place: tuple[int, ...]) -> list[Placed]:
        """The tiles that differ from one by a step of one field."""
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
    """The shortlist of a strategy; all of its space where nobody has made one."""
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
