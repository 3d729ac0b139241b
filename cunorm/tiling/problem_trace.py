"""Records the problems that an application runs, for ``cunorm tune --from-trace``: `trace`, ``CUNORM_TRACE``.

A trace is a text file. Each line contains the key of a problem, as in a tiling table, and its number of calls::

    {"op": "group_norm", "dtype": "float32", "layout": "NCHW", "outputs": "y,mean,rstd", "N": 2, ..., "calls": 17}

The first call of a problem is written at once, so that the trace of a killed process contains its problems. Later calls
are counted, and the counts are written at the end. Several processes may write to one file: the reader adds the counts
of all lines of a problem. A forked child counts only its own calls, from 0.
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
from cunorm.core.arrays import said
from cunorm.core.errors import TraceError
from cunorm.core.problem import Problem

from .table import key_of, problem_of, quoted, shown

#: Maximum number of digits of a number in a trace; the largest size has 19.
MOST_DIGITS = 20
NO_TRACE = "the file has other contents than a trace"
#: How the line of a problem begins.
_BEGINNING = b'{"op": '
#: More bytes than a line has.
_LONGEST_LINE = 1 << 16


class _Trace:
    """A file in which problems are recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # valid after a later change of the working directory
        self.renew()
        _append(self.path, [])  # a path that cannot be written raises here, not in a call
        _check_trace(self.path)
        self._close_in_workers()

    def renew(self) -> None:
        """Reset the counts, and create a new lock."""
        self._lock = threading.RLock()  # a signal handler may make a call while this thread records one
        self._calls: Counter[Problem] = Counter()
        self._seen: set[Problem] = set()

    def _close_in_workers(self) -> None:
        """Make ``multiprocessing`` workers close the trace at their end: they do not run the parent's exit handlers."""
        from multiprocessing import util  # imported here, because few processes trace

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
        """Write the counted calls. A second call writes nothing."""
        with self._lock:
            if self._calls:
                self._try([_line(problem, calls) for problem, calls in self._calls.items()])
                self._calls.clear()

    def _try(self, lines: list[str]) -> None:
        """Append lines, or warn: a call must not fail because of its trace."""
        try:
            _append(self.path, lines)
        except OSError as error:
            warnings.warn(
                f"trace: {self.path}: {error.strerror or error}; calls are missing from the trace",
                RuntimeWarning,
                stacklevel=2,
            )


def _append(path: Path, lines: list[str]) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # O_NONBLOCK: a pipe may have replaced the file, and opening a pipe would wait for its reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    handle = os.open(path, flags, 0o644)
    try:
        # A single write in append mode: the lines of several processes do not mix.
        text = "".join(f"{line}\n" for line in lines).encode()
        written = os.write(handle, text)
        if written < len(text):  # a line without an end would make the next one unreadable
            with contextlib.suppress(OSError):
                end = os.lseek(handle, 0, os.SEEK_CUR)
                if os.fstat(handle).st_size == end:  # otherwise another process has appended since
                    os.ftruncate(handle, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def _check_trace(path: Path) -> None:
    """Check that a file is empty or a trace (TraceError), and end its last line: a killed process may have cut it.

    Only the beginnings of lines are compared: a process that imports cunorm begins its trace before there are ops.
    Another process may write to the trace at the same time, but it writes whole lines.
    """
    with path.open("rb+") as file:
        first = next((line for line in file if line.strip()), b"")
        if first and not first.startswith(_BEGINNING):
            raise TraceError(f"{path}: {NO_TRACE}; name another file")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST_LINE))
        last = file.read().rpartition(b"\n")[2]
        if not last.startswith(_BEGINNING):
            return
        try:
            json.loads(last)
        except ValueError:
            file.truncate(size - len(last))
        else:
            file.write(b"\n")


def _line(problem: Problem, calls: int) -> str:
    return json.dumps(key_of(problem) | {"calls": calls})


_traces: list[_Trace] = []
#: Functions to call when a trace begins. They clear the caches of checked calls: cached calls are not recorded.
on_begin: list[Callable[[], None]] = []


def _renew_all() -> None:
    """Reset the traces in a forked child: the parent writes the counts, and its threads may hold the locks."""
    for one in tuple(_traces):
        one.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


def active() -> bool:
    """Whether calls are recorded."""
    return bool(_traces)


def record(problem: Problem) -> None:
    """Record a call in all traces."""
    for one in tuple(_traces):
        one.record(problem)


