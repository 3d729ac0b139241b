"""A child process that measures. The parent holds no CUDA context and survives every failure of a candidate.

The child answers requests over a pipe, one at a time. In a round it sends the index of each candidate before it samples
the candidate. If the child dies or a deadline passes, the parent therefore knows which candidate caused it. After an
error that leaves the CUDA context unusable, the child exits.
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
from cunorm.runtime import specialised

from .errors import NO_COMPILER, Failed, Lost, Stopped
from .session import Session, Spec, software

POLL_SECONDS = 0.05
START_SECONDS = 120  # deadline for the child's imports and CUDA context
PR_SET_PDEATHSIG = 1
LAST_WORDS = 300  # maximum characters of a dead child's output that its error message repeats


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
    if type(error).__name__ == "UnknownInstruction":  # of the simulator, which only a simulating worker imports
        return "simulator"
    return "launch"


def _answer(session: Session, request: tuple[Any, ...], begin: Callable[[int], None]) -> Any:
    what, *arguments = request
    if what == "open":
        return session.open(*arguments)
    if what == "compile":
        return session.compile(*arguments)
    if what == "warm":
        text, code, entry = arguments
        place = executor(session.spec.kind)
        (place.build if text == "specialised" else place.compile)(code, entry)
        return None
    if what == "verify":
        return session.verify(*arguments)
    if what == "simulate":
        return session.simulate(*arguments)
    if what == "round":
        found = []
        session.keep(arguments[0])
        for index, tile in enumerate(arguments[0]):
            begin(index)
            found.append(session.sample(tile))
        return found
    if what == "facts":
        clock = session.clock
        measures = clock is not None and clock.measures and session.spec.kind == "gpu"
        return software(session.spec.kind), measures, None if clock is None else clock.bandwidth()
    raise ValueError(f"request: {what!r}")


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes the pipe."""
    specialised.MOST_KERNELS = sys.maxsize  # a tuner loads more kernels than an application does
    spec: Spec = connection.recv()
    session = Session(spec)
    connection.send(("ready", None))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return

        def begin(index: int) -> None:
            connection.send(("begin", index))

        try:
            connection.send(("done", _answer(session, request, begin)))
        except Exception as error:  # kernels and drivers raise errors of many types
            if not session.sound():
                connection.send(("sticky", f"{type(error).__name__}: {error}"))
                os._exit(1)  # skip clean-up, which would use the broken context
            connection.send(("failed", (_kind(error), f"{type(error).__name__}: {error}")))


def main() -> None:
    """Run the child process."""
    if sys.platform == "linux":  # so that a hung kernel does not outlive the parent
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        serve(Connection(int(sys.argv[1])))


# ---- the parent's side ----------------------------------------------------------------------------------------------


class Worker:
    """A child process that measures; it is restarted after it was lost.

    Parameters
    ----------
    spec : Spec
    stopped : callable, optional
        Called while the parent waits for an answer; True stops the wait.
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
        """Whether there is a process. If there is none, the next request starts one."""
        return self._process is not None

    def _start(self) -> None:
        ours, theirs = Pipe()
        environment = dict(os.environ)
        # The child can import the same modules as this process.
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        if self.spec.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.spec.visible
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        # Not -m, which would look for modules in the current folder first.
        start = "import sys; sys.path[0] or sys.path.pop(0); from cunorm.tuning.measure.worker import main; main()"
        command = [sys.executable, "-c", start, str(theirs.fileno())]
        # In its own session, the child does not receive Ctrl-C, and its whole process group can be killed.
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
            If the candidate cannot run. The worker still works.
        Lost
            If the worker died, or was killed after `seconds`. The next request starts another process.
        Stopped
            If `stopped` returned True. The worker was killed.
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
        """End the child and return the exception to raise."""
        assert self._process is not None
        process, words = self._process, self._words
        self.close(keep_words=True)
        code = process.returncode
        if not sentence:
            name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            sentence = f"the candidate's process ended: {name}"
        words.seek(0)
        last = words.read().decode(errors="replace").strip()[-LAST_WORDS:]
        words.close()
        return Lost(kind, f"{sentence}; {last}" if last else sentence, index)

    def close(self, keep_words: bool = False) -> None:
        """End the child, even if it is busy."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # an idle child exits by itself; a dead one returns its exit code
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not keep_words:
            self._words.close()

    def open(self, problem: Problem, seconds: float) -> None:
        """Send the problem of the following requests."""
        self.ask("open", problem, seconds=seconds)
