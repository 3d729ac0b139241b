"""Tunes many problems with one worker or several, and keeps what comes of each in the table at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

from cunorm.core import settings
from cunorm.core.devices import Device
from cunorm.core.errors import TableError
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import choose_tile, table, table_file
from cunorm.tiling.table import MEASURED, Entry, entry_of, raw_of, shown

from .measure.errors import CandidateError, Stopped
from .measure.precompile import MOST, Precompiler
from .measure.result import Budget, Deadlines, Trial, TuningResult
from .measure.session import Spec, software
from .measure.worker import Worker
from .problem_tuner import Measuring, Modelling
from .search.space import Space
from .search.study import ProblemStudy

WARM_STARTS = 3  # neighbours' tiles that a study tries early
WAIT_SECONDS = 2.0  # between looks at problems that somebody else is tuning
Facts = ParamSpec("Facts")


@dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes
    ----------
    device : Device
        Whose table it is.
    evaluator : {"measure", "model"}
    specs : tuple of Spec
        One for each worker.
    table : Path
    storage : object
        From `cunorm.tuning.search.storage.storage_of`; None: in memory.
    trials : int or None
        Tiles to try of each problem; None: as many as its space asks for.
    seconds : float or None
        To begin something new in, for each problem.
    seed : int
    deadlines : Deadlines
    """

    device: Device
    evaluator: str
    specs: tuple[Spec, ...]
    table: Path
    storage: Any = None
    trials: int | None = None
    seconds: float | None = None
    seed: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)


class Events:
    """What happens meanwhile; methods to override. Called from the threads of workers, one at a time."""

    def begins(self, space: Space, trials: int) -> None:
        """A problem begins; so many tiles will be tried at most."""

    def tried(self, space: Space, trial: Trial) -> None:
        """A tile was tried."""

    def ends(self, result: TuningResult) -> None:
        """A problem ends."""

    def elsewhere(self, problem: Problem, entry: Entry | None) -> None:
        """A problem was tuned by somebody who shares the storage; None: it is being tuned there."""


def check_table(path: Path, device: Device) -> table.Table:
    """The table that is to be written, as it is now; TableError if it is none, or another device's."""
    path = table_file.target(path)
    found = table.read(path) if path.exists() else table.Table(table.device_facts(device))
    if not table.for_device(found, device):
        name = shown(found.device.get("name"))
        raise TableError(f"{path}: a table of {name}, expected one of {device.name}; name another file")
    return found


def _warm_starts(space: Space, known: table.Table) -> tuple[Tile | None, list[Tile]]:
    """What the table has for the problem, and what it has for its nearest neighbours."""
    old = known.entries.get(space.problem)
    incumbent = None if old is None or old.source != MEASURED else old.tile
    near = sorted(
        (one for one in known.entries.values() if choose_tile.alike(one.problem, space.problem)),
        key=lambda one: (choose_tile.distance(one.problem, space.problem), str(one.problem)),
    )
    return incumbent, [one.tile for one in near[: WARM_STARTS + 1]]


