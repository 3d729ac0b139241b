"""Tunes one problem by measuring: generations of candidates race, the best meet again, the winner meets the default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cunorm.core.strategy import Tile

from .measure import entries
from .measure.errors import Stopped, Trouble
from .measure.race import ControlFailedError, Race, Timing, winner
from .measure.result import Result
from .problem_tuner import GENERATION, NotOpenedError, ProblemTuner

__all__ = ["Measuring"]

GAIN = 1.02  # that a tile has to have over the default, to be stored instead of it
LEAST_SAMPLES = 5  # of what is kept when a run is stopped: two stages of the race


class Measuring(ProblemTuner):
    """The tile that is fastest on the worker's device."""

    _race: Race | None = None

    def run(self) -> Result:
        """Tune."""
        result = Result(self.space, "measured")
        try:
            result.software, measures, bandwidth = self.worker.ask("facts", seconds=self.deadlines.sample)
            result.bandwidth = bandwidth
            result.source = "measured" if measures else "rehearsed"
            self._generations(result)
            self._decide(result, self._finals(result))
        except Stopped:
            result.interrupted = True
            self._decide(result, self._kept())  # which asks nobody
        except (NotOpenedError, Trouble) as error:  # not a candidate's: the worker cannot even begin
            result.sentence = str(error)
        self.study.abandon()
        return result

    def _generations(self, result: Result) -> None:
        while (count := min(GENERATION, self.budget.left(self.space, self.study.count))) > 0:
            tiles = self.study.propose(count)
            if not tiles:
                break
            if self.ahead is not None:
                self.ahead.submit(self.space, tiles)
                self.ahead.wait(self.worker.stopped)
            good = []
            for tile in tiles:
                if self.budget.over():
                    break
                if (trouble := self._check(tile)) is None:
                    good.append(tile)
                else:
                    self._told(result, tile, None, trouble)
            self._screen(result, good)
        if self._race is None and not self.budget.over():  # everything was tried in an earlier run
            self._control(result, self.study.told())

    def _control(self, result: Result, tiles: Iterable[Tile]) -> bool:
        """Have a race, whose control is the default, or the first tile that is right if the default is not."""
        if self._race is not None and self._race.control not in self._bad:
            return True
        for tile in (self.space.default, *tiles):
            if tile in self._bad:
                continue
            if (trouble := self._check(tile)) is not None:
                self._told(result, tile, None, trouble)
                continue
            self._race = Race(self._samples, tile, self._seed, self.budget.over)
            return True
        return False

    def _samples(self, tiles: Sequence[Tile]) -> list[float]:
        """One sample of each, for the race; after a loss the worker is made ready again before the clock runs."""
        found: list[float] = self._ask("round", list(tiles), seconds=self.deadlines.sample)
        return found

    def _screen(self, result: Result, tiles: list[Tile]) -> None:
        while tiles and self._control(result, tiles):
            assert self._race is not None
            try:
                self._race.screen(tiles)
            except ControlFailedError as error:
                self._told(result, self._race.control, None, error.trouble)
                tiles = [tile for tile in tiles if tile not in self._bad]
                continue
            break
        for tile in tiles:
            race = self._race
            if race is None or not self.study.pending(tile):
                continue
            if (trouble := race.failures.get(tile)) is not None:
                self._told(result, tile, None, trouble)
            elif (timing := race.timing(tile)) is not None:
                self._told(result, tile, timing.seconds)

    def _finals(self, result: Result) -> list[Tile]:
        """The finalists, sampled once more beside each other; again without those that fail then."""
        race = self._race
        while race is not None and race.control not in self._bad:
            known = len(self._bad)
            for tile in self._best():
                if (trouble := self._check(tile)) is not None:
                    self._told(result, tile, None, trouble)
            try:
                found = race.finish(self._best())
            except ControlFailedError as error:
                self._told(result, race.control, None, error.trouble)
                break
            for tile, trouble in race.failures.items():
                if tile not in self._bad:
                    self._told(result, tile, None, trouble)
            if len(self._bad) == known:
                return found
        return []

    def _best(self) -> list[Tile]:
        """The fastest that were told, of this run and those before."""
        return [tile for tile in self.study.told() if tile not in self._bad][: 2 * GENERATION]

    def _kept(self) -> list[Tile]:
        """What a stopped run knows enough of."""
        race = self._race
        if race is None or len(race.ratios[race.control]) < LEAST_SAMPLES:
            return []
        enough = (tile for tile, ratios in race.ratios.items() if len(ratios) >= LEAST_SAMPLES)
        return [tile for tile in enough if tile not in self._bad and tile not in race.failures]

    def _gain(self, race: Race, timing: Timing, tile: Tile, interrupted: bool) -> float:
        """How many times faster than the default a tile is."""
        if interrupted:  # no rounds of its own: three quarters of its samples have to say so
            default = race.timing(race.control)
            assert default is not None
            return default.seconds / timing.q75
        return race.gain(tile)

    def _decide(self, result: Result, finalists: list[Tile]) -> None:
        race = self._race
        if race is None or race.timing(race.control) is None or race.control in self._bad:
            if not result.sentence:
                tried = f"{len(result.failures)} of {len(result.trials)} tiles failed"
                if result.interrupted:
                    result.sentence = "interrupted before anything was known"
                else:
                    result.sentence = tried if result.trials else "the time was up before a tile was tried"
            return
        best, gain = race.control, 1.0
        try:
            while True:
                known = {tile: one for tile in (*finalists, race.control) if (one := race.timing(tile)) is not None}
                if (best := winner(known, self._order)) == race.control:
                    break
                gain = self._gain(race, known[best], best, result.interrupted)
                if best not in race.failures or result.interrupted:
                    break
                self._told(result, best, None, race.failures[best])
                finalists = self._finals(result)  # who had lost against it may win now
        except ControlFailedError as error:
            self._told(result, race.control, None, error.trouble)
        if race.control in self._bad:
            result.sentence = "the default failed in the last rounds"
            return
        beaten = best != race.control and gain >= GAIN
        result.winner = best if beaten else race.control
        result.timings = {tile: timing for tile in known if (timing := race.timing(tile)) is not None}
        if result.source == "measured":
            result.entry = entries.measured(
                self.space,
                result.winner,
                result.timings,
                measures=result.source == "measured",
                bandwidth=result.bandwidth or 0.0,
                trials=self.study.count,
                default=not beaten and race.control == self.space.default,
            )
