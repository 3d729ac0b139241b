"""Takes down the problems that an application runs, for ``cunorm tune --from-trace``: `trace`, ``CUNORM_TRACE``.

A trace is a file of lines, each the key of a problem as tiling tables write it, and how often it ran::

    {"op": "group_norm", "dtype": "float32", "layout": "NCHW", "outputs": "y,mean,rstd", "N": 2, ..., "calls": 17}

A problem's first call is written at once, so that a killed process leaves what it ran; the others are added up, and
written at the end. Several processes may write to one file: the counts of a problem's lines are added by the reader.
A forked child counts its own calls alone, from nought.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cunorm.core import settings
from cunorm.core.errors import TraceError
from cunorm.core.problem import Problem

from .table import key_of, problem_of, shown

#: Of a number in a trace: the largest size has 19.
MOST_DIGITS = 20


class _Trace:
    """A file that takes problems down."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # whoever goes to another folder later still writes to this file
        self.renew()
        self._append([])  # so that a path that cannot be written is an error here, and not in some call
        self._close_in_workers()

    def renew(self) -> None:
        """Begin at nought, with a lock that nobody holds."""
        self._lock = threading.RLock()  # a signal handler may make a call while this thread records one
        self._calls: Counter[Problem] = Counter()
        self._seen: set[Problem] = set()

    def _append(self, lines: list[str]) -> None:
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "no regular file")
        # To open a pipe waits for its reader, unless told not to: one may have taken the file's place.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        handle = os.open(self.path, flags, 0o644)
        try:
            # One write to the end of the file: lines of several processes do not mix.
            os.write(handle, "".join(f"{line}\n" for line in lines).encode())
        finally:
            os.close(handle)

    def _close_in_workers(self) -> None:
        """Have workers of ``multiprocessing`` close the trace: they end without the parent's exit handlers."""
        from multiprocessing import util  # here, for few processes trace

        def at_exit(trace: _Trace) -> None:
            if trace in _traces:
                util.Finalize(None, trace.close, exitpriority=0)

        util.register_after_fork(self, at_exit)

    def record(self, problem: Problem) -> None:
        with self._lock:
            if problem in self._seen:
                self._calls[problem] += 1
                return
            self._seen.add(problem)
            self._try([_line(problem, 1)])

    def close(self) -> None:
        """Write what was counted; a second time there is nothing left to write."""
        with self._lock:
            if self._calls:
                self._try([_line(problem, calls) for problem, calls in self._calls.items()])
                self._calls.clear()

    def _try(self, lines: list[str]) -> None:
        """Append, or say why not: a call must not fail for its trace."""
        try:
            self._append(lines)
        except OSError as error:
            warnings.warn(f"trace: {self.path}: {error.strerror or error}", RuntimeWarning, stacklevel=2)


def _line(problem: Problem, calls: int) -> str:
    return json.dumps(key_of(problem) | {"calls": calls})


_traces: list[_Trace] = []
#: What to call when a trace begins: calls that are remembered would not be seen.
on_begin: list[Callable[[], None]] = []


def _renew_all() -> None:
    """In a forked child: the parent writes what was counted, and no thread is left to let go of a lock."""
    for one in tuple(_traces):
        one.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


def active() -> bool:
    """Whether calls are to be recorded."""
    return bool(_traces)


def record(problem: Problem) -> None:
    """Take a call down in every trace."""
    for one in tuple(_traces):
        one.record(problem)


def _begin(path: Path) -> _Trace:
    made = _Trace(path)
    _traces.append(made)
    for forget in on_begin:
        forget()
    return made


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Take down the problems that run inside, in all threads; calls are checked anew each time, so they are slower.

    Parameters
    ----------
    path : str or path
        A file, which is made, or added to. Hand it to ``cunorm tune --from-trace``.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    made = _begin(Path(path))
    try:
        yield
    finally:
        _traces.remove(made)
        made.close()


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, expected at most {MOST_DIGITS}")
    return int(digits)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(name)} is there more than once")
    return found


def _counted(line: str) -> tuple[Problem, int]:
    """The problem of a line and its calls; ValueError says what is wrong with it."""
    raw = json.loads(line, parse_int=_whole, object_pairs_hook=_fields)
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, expected an object")
    calls = raw.get("calls")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"calls is {shown(calls, 40)}, expected a whole number from 1 up")
    return problem_of(raw), calls


def read(
    path: str | os.PathLike[str], fault: Callable[[Problem], str | None] = lambda problem: None
) -> dict[Problem, int]:
    """The problems of a trace, the most frequent first, with how often each ran.

    Parameters
    ----------
    path : str or path
    fault : callable, optional
        Says of a problem what no call could have; None where nothing is wrong.

    Raises
    ------
    OSError
        If the file cannot be read.
    TraceError
        If a line is none of a trace; a last line that was cut short is passed over.
    """
    found: Counter[Problem] = Counter()
    if Path(path).exists() and not Path(path).is_file():
        raise TraceError(f"{path}: no regular file")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem, calls = _counted(line)
            if (sentence := fault(problem)) is not None:
                raise ValueError(sentence)
        except (RecursionError, ValueError) as error:
            cut = number == len(lines) and not text.endswith("\n")
            if cut and isinstance(error, json.JSONDecodeError):
                break
            raise TraceError(f"{path}: line {number}: {error}") from None
        found[problem] += calls
    return dict(found.most_common())


def _from_environment() -> None:
    """Begin the trace that ``CUNORM_TRACE`` names, which ends with the process."""
    path = settings.trace()
    if path is None:
        return
    try:
        atexit.register(_begin(path).close)
    except OSError as error:
        sentence = f"CUNORM_TRACE: {path}: {error.strerror or error}; nothing is traced"
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


_from_environment()