def _begin(path: Path) -> _Trace:
    made = _Trace(path)
    _traces.append(made)
    for forget in on_begin:
        forget()
    return made


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A context in which no thread's calls are recorded: for calls of cunorm's own commands."""
    kept = tuple(_traces)
    _traces.clear()
    try:
        yield
    finally:
        _traces.extend(kept)
        if kept:
            for forget in on_begin:  # the calls inside were cached
                forget()


class Recording(contextlib.ContextDecorator):
    """What `trace` returns: a context, which may be entered again, and a decorator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: list[_Trace] = []

    def __enter__(self) -> None:
        self._running.append(_begin(self._path))

    def __exit__(self, *error: object) -> None:
        ended = self._running.pop()
        _traces.remove(ended)
        ended.close()


def trace(path: str | os.PathLike[str]) -> Recording:
    """Record the problems that run inside, in all threads. Calls are slower, because each is checked anew.

    Parameters
    ----------
    path : str or path
        A file, which is created or appended to. Pass it to ``cunorm tune --from-trace``.

    Returns
    -------
    context manager
        It may be entered several times, and be a decorator.

    Raises
    ------
    TypeError
        If the path is neither a string nor a path.
    OSError
        On entering it, if the file cannot be written.
    TraceError
        On entering it, if the file has other contents than a trace.

    Examples
    --------
    >>> import pathlib
    >>> import tempfile
    >>> import numpy as np
    >>> import cunorm
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.trace"
    >>> with cunorm.trace(path):
    ...     results = cunorm.layer_norm(np.ones((2, 4), np.float32), 4)
    >>> path.read_text().count('"op": "layer_norm"')
    1
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: {said(path)}, expected a str or a path")
    return Recording(Path(path))


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, expected at most {MOST_DIGITS}")
    return int(digits)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(name)} occurs more than once")
    return found


def _counted(line: str) -> tuple[Problem, int]:
    """The problem of a line and its number of calls (ValueError if the line is wrong)."""
    raw = json.loads(line, parse_int=_whole, object_pairs_hook=_fields)
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, expected an object")
    calls = raw.get("calls")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"calls is {quoted(calls, 40)}, expected a whole number from 1 up")
    return problem_of(raw), calls


def read(
    path: str | os.PathLike[str], fault: Callable[[Problem], str | None] = lambda problem: None
) -> dict[Problem, int]:
    """The problems of a trace and their numbers of calls, the most frequent first.

    Parameters
    ----------
    path : str or path
    fault : callable, optional
        Problem -> error message if no call can have this problem, else None.

    Raises
    ------
    OSError
        If the file cannot be read.
    TraceError
        If the file is not regular, or a line is wrong. An incomplete last line is skipped.
    """
    found: Counter[Problem] = Counter()
    if Path(path).exists() and not Path(path).is_file():
        raise TraceError(f"{path}: not a regular file")
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
            cut = number == len(lines) and not text.endswith("\n") and line.startswith("{")
            if cut and isinstance(error, json.JSONDecodeError):
                break
            wrong = str(error)
            if isinstance(error, json.JSONDecodeError):
                where = f"{error.msg}, column {error.colno}"
                wrong = f"not JSON ({where}), expected a line that CUNORM_TRACE or cunorm.trace() wrote"
            raise TraceError(f"{path}: line {number}: {wrong}") from None
        found[problem] += calls
    return dict(found.most_common())


def _untraced(path: Path, error: OSError | TraceError) -> str:
    why = error.strerror or error if isinstance(error, OSError) else NO_TRACE
    return f"CUNORM_TRACE: {path}: {why}; nothing is traced; name another file"


def environment_fault() -> str | None:
    """Why the file that ``CUNORM_TRACE`` names cannot be written; None if it can, or the variable is not set."""
    if (path := settings.trace()) is None:
        return None
    try:
        _append(path.absolute(), [])
        _check_trace(path.absolute())
    except (OSError, TraceError) as error:
        return _untraced(path, error)
    return None


def _from_environment() -> None:
    """Begin the trace that ``CUNORM_TRACE`` names. It ends with the process."""
    path = settings.trace()
    if path is None:
        return
    try:
        atexit.register(_begin(path).close)
    except (OSError, TraceError) as error:
        warnings.warn(_untraced(path, error), RuntimeWarning, stacklevel=2)


_from_environment()
