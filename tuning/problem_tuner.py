"""Tunes one problem: proposes, checks, races, and decides; by measurement or by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cunorm.strategy import Tile
from cunorm.table_entry import sizes_text

from . import entries
from .ahead import Ahead
from .race import ControlFailedError, Race, Timing, winner
from .result import Budget, Deadlines, Result, Trial
from .space import Space
from .study import ProblemStudy
from .trouble import Stopped, Trouble
from .verify import cut_down
from .worker import Worker

__all__ = ["ProblemTuner"]

GENERATION = 10  # tiles that race together
GAIN = 1.02  # that a tile has to have over the default, to be stored instead of it
LEAST_SAMPLES = 5  # of what is kept when a run is stopped: two stages of the race
MODEL_ATTEMPTS = 3  # winners by prediction that may fail verification before the problem is given up


class NotOpenedError(Exception):
    """The worker could not be made ready for the problem: no candidate's fault."""


class ProblemTuner:
    """Tunes one problem with one worker.

    Parameters
    ----------
    space : Space
    study : ProblemStudy
        Claimed.
    worker : Worker
        Times candidates, or verifies the model's winner.
    budget : Budget
    incumbent : Tile or None
        What the table has now: taken in a tie.
    notify : callable
        Gets each Trial as it is told.
    deadlines : Deadlines, optional
    ahead : Ahead, optional
        Compiles a generation before it races.
    seed : int
    """

    def __init__(
        self,
        space: Space,
        study: ProblemStudy,
        worker: Worker,
        budget: Budget,
        incumbent: Tile | None,
        notify: Callable[[Trial], None],
        deadlines: Deadlines | None = None,
        ahead: Ahead | None = None,
        seed: int = 0,
    ) -> None:
        self.space, self.study, self.worker, self.budget = space, study, worker, budget
        self.incumbent, self.deadlines, self.ahead = incumbent, deadlines or Deadlines(), ahead
        self._notify, self._seed = notify, seed
        self._verified: set[Tile] = set()
        self._bad: set[Tile] = set(study.failures())
        self._problem, self._opened = space.problem, 0
        self._race: Race | None = None

    # ---- both evaluators --------------------------------------------------------------------------------------------

    def _order(self, tile: Tile) -> tuple[object, ...]:
        """Who is taken in a tie."""
        return tile != self.incumbent, tile != self.space.default, *self.space.simplicity(tile)

    def _told(self, result: Result, tile: Tile, seconds: float | None, trouble: Trouble | None = None) -> None:
        if trouble is not None:
            self._bad.add(tile)
            self.study.fail(tile, trouble.kind, trouble.sentence)
            made = Trial(tile, None, trouble.kind, trouble.sentence)
        else:
            assert seconds is not None
            self.study.tell(tile, seconds)
            made = Trial(tile, seconds)
        result.trials.append(made)
        self._notify(made)

    def _ask(self, *request: Any, seconds: float) -> Any:
        """Ask the worker; one that was lost is started again, with the problem open."""
        if not self.worker.alive or self._opened != self.worker.spawned:
            try:
                self.worker.open(self._problem, self.deadlines.open)
            except Trouble as trouble:
                raise NotOpenedError(f"{trouble.kind}: {trouble.sentence}") from None
            self._opened = self.worker.spawned
        return self.worker.ask(*request, seconds=seconds)

    def _check(self, tile: Tile) -> Trouble | None:
        """Compile and verify a tile; what is wrong with it."""
        if tile in self._verified:
            return None
        try:
            self._ask("compile", tile, seconds=self.deadlines.compile)
            sentence = self._ask("verify", tile, seconds=self.deadlines.verify)
        except Trouble as trouble:
            return trouble
        if sentence is not None:
            return Trouble("wrong", sentence)
        self._verified.add(tile)
        return None

    # ---- by the cost model ------------------------------------------------------------------------------------------

    def model(self) -> Result:
        """The tile that the cost model predicts to be fastest, verified on the CPU executor."""
        result = Result(self.space, "model")
        try:
            while (count := min(GENERATION, self.budget.left(self.space, self.study.count))) > 0:
                if not (tiles := self.study.propose(count)):
                    break
                for tile in tiles:
                    self._told(result, tile, self.space.predicted(tile))
                self.study.beat()
            self._model_winner(result)
        except Stopped:
            result.interrupted, result.sentence = True, "interrupted before its winner was verified"
        except NotOpenedError as error:
            result.sentence = str(error)
        self.study.abandon()
        return result

    def _model_winner(self, result: Result) -> None:
        left = {tile: Timing(seconds, seconds, seconds, 1) for tile, seconds in self.study.told().items()}
        for _ in range(MODEL_ATTEMPTS):
            if not left:
                break
            tile = winner(left, self._order)
            problem = cut_down(self.space.problem, self.space.strategy(tile), tile, self.space.device)
            self._problem, self._opened = problem, 0
            trouble = self._check(tile)
            if trouble is None or trouble.kind == "compile":
                verified = None if trouble is not None else f"cpu executor, {sizes_text(problem)}"
                result.winner, result.timings = tile, {tile: left[tile]}
                result.timings.setdefault(self.space.default, self._predicted(self.space.default))
                result.sentence = "" if trouble is None else f"not verified: {trouble.sentence}"
                result.entry = entries.modelled(self.space, tile, trials=self.study.count, verified=verified)
                return
            del left[tile]
            self._bad.add(tile)
            result.trials.append(made := Trial(tile, None, trouble.kind, trouble.sentence))
            self._notify(made)
        result.sentence = "no tile that the cost model prefers passed verification"

    def _predicted(self, tile: Tile) -> Timing:
        seconds = self.space.predicted(tile)
        return Timing(seconds, seconds, seconds, 1)

    # ---- by measurement ---------------------------------------------------------------------------------------------

    def measure(self) -> Result:
        """The tile that is fastest on the worker's device."""
        result = Result(self.space, "measured")
        try:
            try:
                result.software, measures, bandwidth = self.worker.ask("facts", seconds=self.deadlines.sample)
                result.bandwidth = bandwidth
                result.source = "measured" if measures else "rehearsed"
                self._generations(result)
                finalists = self._finals(result)
            except Stopped:
                result.interrupted, finalists = True, self._kept()
            self._decide(result, finalists)
        except Stopped:
            result.interrupted = True
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
                self.ahead.wait()
            good = []
            for tile in tiles:
                if self.budget.over():
                    break
                if (trouble := self._check(tile)) is None:
                    good.append(tile)
                else:
                    self._told(result, tile, None, trouble)
                self.study.beat()
            self._screen(result, good)
        if self._race is None and not self.budget.over():  # everything was tried in an earlier run
            self._control(result, self.study.told())

    def _control(self, result: Result, tiles: Sequence[Tile] | dict[Tile, float]) -> bool:
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
        """The finalists, sampled once more beside each other."""
        if self._race is None:
            return []
        best = [tile for tile in self.study.told() if tile not in self._bad][: 2 * GENERATION]
        right = []
        for tile in best:
            if (trouble := self._check(tile)) is None:
                right.append(tile)
            else:
                self._told(result, tile, None, trouble)
        try:
            found = self._race.finish(right)
        except ControlFailedError as error:
            self._told(result, self._race.control, None, error.trouble)
            found = []
        for tile, trouble in self._race.failures.items():
            if tile not in self._bad:
                self._told(result, tile, None, trouble)
        return found

    def _kept(self) -> list[Tile]:
        """What a stopped run knows enough of."""
        race = self._race
        if race is None or len(race.ratios[race.control]) < LEAST_SAMPLES:
            return []
        enough = (tile for tile, ratios in race.ratios.items() if len(ratios) >= LEAST_SAMPLES)
        return [tile for tile in enough if tile not in self._bad]

    def _decide(self, result: Result, finalists: list[Tile]) -> None:
        race = self._race
        if race is None or race.timing(race.control) is None or race.control in self._bad:
            if not result.sentence:
                tried = f"{len(result.failures)} of {len(result.trials)} tiles failed"
                result.sentence = "interrupted before anything was known" if result.interrupted else tried
            return
        known = {tile: timing for tile in (*finalists, race.control) if (timing := race.timing(tile)) is not None}
        best = winner(known, self._order)
        if best != race.control and not result.interrupted:
            try:
                gain = race.gain(best)
            except ControlFailedError as error:
                self._told(result, race.control, None, error.trouble)
                result.sentence = "the default failed in the last rounds"
                return
            if best in race.failures:
                self._told(result, best, None, race.failures[best])
        else:
            gain = race.timing(race.control).seconds / known[best].seconds  # type: ignore[union-attr]
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
                default=not beaten,
            )
