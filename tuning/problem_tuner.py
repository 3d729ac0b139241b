"""Tunes one problem by measuring, simulating or the cost model: proposes candidates, checks them, chooses the tile.

`Measuring` races generations of candidates, then races the best of all generations, then samples the winner beside the
default. `Simulating` runs the machine code of candidates on a simulated clock, and `Modelling` only predicts; both
verify their winner on the CPU executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cunorm.core.strategy import Tile
from cunorm.jit.sources import Text
from cunorm.tiling import costmodel
from cunorm.tiling.table import Entry

from .measure import simulate
from .measure.errors import NO_COMPILER, CandidateError, Stopped
from .measure.precompile import Precompiler
from .measure.race import GAIN, ControlFailedError, Race, Timing, winner
from .measure.result import (
    Budget,
    Deadlines,
    Trial,
    TuningResult,
    measured_entry,
    modelled_entry,
    simulated_entry,
)
from .measure.session import software
from .measure.simulate import Simulators
from .measure.worker import Worker
from .search.space import Space
from .search.study import ProblemStudy
from .verify.verifier import cut_down

GENERATION = 10  # number of tiles that race together


class NotOpenedError(Exception):
    """The worker could not open the problem. No candidate caused this."""


class ProblemTuner:
    """Tunes one problem with one worker.

    Parameters
    ----------
    space : Space
    study : ProblemStudy
        Must be claimed.
    worker : Worker
        Times candidates, or verifies the winner.
    budget : Budget
    incumbent : Tile or None
        The tile that the table contains now, if its evidence is at least as good. It is preferred in a tie.
    notify : callable
        Called with each Trial when its outcome is known.
    deadlines : Deadlines, optional
    ahead : Precompiler, optional
        Compiles the kernels of a generation before it races.
    seed : int
    """

    def __init__(  # noqa: PLR0913
        self,
        space: Space,
        study: ProblemStudy,
        worker: Worker,
        budget: Budget,
        incumbent: Tile | None,
        notify: Callable[[Trial], None],
        deadlines: Deadlines | None = None,
        ahead: Precompiler | None = None,
        seed: int = 0,
    ) -> None:
        self.space, self.study, self.worker, self.budget = space, study, worker, budget
        self.incumbent, self.deadlines, self.ahead = incumbent, deadlines or Deadlines(), ahead
        self._notify, self._seed = notify, seed
        #: The tiles that passed verification, each with the text of its kernels that calls run.
        self._verified: dict[Tile, Text] = {}
        self._bad: set[Tile] = set(study.failures())
        self._problem, self._opened = space.problem, 0

    def run(self) -> TuningResult:
        """Tune."""
        raise NotImplementedError

    def _order(self, tile: Tile) -> tuple[object, ...]:
        """Sort key for ties: the incumbent, then the default, then the simplest tile."""
        return tile != self.incumbent, tile != self.space.default, *self.space.simplicity(tile)

    def _told(
        self, result: TuningResult, tile: Tile, seconds: float | None, trouble: CandidateError | None = None
    ) -> None:
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
        """Send a request to the worker. A worker that was lost is restarted and opens the problem again."""
        if not self.worker.alive or self._opened != self.worker.spawned:
            for attempt in (1, 2):  # a process may die once for a reason unrelated to the problem
                try:
                    self.worker.open(self._problem, self.deadlines.open)
                    break
                except CandidateError as trouble:
                    if attempt == 2 or trouble.kind != "crash":
                        raise NotOpenedError(f"{trouble.kind}: {trouble.sentence}") from None
            self._opened = self.worker.spawned
        return self.worker.ask(*request, seconds=seconds)

    def _check(self, tile: Tile) -> CandidateError | None:
        """Compile and verify a tile; return the error, or None."""
        if tile in self._verified:
            return None
        try:
            text = self._ask("compile", tile, seconds=self.deadlines.compile)
            sentence = self._ask("verify", tile, seconds=self.deadlines.verify)
        except CandidateError as trouble:
            return trouble
        if sentence is not None:
            return CandidateError("wrong", sentence)
        self._verified[tile] = text
        return None


LEAST_SAMPLES = 5  # minimum samples of a tile that counts in an interrupted run: both stages of the screening


class Measuring(ProblemTuner):
    """Finds the tile that is fastest on the worker's device."""

    _race: Race | None = None

    def run(self) -> TuningResult:
        """Tune."""
        result = TuningResult(self.space, "measured")
        try:
            result.software, measures, bandwidth = self.worker.ask("facts", seconds=self.deadlines.sample)
            result.bandwidth = bandwidth
            result.source = "measured" if measures else "rehearsed"
            self._generations(result)
            self._decide(result, self._finals(result))
        except Stopped:
            result.interrupted = True
            self._decide(result, self._kept())  # uses only known samples, sends no request to the worker
        except (NotOpenedError, CandidateError) as error:  # no candidate caused it: the worker cannot start
            result.sentence = str(error)
        self.study.abandon()
        return result

    def _generations(self, result: TuningResult) -> None:
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
        if self._race is None and not self.budget.over():  # an earlier run has tried all tiles
            self._control(result, self.study.told())

    def _control(self, result: TuningResult, tiles: Iterable[Tile]) -> bool:
        """Create the race if there is none; return False if no tile can be its control.

        The control is the default. If the default fails, it is the first of `tiles` that passes verification.
        """
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
        """One sample of each tile, for the race. A lost worker is restarted before the deadline of the round begins."""
        found: list[float] = self._ask("round", list(tiles), seconds=self.deadlines.sample)
        return found

    def _screen(self, result: TuningResult, tiles: list[Tile]) -> None:
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

    def _finals(self, result: TuningResult) -> list[Tile]:
        """Race the finalists and return the survivors. If a tile fails, race again without it."""
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
        """The fastest tiles of this and earlier runs, at most two generations."""
        return [tile for tile in self.study.told() if tile not in self._bad][: 2 * GENERATION]

    def _kept(self) -> list[Tile]:
        """The tiles of an interrupted run that have enough samples."""
        race = self._race
        if race is None or len(race.ratios[race.control]) < LEAST_SAMPLES:
            return []
        enough = (tile for tile, ratios in race.ratios.items() if len(ratios) >= LEAST_SAMPLES)
        return [tile for tile in enough if tile not in self._bad and tile not in race.failures]

    def _gain(self, race: Race, timing: Timing, tile: Tile, interrupted: bool) -> float:
        """How many times faster than the default a tile is."""
        if interrupted:  # no paired rounds: use the upper quartile, so three quarters of the samples confirm the gain
            default = race.timing(race.control)
            assert default is not None
            return default.seconds / timing.q75
        return race.gain(tile)

    def _decide(self, result: TuningResult, finalists: list[Tile]) -> None:
        race = self._race
        if race is None or race.timing(race.control) is None or race.control in self._bad:
            if not result.sentence:
                tried = f"{len(result.failures)} of {len(result.trials)} tiles failed"
                if result.interrupted:
                    result.sentence = "interrupted before a tile could be chosen"
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
                finalists = self._finals(result)  # a tile that lost against the failed one may win now
        except ControlFailedError as error:
            self._told(result, race.control, None, error.trouble)
        if race.control in self._bad:
            result.sentence = "the control tile (the default, or its substitute) failed in the last rounds"
            return
        beaten = best != race.control and gain >= GAIN
        result.winner = best if beaten else race.control
        result.timings = {tile: timing for tile in known if (timing := race.timing(tile)) is not None}
        if result.source == "measured":
            result.entry = measured_entry(
                self.space,
                result.winner,
                result.timings,
                measures=result.source == "measured",
                bandwidth=result.bandwidth or 0.0,
                trials=self.study.count,
                default=not beaten and race.control == self.space.default,
                text=self._verified[result.winner],
            )


