"""``cunorm tune``: derives problems, device and workers from the arguments, and prints the results."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cunorm.core import cache_folder, settings
from cunorm.core.devices import Device, known
from cunorm.core.errors import CompileError, TableError, TraceError, about_file
from cunorm.core.files import file_to_write
from cunorm.executors.choose import executor
from cunorm.ops.registry import gpu_present
from cunorm.tiling import choose_tile, table_file
from cunorm.tiling.table import MEASURED, SIMULATED, WORDS, Entry

from .measure import simulate
from .measure.clock import GraphClock
from .measure.result import TuningResult
from .measure.session import Spec
from .measure.simulate import NoSimulatorError
from .problems.requested import check_source, problems_of, stale_problems
from .progress import Progress
from .search.storage import StorageError, journal, storage_of, without_secrets
from .tuner import EVIDENCE, Options, check_table, tune

MOST_WORKERS = 256  # each worker is a process
OK, UNTUNED, USAGE, NO_EVALUATOR, INTERRUPTED = 0, 1, 2, 3, 130
#: The folder of the journals of runs without --storage; None: a folder in the cache folder.
STUDIES: Path | None = None


class NoGpuError(Exception):
    """The option --evaluator measure was passed, but there is no GPU."""


# ---- arguments ------------------------------------------------------------------------------------------------------


def _visible(ordinal: int) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` for a process that may use only this GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(ordinal) if not named else named.split(",")[ordinal].strip()


def _limits(ordinal: int) -> Device:
    """The properties of a GPU, read in another process, so that this one has no CUDA context that occupies memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_limits_here, ordinal).result()


def _limits_here(ordinal: int) -> Device:
    found: Device = executor("gpu").limits(ordinal)
    return found


def _simulated(named: Device | None, present: Device | None) -> Device:
    """The device to simulate.

    Raises
    ------
    NoSimulatorError, ValueError
        If the simulator or a tool is missing, or cannot simulate the device.
    """
    try:
        simulate.check()
    except NoSimulatorError as error:
        raise NoSimulatorError(f"--evaluator simulate: {error}") from None
    return simulate.gpu_of(named or present or executor("cpu").limits()).device


def _specs(asked: argparse.Namespace, workers: int) -> tuple[str, Device, tuple[Spec, ...]]:
    """Evaluator, device and workers."""
    named = None if asked.device is None else known(asked.device, "--device")
    present = _limits(executor("gpu").current()) if gpu_present() else None
    evaluator = asked.evaluator
    if evaluator == "auto":
        here = present is not None and (named is None or named.name == present.name)
        evaluator = "measure" if here else "model"
    if evaluator == "model":
        device = named or present or executor("cpu").limits()
        return "model", device, (Spec("cpu", device),) * workers
    if evaluator == "simulate":
        device = _simulated(named, present)
        return "simulate", device, (Spec("cpu", device),)
    if present is None:
        raise NoGpuError("--evaluator measure: CuPy sees no GPU here; see `cunorm doctor`, or use --evaluator model")
    if named is not None and named.name != present.name:
        raise ValueError(f"--device: {named.name}, but the GPU here is {present.name}; use --evaluator model")
    count = executor("gpu").count()
    if workers > count:
        raise ValueError(f"--workers: {workers}, expected at most {count}, one per GPU")
    clock = f"{GraphClock.__module__}:{GraphClock.__name__}"
    first = executor("gpu").current()
    ordinals = [first, *(other for other in range(count) if other != first)][:workers]
    for ordinal in ordinals:
        if (other := _limits(ordinal)) != present:
            raise ValueError(f"--workers: GPU {ordinal} is {other.name}, not {present.name}; a table is for one device")
    return "measure", present, tuple(Spec("gpu", present, clock, _visible(ordinal)) for ordinal in ordinals)


def _options(asked: argparse.Namespace) -> Options:
    workers = asked.workers
    if workers is None:
        workers = min(settings.cores(), MOST_WORKERS) if asked.evaluator == "simulate" else 1
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"--workers: {workers}, expected 1 to {MOST_WORKERS}")
    if asked.seconds == 0:
        raise ValueError("--seconds: 0, expected more than 0")
    for name, least in (("trials", 1), ("seconds", 0), ("seed", 0)):
        value = getattr(asked, name)
        if value is not None and not least <= value < 2**32:
            raise ValueError(f"--{name}: {value:g}, expected at least {least}, and less than 2^32")
    settings.specialise()  # a wrong value is an error before anything is tuned
    evaluator, device, specs = _specs(asked, workers)
    path = Path(asked.table) if asked.table else settings.tiling_table() or choose_tile.user_table(device)
    if path.is_dir():
        raise ValueError(f"--table: {path} is a folder, expected a file")
    if asked.table and not path.parent.is_dir():
        raise ValueError(f"--table: {path}: no folder {path.parent}")
    _check_table(asked, path, device)
    url = asked.storage
    if url is None:
        try:
            url = str(journal(STUDIES or cache_folder.folder("studies"), path, asked.resume))
        except OSError as error:
            print(f"cunorm tune: cannot use a journal, --resume cannot continue this run: {error}", file=sys.stderr)
    elif asked.table and Path(url.removeprefix("journal:")).resolve() == path.resolve():
        raise ValueError(f"--storage: {url!r} is also the table of --table; name another file")
    storage = storage_of(url, resumed=asked.resume and asked.storage is None)
    simulators = workers if evaluator == "simulate" else 0
    return Options(
        device, evaluator, specs, path, storage, asked.trials, asked.seconds, asked.seed, simulators=simulators
    )


