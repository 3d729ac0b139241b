"""Traces: recording and counting the problems of an application, several processes, forks, and reading."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import TraceError
from cunorm.core.problem import Problem
from cunorm.tiling import problem_trace
from tests.support.paths import environment
from tests.support.problems import group_arrays


def run(a: Any, times: int = 1) -> None:
    for _ in range(times):
        cunorm.group_norm(a.x, 2)


def test_problems_and_their_numbers_of_calls(tmp_path: Path) -> None:
    """A problem that ran before the trace is recorded too. Calls after the trace are not. Runs of a plan count."""
    path = tmp_path / "run.trace"
    a = group_arrays((2, 8, 3, 3))
    run(a, 2)
    with cunorm.trace(path):
        run(a, 3)
        made = cunorm.plan("group_norm_backward", shape=(2, 8, 3, 3), dtype="float32", num_groups=2)
        for _ in range(2):
            made(a.dy, a.x, a.mean, a.rstd, a.gamma)
        cunorm.group_norm(np.empty((0, 8, 3), np.float32), 2)  # launches nothing
    run(a)
    found = problem_trace.read(path)
    assert [(one.op, calls) for one, calls in found.items()] == [("group_norm", 3), ("group_norm_backward", 2)]
    forward, backward = found
    assert forward == Problem(
        op="group_norm",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=2,
        C=8,
        HxW=9,
        group=2,
        outputs=("y", "mean", "rstd"),
    )
    assert backward.gamma_dtype == "float32"
    assert not problem_trace.active()
    assert len(path.read_text().splitlines()) == 4  # per problem: its first call, and the count of the others


def test_results_are_the_same_while_tracing(tmp_path: Path) -> None:
    a = group_arrays((2, 8, 3, 3))
    before = cunorm.group_norm(a.x, 2, a.gamma, a.beta)
    with cunorm.trace(tmp_path / "t"):
        inside = cunorm.group_norm(a.x, 2, a.gamma, a.beta)
    assert all(np.array_equal(one, other) for one, other in zip(before, inside, strict=True))


def test_a_wrong_call_is_not_recorded(tmp_path: Path) -> None:
    with cunorm.trace(tmp_path / "t"), pytest.raises(ValueError, match="num_groups"):
        cunorm.group_norm(group_arrays((2, 8, 3, 3)).x, 3)
    assert problem_trace.read(tmp_path / "t") == {}


def test_a_trace_is_appended_to_and_traces_nest(tmp_path: Path) -> None:
    a = group_arrays((2, 8, 3, 3))
    with cunorm.trace(tmp_path / "outer"):
        run(a)
        with cunorm.trace(tmp_path / "inner"):
            run(a)
        run(a)
    with cunorm.trace(tmp_path / "inner"):
        run(a, 2)
    assert list(problem_trace.read(tmp_path / "outer").values()) == [3]
    assert list(problem_trace.read(tmp_path / "inner").values()) == [3]


def test_a_path_that_cannot_be_written_raises_before_the_block(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), cunorm.trace(tmp_path / "nowhere" / "t"):
        raise AssertionError("began")
    assert not problem_trace.active()


def test_a_trace_can_be_entered_again_and_decorate(tmp_path: Path) -> None:
    a = group_arrays((2, 8, 3, 3))
    traced = cunorm.trace(tmp_path / "t")
    with traced:
        run(a)
        with traced:
            run(a)
    traced(run)(a)
    # The outer one records both calls of its block.
    assert list(problem_trace.read(tmp_path / "t").values()) == [4]
    assert not problem_trace.active()


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    for path in (3, None, b"t"):
        with pytest.raises(TypeError, match=r"^path: .*, expected a str or a path"):
            cunorm.trace(path)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=f"not a regular file: '{tmp_path}'"), cunorm.trace(tmp_path):
        raise AssertionError("began")


@pytest.mark.parametrize("text", ["{\n}\n", "import torch", '{"a": 1}', "\n\nwords\n", '["op"]\n'])
def test_a_file_with_other_contents_is_no_trace(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"{path}: .* other contents than a trace; name another"):
        cunorm.trace(path).__enter__()
    monkeypatch.setenv("CUNORM_TRACE", str(path))
    with pytest.warns(RuntimeWarning, match=r"^CUNORM_TRACE: .* other contents than a trace; nothing is traced; name"):
        problem_trace._from_environment()
    assert "other contents than a trace" in str(problem_trace.environment_fault())
    assert not problem_trace.active()
    assert path.read_text() == text


def test_a_second_process_continues_the_trace_of_the_first(tmp_path: Path) -> None:
    """It begins while cunorm is imported."""
    code = "import numpy as np, cunorm; cunorm.layer_norm(np.ones((2, 4), np.float32), 4)"
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", code]
        subprocess.run(command, env=environment(CUNORM_TRACE=str(tmp_path / "t")), check=True)
    assert list(problem_trace.read(tmp_path / "t").values()) == [2]


def test_a_complete_last_line_gets_its_end(tmp_path: Path) -> None:
    path, a = tmp_path / "t", group_arrays((2, 8, 3, 3))
    for _ in range(2):
        with cunorm.trace(path):
            run(a)
        path.write_text(path.read_text().rstrip())
    assert list(problem_trace.read(path).values()) == [2]


@pytest.mark.parametrize("whole", [0, 2])
def test_the_incomplete_last_line_of_a_killed_process_is_removed(whole: int, tmp_path: Path) -> None:
    path, a = tmp_path / "t", group_arrays((2, 8, 3, 3))
    with cunorm.trace(path):
        run(a)
    line = path.read_text()
    path.write_text(line * whole + line[:40])
    with cunorm.trace(path):
        run(a)
    assert path.read_text() == line * (whole + 1)
    assert list(problem_trace.read(path).values()) == [whole + 1]


def test_a_full_disk_causes_a_warning_and_no_failed_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    x = group_arrays((2, 8, 3, 3)).x
    with cunorm.trace(tmp_path / "t"):
        monkeypatch.setattr(os, "write", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert cunorm.group_norm(x, 2)[0].shape == x.shape
        monkeypatch.undo()


def test_a_disk_that_is_full_for_a_moment_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes a part of the text, and says how much."""
    a, real = group_arrays((2, 8, 3, 3)).x, os.write
    with cunorm.trace(tmp_path / "t"):
        cunorm.group_norm(a, 2)
        monkeypatch.setattr(os, "write", lambda handle, text: real(handle, text[: len(text) // 2]))
        with pytest.warns(RuntimeWarning, match="No space left"):
            cunorm.group_norm(a, 4)
        monkeypatch.undo()
        cunorm.group_norm(a, 8)
    assert [problem.group for problem in problem_trace.read(tmp_path / "t")] == [2, 8]


def script(path: Path | str, body: str, folder: Path | None = None) -> subprocess.Popen[str]:
    text = f"import os, signal, numpy as np, cunorm\nx = np.ones((2, 8, 3, 3), np.float32)\n{body}"
    environment = {**os.environ, "CUNORM_TRACE": str(path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", text], env=environment, stdout=pipe, stderr=pipe, text=True, cwd=folder
    )


def finished(path: Path | str, body: str, folder: Path | None = None) -> str:
    """The standard error of a script, which must exit with code 0."""
    with script(path, body, folder) as one:
        try:
            _, words = one.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            one.kill()
            raise
    assert one.returncode == 0, words
    return words


def test_several_processes_append_to_the_file_that_the_variable_names(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    body = "for _ in range(3): cunorm.group_norm(x, 2)"
    for one in [script(path, body) for _ in range(2)]:
        _, words = one.communicate(timeout=120)
        assert one.returncode == 0, words
    assert list(problem_trace.read(path).values()) == [6]


def test_the_first_call_of_a_killed_process_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with script(path, "cunorm.group_norm(x, 2)\nos.kill(os.getpid(), signal.SIGKILL)") as one:
        one.communicate(timeout=120)
    assert one.returncode == -signal.SIGKILL
    assert list(problem_trace.read(path).values()) == [1]


def test_a_variable_with_an_unwritable_path_causes_a_warning(tmp_path: Path) -> None:
    one = script(tmp_path / "nowhere" / "t", "cunorm.group_norm(x, 2)")
    _, words = one.communicate(timeout=120)
    assert one.returncode == 0
    assert "CUNORM_TRACE" in words
    assert "nothing is traced" in words


def no_file(kind: str, folder: Path) -> Path:
    """The path of an existing file that is not regular."""
    path = folder / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(folder / "behind")
        path.symlink_to(folder / "behind")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # the address of a socket has a small maximum length
    elif kind.startswith("/"):
        return Path(kind)
    else:
        os.mkfifo(path)
    return path


NO_FILES = ("pipe", "link to a pipe", "folder", "socket", "/dev/full", "/dev/null", "/dev/tty")


def test_trace_refuses_files_that_are_not_regular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a subprocess, because opening a pipe without a reader could block for ever."""
    monkeypatch.chdir(tmp_path)
    paths = [str(no_file(kind, tmp_path)) for kind in NO_FILES]
    body = (
        f"for path in {paths}:\n"
        "    try:\n"
        "        with cunorm.trace(path): raise AssertionError(path)\n"
        "    except OSError as error:\n"
        "        assert 'not a regular file' in str(error), (path, error)\n"
        "assert not cunorm.tiling.problem_trace.active()"
    )
    finished("", body)


def test_calls_in_a_pause_are_not_recorded(tmp_path: Path) -> None:
    """A call in the pause is recorded when it runs again afterwards."""
    x = np.ones((2, 4), np.float32)
    with cunorm.trace(tmp_path / "t"):
        with problem_trace.paused():
            cunorm.layer_norm(x, 4)
            assert not problem_trace.active()
        assert (tmp_path / "t").read_text() == ""
        cunorm.layer_norm(x, 4)
    assert list(problem_trace.read(tmp_path / "t").values()) == [1]


def test_a_variable_that_names_a_pipe_causes_one_warning(tmp_path: Path) -> None:
    """Opening the pipe does not wait for a reader. There is one warning, and calls work as without a trace."""
    words = finished(
        no_file("pipe", tmp_path), "cunorm.group_norm(x, 2)\nassert not cunorm.tiling.problem_trace.active()"
    )
    assert words.count("RuntimeWarning") == 1
    assert f"CUNORM_TRACE: {tmp_path}/pipe: not a regular file; nothing is traced" in words


def test_a_pipe_that_replaces_the_file_causes_a_warning(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    words = finished(path, f"os.unlink({path!r})\nos.mkfifo({path!r})\ncunorm.group_norm(x, 2)")
    assert f"trace: {tmp_path}/t: not a regular file" in words


def test_a_relative_path_survives_a_change_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    finished("t", "cunorm.group_norm(x, 2)\nos.chdir('other')\ncunorm.group_norm(x, 2)", tmp_path)
    assert list(problem_trace.read(tmp_path / "t").values()) == [2]
    assert [*(tmp_path / "other").iterdir()] == []


# ---- forks ----------------------------------------------------------------------------------------------------------

#: Code that forks a child, makes 3 calls in it and waits for it; and the number of these calls that are written.
FORKS = {
    "the child returns": ("if os.fork():\n    os.wait()\nelse:\n    three()", 3),
    "the child ends at once": ("if os.fork():\n    os.wait()\nelse:\n    three()\n    os._exit(0)", 1),
    "a worker": (
        "import multiprocessing\none = multiprocessing.get_context('fork').Process(target=three)\n"
        "one.start()\none.join()\nassert one.exitcode == 0",
        3,
    ),
    "a pool": (
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    pool.apply(three)\n    pool.close()\n    pool.join()",
        3,
    ),
}
THREE = "def three():\n    for _ in range(3): cunorm.group_norm(x, 2)\n"


@pytest.mark.parametrize("name", FORKS)
def test_a_forked_child_counts_its_own_calls(name: str, tmp_path: Path) -> None:
    """The 5 calls of the parent count once. A child that ends by `os._exit` has written only its first call.

    The counts are the same for `trace` and for CUNORM_TRACE.
    """
    body, written = FORKS[name]
    body = f"for _ in range(4): cunorm.group_norm(x, 2)\n{body}\nif os.getpid() == parent: cunorm.group_norm(x, 2)"
    indented = body.replace("\n", "\n    ")
    finished(tmp_path / "named", f"parent = os.getpid()\n{THREE}with cunorm.trace('inside'):\n    {indented}", tmp_path)
    for path in ("named", "inside"):
        assert list(problem_trace.read(tmp_path / path).values()) == [5 + written]


def test_a_fork_while_another_thread_holds_the_lock(tmp_path: Path) -> None:
    """The child gets a new lock, because the thread that holds the old one does not exist in the child.

    The counts that the old trace has not yet written are written by the parent.
    """
    body = (
        "import threading\n"
        "from cunorm.tiling import problem_trace\n"
        "one, = problem_trace._traces\n"
        "cunorm.group_norm(x, 2)\n"
        "held, over = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with one._lock:\n"
        "        held.set()\n"
        "        over.wait()\n"
        "thread = threading.Thread(target=hold)\n"
        "thread.start()\n"
        "held.wait()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(60)\n"
        "    cunorm.group_norm(x, 2)\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "over.set()\n"
        "thread.join()"
    )
    finished(tmp_path / "t", body)
    assert list(problem_trace.read(tmp_path / "t").values()) == [2]


def test_a_signal_handler_may_make_a_call_while_a_call_is_recorded(tmp_path: Path) -> None:
    body = (
        "from cunorm.tiling import problem_trace\n"
        "def handler(*_): cunorm.group_norm(x, 4)\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        "real = problem_trace._append\n"
        "def append(path, lines):\n"
        "    problem_trace._append = real\n"
        "    signal.raise_signal(signal.SIGUSR1)\n"
        "    real(path, lines)\n"
        "problem_trace._append = append\n"
        "cunorm.group_norm(x, 2)"
    )
    finished(tmp_path / "t", body)
    assert sorted((one.group, calls) for one, calls in problem_trace.read(tmp_path / "t").items()) == [(2, 1), (4, 1)]


# ---- reading --------------------------------------------------------------------------------------------------------

LINE = {"op": "group_norm", "dtype": "float32", "outputs": "y", "N": 1, "C": 2, "HxW": 3, "group": 1, "calls": 2}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: not JSON .Expecting value, column 1., expected a line that"),
        ("[1]", "line 2: a list"),
        (json.dumps(LINE | {"calls": 0}), "line 2: calls is 0"),
        (json.dumps(LINE | {"calls": "2"}), "line 2: calls is '2', expected"),
        (json.dumps(LINE | {"calls": None}), "line 2: calls is None"),
        (json.dumps(LINE | {"N": -1}), "line 2: N is -1"),
        (json.dumps(LINE | {"dtype": "int8"}), "line 2: dtype is 'int8'"),
    ],
)
def test_a_line_that_is_not_of_a_trace_is_an_error(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n{json.dumps(LINE)}\n")
    with pytest.raises(TraceError, match=words) as caught:
        problem_trace.read(path)
    assert str(caught.value).startswith(str(path))


def test_an_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"{json.dumps(LINE)}\n\n{json.dumps(LINE)[:30]}")
    assert list(problem_trace.read(path).values()) == [2]