ATTEMPTS = 3  # after this many predicted winners fail verification, the problem is not tuned


class Untimed(ProblemTuner):
    """Finds a tile without timing a kernel, and verifies it on the CPU executor."""

    source: str
    #: The words for the tiles that are verified, in a message.
    best: str

    def run(self) -> TuningResult:
        """Tune."""
        result = TuningResult(self.space, self.source)
        try:
            self._try_tiles(result)
            self._verified_winner(result)
        except Stopped:
            result.interrupted, result.sentence = True, "interrupted before the winner was verified"
        except NotOpenedError as error:
            result.sentence = str(error)
        self.study.abandon()
        return result

    def _try_tiles(self, result: TuningResult) -> None:
        """Find the times of tiles."""
        raise NotImplementedError

    def _chosen(self, left: dict[Tile, Timing]) -> Tile:
        """The winner of some tiles."""
        return winner(left, self._order)

    def _entry(self, result: TuningResult, tile: Tile, left: dict[Tile, Timing], verified: str | None) -> Entry:
        """The winner's table entry; also fills `TuningResult.timings`. `left`: the tiles that did not fail."""
        raise NotImplementedError

    def _verified_winner(self, result: TuningResult) -> None:
        times = self.study.told().items()
        left = {tile: Timing(seconds, seconds, seconds, 1) for tile, seconds in times if tile not in self._bad}
        if not left and result.trials:
            result.sentence = f"{len(result.failures)} of {len(result.trials)} tiles failed"
            return
        for _ in range(ATTEMPTS):
            if not left:
                break
            tile = self._chosen(left)
            problem = cut_down(self.space.problem, self.space.strategy(tile), tile, self.space.device)
            self._problem, self._opened = problem, 0
            trouble = self._check(tile)
            if trouble is None or trouble.kind == NO_COMPILER:
                verified = None if trouble is not None else f"cpu executor, {problem.sizes_text}"
                result.winner = tile
                result.sentence = "" if trouble is None else f"not verified: {trouble.sentence}"
                result.entry = self._entry(result, tile, left, verified)
                return
            del left[tile]
            self._told(result, tile, None, trouble)
        passed = f"none of the {self.best} tiles passed verification"
        result.sentence = passed if result.trials else "the time was up before a tile was tried"


