"""One problem's Optuna study: the claim to propose tiles, the trials, the failures and the outcome.

A study has one proposer at a time. If several processes or hosts share a storage, a process claims a problem by
creating a study with an agreed name. Only one process can create it. A claim of this host expires when its process has
ended. A claim of another host expires when it was not renewed for `LEASE_SECONDS`. Then another process can make the
next claim. It aborts the trials that are still marked as running, and their tiles are proposed again.
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

#: Time after which a claim of another host expires unless it is renewed.
LEASE_SECONDS = 600
#: Time after which a claim without a time stamp expires, counted from the moment at which this process first saw it.
BARE_SECONDS = 10.0
_bare: dict[str, float] = {}
#: Errors about a trial that another process has ended, because it treated the claim as expired.
TAKEN = (optuna.exceptions.UpdateFinishedTrialError, ValueError)
SENTENCE, LATER = "sentence", "failed later"


def _started(pid: int) -> str:
    """The start time of a process in kernel ticks, or "". It distinguishes processes that reuse a process id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _me() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def _alive(owner: str) -> bool | None:
    """Whether the process that a claim names still runs; None if the claim names no process of this host."""
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
    """Whether a claim is still valid."""
    if claim.get("over"):
        return False
    if "beat" not in claim:  # its process is about to write the time stamp, or died before it did
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
        Result of `cunorm.tuning.search.storage.storage_of`.
    first : sequence of Tile
        Tiles to propose before all others.
    seed : int
    source : str
        Source of the times, with versions. It is part of the study's name, because times from different sources must
        not be compared.
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

    # ---- the claim --------------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Become the proposer; return False if another process is the proposer."""
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
        """Renew the claim until it is released."""
        while not self._over.wait(LEASE_SECONDS / 4) and self._claim is not None:
            with contextlib.suppress(Exception):  # the storage may be unreachable for a while
                self._claim.set_user_attr("beat", time.time())

    def release(self) -> None:
        """Release the claim, so that other processes can propose."""
        self._over.set()
        if self._claim is not None:
            with contextlib.suppress(Exception):  # if the storage is unreachable, the claim expires
                self._claim.set_user_attr("over", True)

    def _give_up(self) -> None:
        """Abort the trials that an earlier proposer left running."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with contextlib.suppress(*TAKEN):
                self.study.tell(trial.number, state=TrialState.PRUNED)

    # ---- trials -----------------------------------------------------------------------------------------------------

    def propose(self, count: int) -> list[Tile]:
        """At most `count` tiles that were not tried before."""
        found: list[Tile] = []
        while len(found) < count and not self.sampler.exhausted(self.study):
            trial = self.study.ask(fixed_distributions=self.sampler.distributions)
            tile = tile_of(trial.params)
            self._trials[tile] = trial
            found.append(tile)
        return found

    def tell(self, tile: Tile, seconds: float) -> None:
        """Record the time of a proposed tile. The study minimises the logarithm of the time."""
        trial = self._trials.pop(tile)
        with contextlib.suppress(*TAKEN):
            self.study.tell(trial, math.log(seconds))

    def pending(self, tile: Tile) -> bool:
        """Whether a tile was proposed and its outcome is not recorded yet."""
        return tile in self._trials

    def fail(self, tile: Tile, kind: str, sentence: str) -> None:
        """Record that a tile failed; it is never proposed again."""
        if tile not in self._trials:  # its time is already recorded, and it failed later
            later = [*self.study.user_attrs.get(LATER, ()), [tile.strategy, tile.as_dict(), kind, sentence]]
            self.study.set_user_attr(LATER, later)
            return
        trial = self._trials.pop(tile)
        with contextlib.suppress(*TAKEN):
            trial.set_user_attr(FAILURE, kind)
            trial.set_user_attr(SENTENCE, sentence)
            self.study.tell(trial, state=TrialState.PRUNED)

    def abandon(self) -> None:
        """Abort the trials without a recorded outcome, so that their tiles can be proposed again."""
        for trial in self._trials.values():
            with contextlib.suppress(*TAKEN):
                self.study.tell(trial, state=TrialState.PRUNED)
        self._trials.clear()

    @property
    def count(self) -> int:
        """Number of tiles that were tried, in this run or before."""
        return len(tried(self.study))

    def failures(self) -> dict[Tile, tuple[str, str]]:
        """The tiles that failed, each with the kind of failure and a sentence."""
        found = {
            tile_of(trial.params): (str(trial.user_attrs[FAILURE]), str(trial.user_attrs.get(SENTENCE, "")))
            for trial in self.study.get_trials(deepcopy=False)
            if FAILURE in trial.user_attrs
        }
        for strategy, fields, kind, sentence in self.study.user_attrs.get(LATER, ()):
            found[Tile(strategy, **fields)] = kind, sentence
        return found

    def told(self) -> dict[Tile, float]:
        """The tiles with a recorded time, and their times in seconds, fastest first."""
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        found = {tile_of(trial.params): math.exp(trial.value) for trial in done if trial.value is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    # ---- the outcome ------------------------------------------------------------------------------------------------

    def finish(self, outcome: dict[str, Any]) -> None:
        """Store the outcome for other processes that share the storage."""
        self.study.set_user_attr("outcome", {**outcome, "trials": self.count})

    def outcome(self) -> dict[str, Any] | None:
        """The outcome that is stored, or None."""
        found = self.study.user_attrs.get("outcome")
        return found if isinstance(found, dict) else None
