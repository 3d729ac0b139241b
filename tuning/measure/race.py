"""Racing: candidates are sampled in interleaved rounds beside a control, and losers drop out after a few samples.

A sample counts as its ratio to the control in the same round, so that a clock that drifts between rounds moves both.
The control is the default tile; a time is a median of ratios times the control's median. The median, because the mean
follows outliers and the minimum follows lucky states of clock and cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from cunorm.core.strategy import Tile

from .errors import CandidateError

#: (samples more, how many times the best median a survivor may take): of every generation, and of the finalists.
SCREENING: tuple[tuple[int, float], ...] = ((2, 1.15), (3, 1.05))
FINAL: tuple[tuple[int, float], ...] = ((6, 1.02), (12, 1.02))
MOST_FINALISTS = 8
HOPELESS = 2.0  # times the best median, after one sample
DRIFT, REPEATS = 1.03, 2  # of the control within a round (thrice its usual noise), and how often it is repeated
MOST_LOST = 3  # processes that die between candidates, before the problem is given up
PAIRED = 20  # samples of the winner beside the default, at the end
NEAR = 0.01  # medians that lie so near are a tie
#: The median's standard error over the spread of its samples, for normal ones: sqrt(pi / 2) * IQR / 1.349 / sqrt(n).
ERROR_OF_MEDIAN = math.sqrt(math.pi / 2) / 1.349


class ControlFailedError(Exception):
    """The control itself failed while it was sampled; ``trouble`` says how."""

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
        """Standard error of the median, as a share of it."""
        if self.samples < 2 or not self.seconds:
            return 0.0
        return ERROR_OF_MEDIAN * (self.q75 - self.q25) / math.sqrt(self.samples) / self.seconds


class Race:
    """Samples of one problem's tiles.

    Parameters
    ----------
    measure : callable
        A list of tiles -> one sample of each, in seconds; raises CandidateError with the index of the culprit.
    control : Tile
        The default.
    seed : int
        Of the order in a round.
    over : callable, optional
        Whether the time is up: then no further round begins.
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
        """What is known of a tile; None without samples."""
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
        """One sample of each tile, in random order between two of the control; who fails is left out from then on."""
        alive = [tile for tile in tiles if tile != self.control and tile not in self.failures]
        self._random.shuffle(alive)
        for attempt in range(REPEATS + 1):
            while True:
                order = [self.control, *alive, self.control]
                try:
                    first, *times, last = self._measure(order)
                    break
                except CandidateError as trouble:
                    if trouble.index is None:  # nobody was begun: the process has died for reasons of its own
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
        """Race a generation of new tiles; those that stay near the best."""
        return self._stages(list(tiles), SCREENING)

    def finish(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Race the best of all generations, at most `MOST_FINALISTS`; those that stay near the best.

        Tiles without samples, from a run before this one, are screened first.
        """
        self.screen([tile for tile in tiles if not self.ratios.get(tile)])
        return self._stages(sorted(tiles, key=self._seconds)[:MOST_FINALISTS], FINAL)

    def gain(self, tile: Tile) -> float:
        """How many times faster than the default, from samples that lie beside each other in rounds of their own.

        0 for a tile that fails in them.
        """
        if tile == self.control:
            return 1.0
        before = len(self.ratios.get(tile, ()))
        for _ in range(PAIRED):  # however late it is: samples that chose a winner cannot also judge it
            self.round([tile])
            if tile in self.failures:
                return 0.0
        return 1 / median(self.ratios[tile][before:])


def winner(timings: dict[Tile, Timing], order: Callable[[Tile], tuple[object, ...]]) -> Tile:
    """The tile to take: of those that tie with the fastest, the first in that order.

    Another tile is another order of summation: who wins must not hang on the noise of a tie.
    """
    best = min(timings.values(), key=lambda timing: timing.seconds)
    tied = [
        tile for tile, timing in timings.items() if timing.seconds <= best.seconds * (1 + max(NEAR, 2 * best.error))
    ]
    return min(tied, key=order)
