"""Tunes one problem by the cost model: for machines without the GPU. Nothing is timed, the winner is verified."""

from __future__ import annotations

from cunorm.core.strategy import Tile
from cunorm.tiling.table_entry import sizes_text

from .measure import entries
from .measure.errors import NO_COMPILER, Stopped
from .measure.race import Timing, winner
from .measure.result import Result, Trial
from .problem_tuner import GENERATION, NotOpenedError, ProblemTuner
from .verify.verifier import cut_down

__all__ = ["Modelling"]

ATTEMPTS = 3  # winners by prediction that may fail verification before the problem is given up


class Modelling(ProblemTuner):
    """The tile that the cost model predicts to be fastest, verified on the CPU executor."""

    def run(self) -> Result:
        """Tune."""
        result = Result(self.space, "model")
        try:
            while (count := min(GENERATION, self.budget.left(self.space, self.study.count))) > 0:
                if not (tiles := self.study.propose(count)):
                    break
                for tile in tiles:
                    self._told(result, tile, self.space.predicted(tile))
            self._verified_winner(result)
        except Stopped:
            result.interrupted, result.sentence = True, "interrupted before its winner was verified"
        except NotOpenedError as error:
            result.sentence = str(error)
        self.study.abandon()
        return result

    def _verified_winner(self, result: Result) -> None:
        left = {tile: Timing(seconds, seconds, seconds, 1) for tile, seconds in self.study.told().items()}
        for _ in range(ATTEMPTS):
            if not left:
                break
            tile = winner(left, self._order)
            problem = cut_down(self.space.problem, self.space.strategy(tile), tile, self.space.device)
            self._problem, self._opened = problem, 0
            trouble = self._check(tile)
            if trouble is None or trouble.kind == NO_COMPILER:
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
        passed = "no tile that the cost model prefers passed verification"
        result.sentence = passed if result.trials else "the time was up before a tile was tried"

    def _predicted(self, tile: Tile) -> Timing:
        seconds = self.space.predicted(tile)
        return Timing(seconds, seconds, seconds, 1)
