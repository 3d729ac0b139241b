"""Racing: rounds sample each candidate once beside a control, and slow candidates drop out after a few samples.

A candidate's sample is divided by the control's sample of the same round, because a clock that drifts between rounds
changes both. The control is normally the default tile. A candidate's time is the median of its ratios times the median
of the control's samples. The median is used because outliers move a mean, and lucky states of clock and cache move a
minimum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from cunorm.core.strategy import Tile

from .errors import CandidateError

#: Stages of the race of a generation, and of the finalists: (further samples, maximum ratio of a survivor's median to
#: the best median).
SCREENING: tuple[tuple[int, float], ...] = ((2, 1.15), (3, 1.05))
FINAL: tuple[tuple[int, float], ...] = ((6, 1.02), (12, 1.02))
MOST_FINALISTS = 8
HOPELESS = 2.0  # a tile drops out after one sample above this multiple of the best median
DRIFT, REPEATS = 1.03, 2  # maximum ratio of a round's two control samples (3x the usual noise), repeats of a round
MOST_LOST = 3  # worker processes that may die before a candidate was begun; one more ends the problem
PAIRED = 20  # samples of the winner beside the default at the end
GAIN = 1.02  # minimum speed-up over the default that a tile needs to be stored instead of it
NEAR = 0.01  # medians whose relative difference is at most this are a tie
#: Factor of the median's standard error for normal samples: sqrt(pi / 2) * IQR / 1.349 / sqrt(n).
ERROR_OF_MEDIAN = math.sqrt(math.pi / 2) / 1.349


class ControlFailedError(Exception):
    """The control failed while it was sampled; ``trouble`` is its error."""

    def __init__(self, trouble: CandidateError) -> None:
        super().__init__(str(trouble))
        self.trouble = trouble


@dataclass(frozen=True)
class Timing:
    """The times of a tile, in seconds: median, quartiles, number of samples."""

    seconds: float
    q25: float
    q75: float
    samples: int

    @property
    def error(self) -> float:
        """Standard error of the median, divided by the median."""
        if self.samples < 2 or not self.seconds:
            return 0.0
        return ERROR_OF_MEDIAN * (self.q75 - self.q25) / math.sqrt(self.samples) / self.seconds


class Race:
    """Samples of one problem's tiles.

    Parameters
    ----------
    measure : callable
        List of tiles -> one sample of each, in seconds; raises CandidateError with the index of the tile that failed.
    control : Tile
        The default, or its substitute if the default fails.
    seed : int
        Seed of the order of the tiles in a round.
    over : callable, optional
        Whether the time is up. Then no further round begins, except those of `gain`.
    """

    def __init__(
        self,
        measure: Callable[[Sequence[Tile]], list[float]],
        control: Tile,
        seed: int = 0,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._measure, self.control, self._over = measure, control, over
        self._random = random.Random(seed)
        self.ratios: dict[Tile, list[float]] = {control: []}
        self.controls: list[float] = []
        self.failures: dict[Tile, CandidateError] = {}
        self._lost = 0

    def timing(self, tile: Tile) -> Timing | None:
        """The times of a tile; None if it has no samples."""
        ratios = self.ratios.get(tile)
        if not ratios:
            return None
        q25, _, q75 = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        unit = median(self.controls)
        return Timing(median(ratios) * unit, q25 * unit, q75 * unit, len(ratios))

    def _seconds(self, tile: Tile) -> float:
        found = self.timing(tile)
        return math.inf if found is None else found.seconds

    def round(self, tiles: Iterable[Tile]) -> None:
        """Sample each tile once, in random order, between two samples of the control.

        A tile that fails is omitted from then on. The round is repeated, at most `REPEATS` times, if the control's two
        samples differ by more than `DRIFT`.
        """
        alive = [tile for tile in tiles if tile != self.control and tile not in self.failures]
        self._random.shuffle(alive)
        for attempt in range(REPEATS + 1):
            while True:
                order = [self.control, *alive, self.control]
                try:
                    first, *times, last = self._measure(order)
                    break
                except CandidateError as trouble:
                    if trouble.index is None:  # no candidate was begun: the process died for another reason
                        self._lost += 1
                        if self._lost > MOST_LOST:
                            raise
                        continue
                    culprit = order[trouble.index]
                    if culprit == self.control:
                        raise ControlFailedError(trouble) from None
                    self.failures[culprit] = trouble
                    alive.remove(culprit)
            if max(first, last) <= DRIFT * min(first, last) or attempt == REPEATS:
                break
        between = (first + last) / 2
        self.controls += [first, last]
        self.ratios[self.control] += [first / between, last / between]
        for tile, seconds in zip(alive, times, strict=True):
            self.ratios.setdefault(tile, []).append(seconds / between)

    def _best(self) -> float:
        return min((self._seconds(tile) for tile in self.ratios if tile not in self.failures), default=math.inf)

    def _stages(self, tiles: list[Tile], stages: tuple[tuple[int, float], ...]) -> list[Tile]:
        for samples, times in stages:
            for _ in range(samples):
                if self._over():
                    return tiles
                self.round(tiles)
                tiles = [tile for tile in tiles if tile not in self.failures]
                hopeless = HOPELESS * self._best()
                tiles = [tile for tile in tiles if len(self.ratios[tile]) > 1 or self._seconds(tile) <= hopeless]
            tiles = [tile for tile in tiles if self._seconds(tile) <= times * self._best()]
        return tiles

    def screen(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Race a generation of new tiles; return the tiles whose time is near the best."""
        return self._stages(list(tiles), SCREENING)

    def finish(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Race the best of all generations, at most `MOST_FINALISTS`; return the tiles whose time is near the best.

        Tiles without samples, which come from an earlier run, are screened first.
        """
        self.screen([tile for tile in tiles if not self.ratios.get(tile)])
        return self._stages(sorted(tiles, key=self._seconds)[:MOST_FINALISTS], FINAL)

    def gain(self, tile: Tile) -> float:
        """How many times faster than the control a tile is, measured in `PAIRED` further rounds; 0 if it fails."""
        if tile == self.control:
            return 1.0
        before = len(self.ratios.get(tile, ()))
        for _ in range(PAIRED):  # even if the time is up: the samples that selected a winner are biased towards it
            self.round([tile])
            if tile in self.failures:
                return 0.0
        return 1 / median(self.ratios[tile][before:])


def winner(timings: dict[Tile, Timing], order: Callable[[Tile], tuple[object, ...]]) -> Tile:
    """The chosen tile: of the tiles that tie with the fastest, the first in the given order.

    Another tile sums in another order and so rounds differently. Noise must not decide between tiles that tie.
    """
    best = min(timings.values(), key=lambda timing: timing.seconds)
    tied = [
        tile for tile, timing in timings.items() if timing.seconds <= best.seconds * (1 + max(NEAR, 2 * best.error))
    ]
    return min(tied, key=order)
