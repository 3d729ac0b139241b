"""Tunes a list of problems with one or more workers and stores each result in the tiling table at once."""

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
from cunorm.core.errors import TableError, about_file
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import choose_tile, table, table_file
from cunorm.tiling.table import MEASURED, MODEL, SIMULATED, Entry, entry_of, raw_of, shown

from .measure import simulate
from .measure.errors import CandidateError, Stopped
from .measure.precompile import MOST, Precompiler
from .measure.result import SIMULATED_TRIALS, Budget, Deadlines, Trial, TuningResult
from .measure.session import Spec, software
from .measure.simulate import Simulators
from .measure.worker import Worker
from .problem_tuner import Measuring, Modelling, ProblemTuner, Simulating
from .search.space import Space
from .search.study import ProblemStudy

WARM_STARTS = 3  # number of neighbouring problems whose tiles a study tries early
WAIT_SECONDS = 2.0  # pause between checks of problems that another process is tuning
Facts = ParamSpec("Facts")
#: By evaluator: the source of the entries that it makes.
EVIDENCE = {"measure": MEASURED, "simulate": SIMULATED, "model": MODEL}


@dataclass(frozen=True)
class Options:
    """The options of a tuning run.

    Attributes
    ----------
    device : Device
        The device that the table is for.
    evaluator : {"measure", "simulate", "model"}
    specs : tuple of Spec
        One spec per worker.
    table : Path
    storage : object
        Result of `cunorm.tuning.search.storage.storage_of`; None: in memory.
    trials : int or None
        Maximum number of tiles to try per problem; None: a number that depends on the size of the space, or
        `SIMULATED_TRIALS` if they are simulated without a limit of time.
    seconds : float or None
        Time limit per problem. After it no new work begins, and running work is finished. None: no limit.
    seed : int
    deadlines : Deadlines
    simulators : int
        Processes that simulate tiles at once, with the evaluator simulate; at least one.
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
    simulators: int = 0

    def budget(self) -> Budget:
        """The budget of a problem, whose tuning begins now."""
        few = self.evaluator == "simulate" and self.trials is None and self.seconds is None
        return Budget(SIMULATED_TRIALS if few else self.trials, self.seconds)


class Events:
    """Callbacks for the events of a run; override the methods. Worker threads call them, one call at a time."""

    def begins(self, space: Space, trials: int) -> None:
        """Tuning of a problem begins; at most `trials` tiles will be tried."""

    def tried(self, space: Space, trial: Trial) -> None:
        """A tile was tried."""

    def ends(self, result: TuningResult) -> None:
        """Tuning of a problem has ended."""

    def elsewhere(self, problem: Problem, entry: Entry | None) -> None:
        """Another process that shares the storage has tuned a problem, or is tuning it (`entry` is None)."""


def check_table(path: Path, device: Device) -> table.Table:
    """Read the table that the run will write; TableError if it is invalid or is for another device."""
    path = table_file.target(path)
    try:
        found = table.read(path) if path.exists() else table.Table(table.device_facts(device))
    except (OSError, TableError) as error:
        raise TableError(f"{about_file(error, path)}; delete it, or name another file with --table") from None
    if not table.for_device(found, device):
        name = shown(found.device.get("name"))
        raise TableError(f"{path}: a table of {name}, expected one of {device.name}; name another file")
    return found


def _warm_starts(space: Space, known: table.Table, evaluator: str) -> tuple[Tile | None, list[Tile]]:
    """The incumbent, if any, and the tiles that the table contains for the problem and the nearest ones.

    The incumbent is the table's measured tile of the problem; for the evaluator simulate, also a simulated one.
    """
    old = known.entries.get(space.problem)
    wanted = (MEASURED, SIMULATED) if evaluator == "simulate" else (MEASURED,)
    incumbent = None if old is None or old.source not in wanted else old.tile
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
            with (
                Worker(spec, self.stop.is_set) as worker,
                Precompiler(spec, self._compilers()) as ahead,
                Simulators(spec, self._simulators()) as simulators,
            ):
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
                    if not self.one(problem, worker, ahead, simulators):
                        waiting.append(problem)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()
        finally:
            over.set()

    def _compilers(self) -> int:
        """Number of processes per worker that compile ahead."""
        if self.options.evaluator != "measure":
            return 0
        return max(1, min(MOST, (settings.cores() - 1) // len(self.options.specs)))

    def _simulators(self) -> int:
        """Number of processes per worker that simulate."""
        return max(1, self.options.simulators) if self.options.evaluator == "simulate" else 0

    def _source(self, worker: Worker) -> str:
        """The source of the times of a study: times from another clock, driver, compiler or text are not compared.

        Raises
        ------
        CandidateError, Stopped
            If the worker cannot start.
        """
        if self.options.evaluator == "simulate":
            return f"{SIMULATED} {simulate.version()}"
        if self.options.evaluator == "model":
            return MODEL
        versions, measures, _ = worker.ask("facts", seconds=self.options.deadlines.open)
        text = " generic" if settings.specialise() == "never" else ""
        return f"{'measured' if measures else 'rehearsed'} {versions}{text}"

    def one(self, problem: Problem, worker: Worker, ahead: Precompiler, simulators: Simulators) -> bool:
        """Tune a problem; return False if another process is tuning it."""
        options = self.options
        space = Space.of(problem, OPS[problem.op].strategies, options.device)
        if options.evaluator == "simulate":
            if (sentence := simulate.refuses(problem)) is not None:
                self._ends(TuningResult(space, SIMULATED, sentence=sentence))
                return True
            space = space.likely()
        incumbent, warm = _warm_starts(space, check_table(options.table, options.device), options.evaluator)
        try:
            source = self._source(worker)
        except Stopped:
            return True
        except CandidateError as trouble:
            self._ends(TuningResult(space, MEASURED, sentence=f"the worker cannot start: {trouble}"))
            return True
        study = ProblemStudy(space, options.storage, ([incumbent] if incumbent else []) + warm, options.seed, source)
        budget = options.budget()
        if not study.claim():
            self._tell(self.events.elsewhere, problem, None)
            return False
        try:
            if (entry := self._done(study, space, budget)) is not None:
                self.entries.append(entry)
                self._tell(self.events.elsewhere, problem, entry)
                return True
            self._tell(self.events.begins, space, budget.wanted(space))
            result = self._tuner(space, study, worker, budget, incumbent, ahead, simulators).run()
            result.seconds = time.monotonic() - budget.began
            if result.entry is not None:
                versions = result.software or software("cpu")
                kept = table.update(options.table, options.device, versions, [result.entry])
                left = kept.entries[problem].source
                result.instead = "" if left == result.entry.source else left
                self.entries.append(result.entry)
                if not result.interrupted:
                    study.finish({"entry": raw_of(result.entry), "software": versions})
            self._ends(result)
        finally:
            study.release()
        return True

    def _tuner(
        self,
        space: Space,
        study: ProblemStudy,
        worker: Worker,
        budget: Budget,
        incumbent: Tile | None,
        ahead: Precompiler,
        simulators: Simulators,
    ) -> ProblemTuner:
        options = self.options

        def notify(trial: Trial) -> None:
            self._tell(self.events.tried, space, trial)

        common = (space, study, worker, budget, incumbent, notify, options.deadlines, ahead, options.seed)
        if options.evaluator == "simulate":
            copy, version = simulate.gpu_of(options.device).copy, simulate.version()
            return Simulating(*common, simulators=simulators, bandwidth=copy, simulator=version)
        return (Measuring if options.evaluator == "measure" else Modelling)(*common)

    def _ends(self, result: TuningResult) -> None:
        self.results.append(result)
        self._tell(self.events.ends, result)

    def _tell(self, event: Callable[Facts, None], *facts: Facts.args, **named: Facts.kwargs) -> None:
        """Call a method of `events` under the lock, so that no other thread calls one meanwhile."""
        with self._lock:
            event(*facts, **named)

    def _done(self, study: ProblemStudy, space: Space, budget: Budget) -> Entry | None:
        """The entry from the storage if its run tried at least as many tiles, else None. Adds it to the table."""
        found = study.outcome()
        if found is None or int(found["trials"]) < budget.wanted(space):
            return None
        entry = entry_of(found["entry"])
        if entry.problem != space.problem or entry.source != EVIDENCE[self.options.evaluator]:
            return None
        table.update(self.options.table, self.options.device, found.get("software", {}), [entry])
        return entry


def tune(
    problems: Iterable[Problem], options: Options, events: Events | None = None
) -> tuple[list[TuningResult], list[Entry], bool]:
    """Tune problems; each entry is stored in the table before its worker begins another problem.

    Parameters
    ----------
    problems : iterable of Problem
    options : Options
    events : Events, optional

    Returns
    -------
    results : list of TuningResult
        Results of the problems that this run tuned.
    entries : list of Entry
        Entries of these problems and of the problems that were already tuned in the same storage.
    interrupted : bool
        Whether Ctrl-C ended the run.

    Raises
    ------
    TableError, OSError
        If the table cannot be read or written.
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
    """Wait for all workers; return whether Ctrl-C was pressed.

    The first Ctrl-C sets `stop`, the second raises KeyboardInterrupt.
    """
    interrupted = False
    # Not Thread.join: after an interrupt it treats the thread as ended (bpo-45274).
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
