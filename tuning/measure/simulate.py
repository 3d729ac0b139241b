"""The simulator as an evaluator: finds it in the checkout, checks its tools, and runs it in processes.

The simulator is not part of an installed package. It is imported only for ``--evaluator simulate``.
"""

from __future__ import annotations

import hashlib
import importlib
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cunorm
from cunorm.core.devices import Device
from cunorm.core.errors import CompileError
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.jit import cxx
from cunorm.jit.sources import Text

from .errors import CandidateError, Stopped
from .session import Spec
from .worker import Worker

if TYPE_CHECKING:
    from benchmarks.simulator.clock import Gpu

#: The text of the kernels that is simulated: the one that a GPU runs after a few calls.
TEXT: Text = "specialised"
INSTALL = "pip install -e '.[dev,cuda13]'"


class NoSimulatorError(Exception):
    """The simulator or one of its tools is missing; the text says what to install."""


def _checkout() -> Path:
    return Path(cunorm.__file__).resolve().parents[1]


def _module(name: str) -> Any:
    """A module of the simulator in the checkout of this package."""
    root = _checkout()
    folder = root / "benchmarks" / "simulator"
    if not folder.is_dir():
        raise NoSimulatorError(
            f"the simulator is not part of an installed package, and {root} is no checkout; "
            f"clone the repository, and in it type: {INSTALL}"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        found = importlib.import_module(f"benchmarks.simulator.{name}")
    except ImportError as error:
        raise NoSimulatorError(f"the simulator cannot be imported: {error}; in {root}, type: {INSTALL}") from None
    if Path(str(found.__file__)).resolve().parent != folder:
        raise NoSimulatorError(f"the simulator of {root} is hidden by {found.__file__}; run in another folder")
    return found


def check() -> None:
    """Check that the simulator and its tools are there: NVRTC, nvdisasm and a C++ compiler.

    Raises
    ------
    NoSimulatorError
        If one is missing.
    """
    cubin = _module("cubin")
    try:
        cubin.nvdisasm()
        cubin.compiler()
        cxx.chosen()
    except CompileError as error:
        raise NoSimulatorError(str(error)) from None


def gpu_of(device: Device) -> Gpu:
    """The simulated GPU of a device.

    Raises
    ------
    ValueError
        If the simulator has no such GPU.
    """
    gpus: dict[str, Gpu] = _module("clock").GPUS
    for gpu in gpus.values():
        if (gpu.device.name, gpu.device.multiprocessors) == (device.name, device.multiprocessors):
            return gpu
    raise ValueError(f"--device: {device.name} cannot be simulated, expected {' or '.join(gpus)}")


def refuses(problem: Problem) -> str | None:
    """The error message for a problem that is too large to be simulated, or None."""
    sentence: str | None = _module("problems").refuses(problem)
    return sentence


def version() -> str:
    """The simulator's files and its compiler, in words. Times of different versions must not be compared."""
    cubin = _module("cubin")
    folder = Path(cubin.__file__).parent
    files = sorted([*folder.glob("*.py"), *(folder / "engine").iterdir()])
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files if file.is_file())).hexdigest()[:12]
    return f"{digest} with NVRTC {cubin.compiler().version}"


def seconds_of(problem: Problem, tile: Tile, device: Device) -> float:
    """The simulated time of a tile, in seconds. Takes seconds or minutes.

    Raises
    ------
    CompileError, KernelFault, UnsupportedTile, ValueError
        See `benchmarks.simulator.problems.simulate`.
    """
    return float(_module("problems").simulate(problem, gpu_of(device), tile, text=TEXT).seconds)


ATTEMPTS = 2  # processes in which a candidate runs: the system may kill one that lacks memory


class Simulators:
    """Processes that simulate candidates.

    Parameters
    ----------
    spec : Spec
    processes : int
        Number of processes. Each is started by its first candidate.
    """

    def __init__(self, spec: Spec, processes: int) -> None:
        self.processes = processes
        self._spec, self._over = spec, threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Problem, Tile, float] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Tile, float | Exception]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(processes)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Simulators:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, problem: Problem, tile: Tile, seconds: float) -> None:
        """Queue a candidate; `seconds` is the deadline of its simulation."""
        self._jobs.put((problem, tile, seconds))

    def next(self, stopped: Callable[[], bool] = lambda: False) -> tuple[Tile, float | CandidateError]:
        """Wait for the next result: a tile, and its simulated time in seconds or its error.

        Raises
        ------
        Stopped
            If `stopped` returned True.
        """
        while True:
            try:
                tile, found = self._done.get(timeout=0.05)
            except queue.Empty:
                if stopped():
                    raise Stopped from None
                continue
            if isinstance(found, Exception) and not isinstance(found, CandidateError):
                raise found
            return tile, found

    def _work(self) -> None:
        with Worker(self._spec, self._over.is_set) as worker:
            while (job := self._jobs.get()) is not None and not self._over.is_set():
                problem, tile, seconds = job
                try:
                    self._done.put((tile, self._simulated(worker, problem, tile, seconds)))
                except Stopped:
                    return
                except Exception as error:  # `next` raises it in the thread that waits
                    self._done.put((tile, error))

    def _simulated(self, worker: Worker, problem: Problem, tile: Tile, seconds: float) -> float | CandidateError:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return float(worker.ask("simulate", problem, tile, seconds=seconds))
            except CandidateError as trouble:
                if trouble.kind != "crash" or attempt == ATTEMPTS:
                    return trouble
        raise AssertionError("every attempt returns")

    def close(self) -> None:
        """End the processes, even if they are busy."""
        self._over.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