class _TuningRun:
    """The threads of one `tune`."""

    def __init__(self, options: Options, events: Events) -> None:
        self.options, self.events, self._lock = options, events, threading.Lock()
        self.stop = threading.Event()
        self.results: list[TuningResult] = []
        self.entries: list[Entry] = []
        self.errors: list[BaseException] = []
        self.todo: queue.SimpleQueue[Problem] = queue.SimpleQueue()

    def work(self, spec: Spec, over: threading.Event) -> None:
        try:
            with Worker(spec, self.stop.is_set) as worker, Precompiler(spec, self._compilers()) as ahead:
                waiting: list[Problem] = []
                while not self.stop.is_set():
                    try:
                        problem = self.todo.get_nowait()
                    except queue.Empty:
                        if not waiting:
                            return
                        self.stop.wait(WAIT_SECONDS)
                        for problem in waiting:
                            self.todo.put(problem)
                        waiting = []
                        continue
                    if not self.one(problem, worker, ahead):
                        waiting.append(problem)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()
        finally:
            over.set()

    def _compilers(self) -> int:
        """Processes that compile ahead for each worker."""
        if self.options.evaluator != "measure":
            return 0
        return max(1, min(MOST, (settings.cores() - 1) // len(self.options.specs)))

    def one(self, problem: Problem, worker: Worker, ahead: Precompiler) -> bool:
        """Tune a problem; False if somebody else is at it."""
        options = self.options
        space = Space.of(problem, OPS[problem.op].strategies, options.device)
        incumbent, warm = _warm_starts(space, check_table(options.table, options.device))
        source = options.evaluator
        if source == "measure":  # times of another clock, driver or compiler are not to be compared with these
            try:
                versions, measures, _ = worker.ask("facts", seconds=options.deadlines.open)
            except Stopped:
                return True
            except CandidateError as trouble:
                self._ends(TuningResult(space, "measured", sentence=f"the worker cannot begin: {trouble}"))
                return True
            source = f"{'measured' if measures else 'rehearsed'} {versions}"
        study = ProblemStudy(space, options.storage, ([incumbent] if incumbent else []) + warm, options.seed, source)
        budget = Budget(options.trials, options.seconds)
        if not study.claim():
            self._tell(self.events.elsewhere, problem, None)
            return False
        try:
            if (entry := self._done(study, space, budget)) is not None:
                self.entries.append(entry)
                self._tell(self.events.elsewhere, problem, entry)
                return True
            self._tell(self.events.begins, space, budget.wanted(space))
            tuner = (Measuring if options.evaluator == "measure" else Modelling)(
                space, study, worker, budget, incumbent, lambda trial: self._tell(self.events.tried, space, trial),
                options.deadlines, ahead, options.seed,
            )  # fmt: skip
            result = tuner.run()
            result.seconds = time.monotonic() - budget.began
            if result.entry is not None:
                versions = result.software or software("cpu")
                kept = table.update(options.table, options.device, versions, [result.entry])
                result.kept = kept.entries[problem].source == result.entry.source
                self.entries.append(result.entry)
                if not result.interrupted:
                    study.finish({"entry": raw_of(result.entry), "software": versions})
            self._ends(result)
        finally:
            study.release()
        return True

    def _ends(self, result: TuningResult) -> None:
        self.results.append(result)
        self._tell(self.events.ends, result)

    def _tell(self, event: Callable[Facts, None], *facts: Facts.args, **named: Facts.kwargs) -> None:
        """Call a method of the events while no other thread does."""
        with self._lock:
            event(*facts, **named)

    def _done(self, study: ProblemStudy, space: Space, budget: Budget) -> Entry | None:
        """The entry that somebody has left in the storage who tried no fewer tiles; it goes into this table too."""
        found = study.outcome()
        if found is None or int(found["trials"]) < budget.wanted(space):
            return None
        entry = entry_of(found["entry"])
        if entry.problem != space.problem or (entry.source == MEASURED) != (self.options.evaluator == "measure"):
            return None
        table.update(self.options.table, self.options.device, found.get("software", {}), [entry])
        return entry


def tune(
    problems: Iterable[Problem], options: Options, events: Events | None = None
) -> tuple[list[TuningResult], list[Entry], bool]:
    """Tune problems; what comes of each is in the table when the next begins.

    Parameters
    ----------
    problems : iterable of Problem
    options : Options
    events : Events, optional

    Returns
    -------
    results : list of TuningResult
        Of the problems that were tuned here.
    entries : list of Entry
        Of these, and of those that others had tuned in the same storage.
    interrupted : bool
        Whether Ctrl-C ended it.

    Raises
    ------
    TableError, OSError
        If the table cannot be used.
    """
    check_table(options.table, options.device)
    run = _TuningRun(options, events or Events())
    for problem in dict.fromkeys(one.canonical() for one in problems):
        run.todo.put(problem)
    over = [threading.Event() for _ in options.specs]
    for spec, event in zip(options.specs, over, strict=True):
        threading.Thread(target=run.work, args=(spec, event), daemon=True).start()
    interrupted = _wait(over, run.stop)
    for error in run.errors:
        raise error
    return run.results, run.entries, interrupted


def _wait(over: Sequence[threading.Event], stop: threading.Event) -> bool:
    """Wait for all; the first Ctrl-C asks to stop, the second goes through. Returns whether there was one."""
    interrupted = False
    # Not Thread.join: interrupted, it takes the thread for ended (bpo-45274).
    while not all(one.is_set() for one in over):
        try:
            for one in over:
                one.wait(0.1)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stop.set()
    return interrupted