def _check_table(asked: argparse.Namespace, path: Path, device: Device) -> None:
    """Check that the run can read and write its table (TableError)."""
    option = "--table: " if asked.table else ""
    try:
        check_table(path, device)
        table_file.check_writable(table_file.target(path))
    except (OSError, TableError) as error:
        raise TableError(f"{option}{about_file(error, path)}") from None


# ---- results --------------------------------------------------------------------------------------------------------


def _document(result: TuningResult) -> dict[str, Any]:
    default = result.timings.get(result.space.default)
    chosen = None if result.winner is None else result.timings.get(result.winner)
    return {
        "problem": asdict(result.space.problem),
        "source": result.source,
        "strategy": None if result.winner is None else result.winner.strategy,
        "tile": None if result.winner is None else result.winner.as_dict(),
        "time_us": None if chosen is None else chosen.seconds * 1e6,
        "default_us": None if default is None else default.seconds * 1e6,
        "entry": None if result.entry is None else {"source": result.entry.source, **result.entry.facts},
        "stored": result.entry is not None and result.kept,
        "space": len(result.space),
        "trials": [
            {
                "strategy": trial.tile.strategy,
                "tile": trial.tile.as_dict(),
                "seconds": trial.seconds,
                "failure": trial.failure,
                "sentence": trial.sentence,
            }
            for trial in result.trials
        ],
        "sentence": result.sentence,
        "interrupted": result.interrupted,
        "seconds": result.seconds,
    }


def _failed(results: list[TuningResult]) -> Iterator[str]:
    for result in results:
        name = result.space.problem.describe()
        if result.winner is None and not result.interrupted:
            yield f"{name}: {result.sentence}"
        for trial in result.failures:
            if trial.failure in ("wrong", "fault"):
                yield f"{name}: {trial.tile!r} is wrong: {trial.sentence}; please report this"


def run(asked: argparse.Namespace) -> int:
    """Run the command with its parsed arguments; return the exit code."""
    try:
        check_source(asked)
        listed = [] if asked.stale else problems_of(asked)
        report = _report_folder(asked)
        options = _options(asked)
        source = EVIDENCE[options.evaluator]
        todo, left = stale_problems(asked, options.device, source) if asked.stale else (listed, 0)
    except (NoGpuError, NoSimulatorError) as error:
        print(f"cunorm tune: {error}", file=sys.stderr)
        return NO_EVALUATOR
    except (CompileError, OSError, TableError, TraceError, TypeError, ValueError) as error:
        print(f"cunorm tune: {error}", file=sys.stderr)
        return USAGE
    if left:
        said = f"stale entries with better evidence than a new one ({WORDS[source]}), left as they are: {left}"
        print(f"cunorm tune: {said}", file=sys.stderr)
    if not todo and not asked.json:
        print(f"nothing to tune: no {'other ' if left else ''}entry is stale in {asked.table or 'the tables'}")
        return OK
    progress = Progress(options, len(todo), quiet=asked.json)
    try:
        results, entries, interrupted = tune(todo, options, progress)
    except BrokenPipeError:
        raise  # the reader of stdout has closed the pipe; it is no error of the table, and the program handles it
    except (OSError, TableError) as error:
        print(f"cunorm tune: {about_file(error)}", file=sys.stderr)
        return USAGE
    except StorageError as error:
        said = without_secrets(str(error).partition("\n")[0], asked.storage or "")
        print(f"cunorm tune: the study storage failed: {said}", file=sys.stderr)
        return UNTUNED
    finally:
        progress.close()
    failed = list(_failed(results))
    if asked.json:
        print(json.dumps(_summary(options, results, entries, interrupted, failed), indent=1))
    else:
        progress.summary(results, entries, interrupted)
    for sentence in failed:
        print(f"cunorm tune: {sentence}", file=sys.stderr)
    if report is not None and not _reported(results, report, options, quiet=asked.json):
        return UNTUNED
    return INTERRUPTED if interrupted else UNTUNED if failed else OK


def _reported(results: list[TuningResult], folder: Path, options: Options, *, quiet: bool) -> bool:
    """Whether the report could be written. The table is complete without it."""
    from .report.page import write

    try:
        page = write(results, folder, title=f"cunorm tune on {options.device.name}")
    except OSError as error:
        print(f"cunorm tune: --report: {about_file(error)}; the table is complete", file=sys.stderr)
        return False
    if not quiet:
        print(f"report     {page}")
    return True


def _report_folder(asked: argparse.Namespace) -> Path | None:
    if asked.report is None:
        return None
    folder = Path(asked.report)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fail now, not after an hour of tuning
    except OSError as error:
        raise ValueError(f"--report: {about_file(error, folder)}, expected a folder") from None
    from .report.page import GENERATOR, PAGE  # imported late: it needs matplotlib

    file_to_write("--report", str(folder / PAGE), ours=lambda text: GENERATOR in text)
    return folder


def _summary(
    options: Options, results: list[TuningResult], entries: list[Entry], interrupted: bool, failed: list[str]
) -> dict[str, Any]:
    return {
        "schema": "cunorm-tune/1",
        "table": str(options.table),
        "device": options.device.name,
        "evaluator": options.evaluator,
        "measured": sum(one.source == MEASURED for one in entries),
        "simulated": sum(one.source == SIMULATED for one in entries),
        "results": [_document(result) for result in results],
        "interrupted": interrupted,
        "failed": failed,
    }