class Modelling(Untimed):
    """Finds the tile that the cost model predicts to be fastest; the default, if it is predicted about as fast."""

    source, best = "model", "cost model's best"

    def _try_tiles(self, result: TuningResult) -> None:
        while (count := min(GENERATION, self.budget.left(self.space, self.study.count))) > 0:
            if not (tiles := self.study.propose(count)):
                break
            for tile in tiles:
                self._told(result, tile, self.space.predicted(tile))

    def _chosen(self, left: dict[Tile, Timing]) -> Tile:
        default, fastest = left.get(self.space.default), min(timing.seconds for timing in left.values())
        tied = default is not None and default.seconds <= costmodel.NEAR_TIE * fastest
        return self.space.default if tied else super()._chosen(left)

    def _entry(self, result: TuningResult, tile: Tile, left: dict[Tile, Timing], verified: str | None) -> Entry:
        seconds = self.space.predicted(self.space.default)
        result.timings = {self.space.default: Timing(seconds, seconds, seconds, 1), tile: left[tile]}
        return modelled_entry(self.space, tile, trials=self.study.count, verified=verified)


class Simulating(Untimed):
    """Finds the tile whose machine code is fastest on the simulator; several processes simulate tiles at once.

    Parameters
    ----------
    simulators : Simulators
    bandwidth : float
        Bytes per second of a copy on the simulated GPU.
    simulator : str
        Version of the simulator.
    others
        See `ProblemTuner`.
    """

    source, best = "simulated", "fastest simulated"

    def __init__(self, *others: Any, simulators: Simulators, bandwidth: float, simulator: str, **named: Any) -> None:
        super().__init__(*others, **named)
        self.simulators, self.bandwidth, self.simulator = simulators, bandwidth, simulator

    def _try_tiles(self, result: TuningResult) -> None:
        result.bandwidth, result.software = self.bandwidth, {**software("cpu"), "simulator": self.simulator}
        running = 0
        while True:
            while running < self.simulators.processes and self.budget.left(self.space, self.study.count) > 0:
                if not (tiles := self.study.propose(1)):
                    break
                self.simulators.submit(self.space.problem, tiles[0], self.deadlines.simulate)
                running += 1
            if not running:
                return
            tile, found = self.simulators.next(self.worker.stopped)
            running -= 1
            trouble = found if isinstance(found, CandidateError) else None
            self._told(result, tile, None if isinstance(found, CandidateError) else found, trouble)

    def _chosen(self, left: dict[Tile, Timing]) -> Tile:
        best, default = winner(left, self._order), self.space.default
        return default if default in left and left[default].seconds < GAIN * left[best].seconds else best

    def _entry(self, result: TuningResult, tile: Tile, left: dict[Tile, Timing], verified: str | None) -> Entry:
        result.timings = left
        return simulated_entry(
            self.space,
            tile,
            left,
            trials=self.study.count,
            default=tile == self.space.default,
            verified=verified,
            text=simulate.TEXT,
        )
