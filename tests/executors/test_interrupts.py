"""Interrupts, forks, few threads, the interpreter's end: no call on the CPU executor leaves a thread running.

All calls are made in child processes, which run `tests/executors/interrupted.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cunorm.core import locks
from cunorm.jit import cxx
from tests.support.covering import every

CHILD = Path(__file__).with_name("interrupted.py")
SECONDS = 300  # time limit of a child, enough on a busy machine
WARNING = re.compile(r"RuntimeWarning: the system starts no more threads, .*ulimit -u")


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a child in which kernels use three threads."""
    return subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        env={**os.environ, "CUNORM_CPU_CORES": "3", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def facts(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run a child and return the JSON that it printed. It must exit with 0 and print no uncaught exception."""
    done = child(*arguments, **environment)
    # In a storm, an alarm may arrive in a destructor. Python prints exceptions of destructors and continues.
    stormy = arguments[0] == "storm"
    assert (done.returncode, "" if stormy else done.stderr) == (0, ""), done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


#: Op, build, rows. layer_norm_backward makes several launches per call. The checked build copies the arrays.
STORMS = [("layer_norm", "plain", 1600), ("layer_norm_backward", "plain", 800), ("layer_norm", "checked", 60)]


@pytest.mark.parametrize(("calls", "seconds"), [(60, 1.5), pytest.param(1000, SECONDS - 60.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(("op", "build", "size"), every(3, STORMS))
def test_no_thread_writes_after_an_interrupted_call(op: str, build: str, size: int, calls: int, seconds: float) -> None:
    found = facts("storm", op, str(calls), str(seconds), str(size), CUNORM_CPU_BUILD=build)
    assert found["interrupted"] > 0
    assert found["written"] == 0
    assert found["same"]


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("start", [0, 3])  # 0: the calling thread spins; 3: in the plain build, helper threads spin too
def test_an_interrupt_ends_a_kernel_that_spins(start: int, build: str) -> None:
    found = facts("spin", str(start), build)
    assert found["stopped"]
    assert found["late"] == 0  # no block continued
    assert found["after"] == [1] * 8


def test_a_signal_handler_that_returns_changes_no_result() -> None:
    found = facts("handled")
    assert found["handlers"] > 0
    assert found["same"]
    assert found["inner"]  # the handler's own calls, made while a kernel waits for the handler, are right


def test_a_signal_handler_that_forks() -> None:
    found = facts("forking_handler")
    assert found["same"]
    assert found["children"][-1] == 2  # an error, because the child has no helper threads; then a right call
    assert set(found["children"][:-1]) <= {0}


def test_a_signal_handler_that_forks_and_ends_the_child() -> None:
    assert facts("leaving_handler") == {"children": [3, 3, 3], "same": True}


def test_deadlock_is_detected_although_helper_threads_start_late() -> None:
    """Helper threads that start after the deadlock do not prevent its detection."""
    assert facts("late", CUNORM_CPU_CORES="48") == {"faults": 200}


@pytest.mark.parametrize("times", [2, pytest.param(30, marks=pytest.mark.long)])
def test_daemon_threads_in_calls_at_the_interpreters_end(times: int) -> None:
    for _ in range(times):
        assert facts("daemons") == {"begun": True}


# ---- limits on threads and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["0", "3", "memory"])  # limit on the user's threads, or no memory for stacks
def test_a_system_without_more_threads(what: str) -> None:
    found = facts("few", what, OPENBLAS_NUM_THREADS="1")
    assert found["same"]
    if what == "0":
        assert [5, 4] in found["missing"]  # a launch on five threads, of which four did not start
    if what == "3":
        assert {missing for count, missing in found["missing"] if count == 5} & {1, 2, 3}
    assert len(found["warnings"]) == 1
    assert WARNING.match(found["warnings"][0])


# ---- late first calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["at_exit", "outlive"])
def test_a_first_call_while_the_interpreter_ends(what: str, tmp_path: Path) -> None:
    """The call also compiles its kernel."""
    assert facts(what, CUNORM_CACHE_DIR=str(tmp_path / "cache")) == {"right": True}


# ---- calls while a thread compiles ----------------------------------------------------------------------------------


@pytest.fixture
def slow_compiler(tmp_path: Path) -> dict[str, str]:
    """The environment of a process with an empty cache and a slow compiler.

    When the compiler starts to compile a kernel, it creates the file COMPILING, then sleeps for a second.
    """
    compiler = tmp_path / "slow c++"
    started = tmp_path / "started"
    command = shlex.join(cxx.chosen().command)
    slowly = f'case "$*" in *kernel.cpp*) : > {shlex.quote(str(started))}; sleep 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{slowly}\nexec {command} "$@"\n')
    compiler.chmod(0o700)
    cache = tmp_path / "cache"
    cache.mkdir(0o700)
    assert shutil.which(str(compiler))
    return {"CUNORM_CXX": shlex.quote(str(compiler)), "CUNORM_CACHE_DIR": str(cache), "COMPILING": str(started)}


def test_a_handler_calls_what_its_thread_is_compiling(slow_compiler: dict[str, str]) -> None:
    assert facts("handler_compiles", **slow_compiler) == {"handlers": 1, "same": True}


def test_a_child_is_forked_while_a_thread_compiles(slow_compiler: dict[str, str]) -> None:
    assert facts("fork_compiles", **slow_compiler) == {"child": 0, "threads": 1}


@pytest.mark.parametrize("what", ["early_fork", "early_handler"])
def test_fork_and_signal_handler_during_a_first_call(what: str) -> None:
    """At every moment of a thread's first call, a forked child and a signal handler can make calls.

    They neither wait for a lock nor find a module that is only partly initialised.
    """
    found = facts(what, "24")
    assert found["children"] > 16
    assert found["failed"] == 0


def test_a_forked_child_finds_every_lock_free() -> None:
    """Even a lock that the forking thread holds is free in the child. Both processes can release it afterwards."""
    lock = locks.Lock()
    with lock.held:
        locks._renew()  # as in a forked child
        with lock.held:
            pass
    assert lock in locks._locks
