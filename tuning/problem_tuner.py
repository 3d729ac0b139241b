"""Tunes one problem: proposes and checks candidates, and decides; what modelling.py and measuring.py share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cunorm.core.strategy import Tile

from .measure.errors import Trouble
from .measure.precompile import Ahead
from .measure.result import Budget, Deadlines, Result, Trial
from .measure.worker import Worker
from .search.space import Space
from .search.study import ProblemStudy

__all__ = ["GENERATION", "NotOpenedError", "ProblemTuner"]

GENERATION = 10  # tiles that race together


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
            for attempt in (1, 2):  # a process may die for reasons of its own, once
                try:
                    self.worker.open(self._problem, self.deadlines.open)
                    break
                except Trouble as trouble:
                    if attempt == 2 or trouble.kind != "crash":
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
