"""The search space of a problem: every legal tile of every strategy, once, in the order of the cost model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Strategy, Tile
from cunorm.jit import sources
from cunorm.tiling import costmodel
from cunorm.tiling.table import key_of

#: Spaces up to this size are tried completely.
SWEPT = 200
#: Proposals in the order of the cost model, in larger spaces.
PRIOR = 20
#: A tile is unlikely to be the fastest if its predicted time is above this multiple of the best prediction.
UNLIKELY = 2.0


@dataclass(frozen=True)
class Candidate:
    """A legal tile and the time that the cost model predicts for it, in seconds."""

    tile: Tile
    predicted: float


@dataclass(frozen=True)
class Space:
    """The tiles that can be tried for a problem.

    Attributes
    ----------
    problem : Problem
    device : Device
    strategies : mapping of str to Strategy
    candidates : tuple of Candidate
        The default first, then by predicted time. Only the first of several tiles that launch identical kernels is
        included.
    """

    problem: Problem
    device: Device
    strategies: Mapping[str, Strategy]
    candidates: tuple[Candidate, ...]
    _at: dict[Tile, int] = field(repr=False, compare=False)

    @classmethod
    def of(cls, problem: Problem, strategies: Mapping[str, Strategy], device: Device) -> Space:
        """The space of a problem on a device."""
        seen: set[Any] = set()
        found = []
        for choice in costmodel.ranked(problem, strategies.values(), device):
            strategy, tile = choice.strategy, choice.tile
            constants = tuple(item for item in tile.fields if item[0] in strategy.constants)
            identity = strategy.name, constants, strategy.launches(problem, tile)
            if identity not in seen:
                seen.add(identity)
                found.append(Candidate(tile, choice.seconds))
        at = {candidate.tile: index for index, candidate in enumerate(found)}
        return cls(problem, device, strategies, tuple(found), at)

    def likely(self) -> Space:
        """The space without the tiles that are unlikely to be the fastest; the default is kept."""
        most = UNLIKELY * min(candidate.predicted for candidate in self.candidates)
        left = tuple(one for one in self.candidates if one.predicted <= most or one.tile == self.default)
        return replace(self, candidates=left, _at={one.tile: index for index, one in enumerate(left)})

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The candidates' tiles, in order."""
        return tuple(candidate.tile for candidate in self.candidates)

    @property
    def default(self) -> Tile:
        """The tile that runs if the problem is not tuned."""
        return self.candidates[0].tile

    def predicted(self, tile: Tile) -> float:
        """The cost model's prediction for a tile, in seconds."""
        return self.candidates[self._at[tile]].predicted

    def strategy(self, tile: Tile) -> Strategy:
        """The strategy of a tile."""
        return self.strategies[tile.strategy]

    def kernel(self, tile: Tile) -> str:
        """The digest of the kernels that a tile launches."""
        return sources.kernel_digest(self.problem, self.strategy(tile), tile)

    def simplicity(self, tile: Tile) -> tuple[object, ...]:
        """Sort key for ties: launches, bytes of workspace, shared memory, threads, strategy, fields; least first."""
        strategy = self.strategy(tile)
        launches = strategy.launches(self.problem, tile)
        shared, threads = (max(values) for values in zip(*((one.shared_bytes, one.threads) for one in launches)))  # noqa: B905
        return len(launches), strategy.of(self.problem, tile).workspace, shared, threads, tile.strategy, tile.fields

    def digest(self) -> str:
        """Digest of the space and its kernels. A study must not be continued with another space."""
        words = [json.dumps(key_of(self.problem)), self.device.name]  # the key contains every dtype
        words += [f"{tile!r} {self.kernel(tile)}" for tile in sorted(self.tiles, key=repr)]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
