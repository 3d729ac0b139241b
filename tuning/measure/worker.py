"""A process that measures: the parent holds no CUDA context, and outlives whatever a candidate does to its process.

The child answers requests over a pipe, one at a time. Before it touches a candidate it says which, so that the parent
knows the culprit when the child dies or a deadline passes. An error that leaves a CUDA context unusable ends the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from cunorm.core.errors import CompileError, KernelFault, NoCompilerError, UnsupportedTile
from cunorm.core.problem import Problem
from cunorm.executors.choose import executor

from .errors import NO_COMPILER, Failed, Lost, Stopped
from .session import Session, Spec, software

POLL_SECONDS = 0.05
START_SECONDS = 120  # for imports and a CUDA context
PR_SET_PDEATHSIG = 1
LAST_WORDS = 300  # characters of what a dying child wrote to stderr


# ---- the child ------------------------------------------------------------------------------------------------------


def _kind(error: Exception) -> str:
    if isinstance(error, NoCompilerError):
        return NO_COMPILER
    if isinstance(error, (CompileError, UnsupportedTile)):
        return "compile"
    if isinstance(error, KernelFault):
        return "fault"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return "memory"
    return "launch"


def _answer(stand: Session, request: tuple[Any, ...], begin: Callable[[int], None]) -> Any:
    what, *arguments = request
    if what == "open":
        return stand.open(*arguments)
    if what == "compile":
        return stand.compile(*arguments)
    if what == "warm":
        executor(stand.spec.kind).compile(*arguments)
        return None
    if what == "verify":
        return stand.verify(*arguments)
    if what == "round":
        found = []
        stand.keep(arguments[0])
        for index, tile in enumerate(arguments[0]):
            begin(index)
            found.append(stand.sample(tile))
        return found
    if what == "facts":
        clock = stand.clock
        measures = clock is not None and clock.measures and stand.spec.kind == "gpu"
        return software(stand.spec.kind), measures, None if clock is None else clock.bandwidth()
    raise ValueError(f"request: {what!r}")


def serve(connection: Connection) -> None:
    """Answer requests until the parent hangs up."""
    spec: Spec = connection.recv()
    stand = Session(spec)
    connection.send(("ready", None))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return

        def begin(index: int) -> None:
            connection.send(("begin", index))

        try:
            connection.send(("done", _answer(stand, request, begin)))
        except Exception as error:  # whatever a kernel or a driver comes up with
            if not stand.sound():
                connection.send(("sticky", f"{type(error).__name__}: {error}"))
                os._exit(1)  # nothing of this context can be cleaned up
            connection.send(("failed", (_kind(error), f"{type(error).__name__}: {error}")))


def main() -> None:
    """The child's."""
    if sys.platform == "linux":  # so that a hung kernel does not outlive the parent
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        serve(Connection(int(sys.argv[1])))


# ---- the parent's side ----------------------------------------------------------------------------------------------


class Worker:
    """A child process that measures; started again after it was lost.

    Parameters
    ----------
    spec : Spec
    stopped : callable, optional
        Asked while waiting: whether to give up.
    """

    def __init__(self, spec: Spec, stopped: Callable[[], bool] = lambda: False) -> None:
        self.spec, self.stopped = spec, stopped
        self.spawned = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._words: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether there is a process; the next request starts one if not."""
        return self._process is not None

    def _start(self) -> None:
        ours, theirs = Pipe()
        environment = dict(os.environ)
        # What this process can import, the child can.
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        if self.spec.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.spec.visible
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        # Not -m, which would look for modules in the current folder first.
        start = "import sys; sys.path[0] or sys.path.pop(0); from cunorm.tuning.measure.worker import main; main()"
        command = [sys.executable, "-c", start, str(theirs.fileno())]
        # A session of its own: Ctrl-C is the parent's to handle, and the whole group can be killed.
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
        )
        theirs.close()
        self._pipe = ours
        self.spawned += 1
        ours.send(self.spec)
        self._wait(START_SECONDS)

    def ask(self, *request: Any, seconds: float) -> Any:
        """Send a request and wait for its answer.

        Raises
        ------
        Failed
            If the candidate cannot run, which the worker has survived.
        Lost
            If the worker died, or the time was over and it was killed. The next request starts another.
        Stopped
            If it was stopped meanwhile; the worker was killed.
        """
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(request)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost("crash", None) from None
        return self._wait(seconds)

    def _wait(self, seconds: float) -> Any:
        assert self._pipe is not None
        deadline, index = time.monotonic() + seconds, None
        while True:
            try:
                if not self._pipe.poll(POLL_SECONDS):
                    if self.stopped():
                        self.close()
                        raise Stopped
                    if time.monotonic() > deadline:
                        raise self._lost("hang", index, f"no answer within {seconds:.0f} s")
                    continue
                what, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                raise self._lost("crash", index) from None
            if what == "begin":
                index = value
                deadline = max(deadline, time.monotonic() + seconds)
            elif what == "failed":
                kind, sentence = value
                raise Failed(kind, sentence, index)
            elif what == "sticky":
                raise self._lost("crash", index, value)
            else:
                return value

    def _lost(self, kind: str, index: int | None, sentence: str = "") -> Lost:
        """Bury the child; what to raise."""
        assert self._process is not None
        process, words = self._process, self._words
        self.close(keep_words=True)
        code = process.returncode
        if not sentence:
            name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            sentence = f"the process of the candidate ended: {name}"
        words.seek(0)
        last = words.read().decode(errors="replace").strip()[-LAST_WORDS:]
        words.close()
        return Lost(kind, f"{sentence}; {last}" if last else sentence, index)

    def close(self, keep_words: bool = False) -> None:
        """End the child, whatever it is doing."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # an idle child ends by itself; a dead one says how
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not keep_words:
            self._words.close()

    def open(self, problem: Problem, seconds: float) -> None:
        """Make this the worker's problem."""
        self.ask("open", problem, seconds=seconds)
