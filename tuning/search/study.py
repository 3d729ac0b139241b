"""One problem's Optuna study: who may propose, what was tried, what became of it, where that is kept.

A study has one proposer at a time. Where several processes or hosts share a storage, a process claims a problem by
creating a study of an agreed name, which only one can; the claim of a process that has died, or has not been heard of
for a while, is followed by another. A trial that was running then is given up, and its tile is proposed again.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from cunorm.core.strategy import Tile

from .sampler import FAILURE, ValidSetSampler, tile_of, tried
from .space import Space

#: After which a claim of another host that nobody has renewed counts for nothing.
LEASE_SECONDS = 600
#: After which a claim that does not say whose it is counts for nothing; and when this process first saw such ones.
BARE_SECONDS = 10.0
_bare: dict[str, float] = {}
#: A trial that somebody else has ended, who took the claim for dead.
TAKEN = (optuna.exceptions.UpdateFinishedTrialError, ValueError)
SENTENCE, LATER = "sentence", "failed later"


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: a number that comes again is another process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _me() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def _alive(owner: str) -> bool | None:
    """Whether the process that a claim names still runs; None where that cannot be told from here."""
    host, pid, began = ([*owner.split(":"), "", ""])[:3]
    if host != socket.gethostname() or not pid.isdecimal():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(int(pid)) == began


def _held(name: str, claim: dict[str, Any]) -> bool:
    """Whether a claim stands."""
    if claim.get("over"):
        return False
    if "beat" not in claim:  # whoever made it died at once, or will write it in a moment
        first = _bare.setdefault(name, time.monotonic())
        return time.monotonic() - first < BARE_SECONDS
    alive = _alive(str(claim.get("owner", "")))
    return time.time() - float(claim["beat"]) < LEASE_SECONDS if alive is None else alive


class ProblemStudy:
    """The study of a space.

    Parameters
    ----------
    space : Space
    storage : optional
        From `cunorm.tuning.search.storage.storage_of`.
    first : sequence of Tile
        Proposed before all others.
    seed : int
    source : str
        What the times come from, versions and all: those of another source are never compared with these.
    """

    def __init__(
        self,
        space: Space,
        storage: BaseStorage | None,
        first: Sequence[Tile],
        seed: int,
        source: str = "",
    ) -> None:
        self.space = space
        self.storage = storage
        self.sampler = ValidSetSampler(space.tiles, [space.default, *first], seed)
        self.name = f"{space.problem.describe()} on {space.device.name} [{space.digest()}] {source}".strip()
        self.study: Study = optuna.create_study(
            storage=storage, study_name=self.name, sampler=self.sampler, load_if_exists=True
        )
        self._trials: dict[Tile, Trial] = {}
        self._claim: Study | None = None
        self._over = threading.Event()

    # ---- who proposes -----------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Become the proposer; False if somebody else is."""
        if self.storage is None:
            return True
        number = 1
        while True:
            name = f"{self.name} claim {number}"
            try:
                made = optuna.create_study(storage=self.storage, study_name=name)
            except optuna.exceptions.DuplicatedStudyError:
                if _held(name, optuna.load_study(storage=self.storage, study_name=name).user_attrs):
                    return False
                number += 1
                continue
            made.set_user_attr("owner", _me())
            made.set_user_attr("beat", time.time())
            self._claim = made
            threading.Thread(target=self._beat, daemon=True).start()
            try:
                self._give_up()
            except BaseException:
                self.release()
                raise
            return True

    def _beat(self) -> None:
        """Renew the claim, until it is released."""
        while not self._over.wait(LEASE_SECONDS / 4) and self._claim is not None:
            with contextlib.suppress(Exception):  # a storage that is away for a while
                self._claim.set_user_attr("beat", time.time())

    def release(self) -> None:
        """Let others propose."""
        self._over.set()
        if self._claim is not None:
            with contextlib.suppress(Exception):  # a storage that is away: the lease ends by itself
                self._claim.set_user_attr("over", True)

    def _give_up(self) -> None:
        """End what a proposer before this one left running."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with contextlib.suppress(*TAKEN):
                self.study.tell(trial.number, state=TrialState.PRUNED)

    # ---- trials -----------------------------------------------------------------------------------------------------

    def propose(self, count: int) -> list[Tile]:
        """Up to so many tiles that were not tried before."""
        found: list[Tile] = []
        while len(found) < count and not self.sampler.exhausted(self.study):
            trial = self.study.ask(fixed_distributions=self.sampler.distributions)
            tile = tile_of(trial.params)
            self._trials[tile] = trial
            found.append(tile)
        return found

    def tell(self, tile: Tile, seconds: float) -> None:
        """What a proposed tile took. The study minimises the logarithm of that."""
        trial = self._trials.pop(tile)
        with contextlib.suppress(*TAKEN):
            self.study.tell(trial, math.log(seconds))

    def pending(self, tile: Tile) -> bool:
        """Whether a tile was proposed and nothing said of it since."""
        return tile in self._trials

    def fail(self, tile: Tile, kind: str, sentence: str) -> None:
        """What is wrong with a tile; it is never proposed again."""
        if tile not in self._trials:  # told before, and failed later
            later = [*self.study.user_attrs.get(LATER, ()), [tile.strategy, tile.as_dict(), kind, sentence]]
            self.study.set_user_attr(LATER, later)
            return
        trial = self._trials.pop(tile)
        with contextlib.suppress(*TAKEN):
            trial.set_user_attr(FAILURE, kind)
            trial.set_user_attr(SENTENCE, sentence)
            self.study.tell(trial, state=TrialState.PRUNED)

    def abandon(self) -> None:
        """Give up what was proposed and neither told nor failed, so that it can be proposed again."""
        for trial in self._trials.values():
            with contextlib.suppress(*TAKEN):
                self.study.tell(trial, state=TrialState.PRUNED)
        self._trials.clear()

    @property
    def count(self) -> int:
        """Tiles that were tried, in this run or before."""
        return len(tried(self.study))

    def failures(self) -> dict[Tile, tuple[str, str]]:
        """What is wrong with the tiles that failed: kind and sentence."""
        found = {
            tile_of(trial.params): (str(trial.user_attrs[FAILURE]), str(trial.user_attrs.get(SENTENCE, "")))
            for trial in self.study.get_trials(deepcopy=False)
            if FAILURE in trial.user_attrs
        }
        for strategy, fields, kind, sentence in self.study.user_attrs.get(LATER, ()):
            found[Tile(strategy, **fields)] = kind, sentence
        return found

    def told(self) -> dict[Tile, float]:
        """The seconds of the tiles that were told, fastest first."""
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        found = {tile_of(trial.params): math.exp(trial.value) for trial in done if trial.value is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    # ---- the outcome ------------------------------------------------------------------------------------------------

    def finish(self, outcome: dict[str, Any]) -> None:
        """Leave what came of it for others who share the storage."""
        self.study.set_user_attr("outcome", {**outcome, "trials": self.count})

    def outcome(self) -> dict[str, Any] | None:
        """What somebody left, or None."""
        found = self.study.user_attrs.get("outcome")
        return found if isinstance(found, dict) else None
