"""The child process of test_interrupts.py: calls that are interrupted, forked, or made while the interpreter ends.

Each function prints its result as JSON on the last line. The parent detects a crash of the process. Only functions
that need the executor import it. In all other functions the first call imports it.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np

import cunorm
from cunorm.core.errors import KernelFault

ROWS, WIDTH = 1600, 4096
SPIN = """extern "C" __global__ void spin(int* word, long long from) {
    while (blockIdx.x >= from && *word == 0) __syncthreads();
    if (threadIdx.x == 0) atomicAdd(word + 1 + blockIdx.x, 1);
}"""

WAIT = """extern "C" __global__ void wait_in(int* word, long long block) {
    while (blockIdx.x == block && threadIdx.x == 0 && atomicMax(word, 0) == 0) {
    }
}"""


class Rang(BaseException):
    """The exception that the handler of the alarm raises."""


def ring(_: int, frame: FrameType | None) -> None:
    """Raise in the library's functions alone. Here, an alarm could arrive while the last one is caught."""
    if frame is not None and frame.f_code.co_filename != __file__:
        raise Rang


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def rows(count: int = ROWS) -> Any:
    return np.random.default_rng(0).standard_normal((count, WIDTH), dtype=np.float32)


def interrupted(call: Any, after: float, again: float) -> bool:
    """Whether an alarm ended the call. If ``again`` is not 0, the alarm repeats until the timer is stopped."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after, again)
        call()
    except Rang:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def storm(op: str, calls: str, seconds: str, size: str) -> None:
    """Interrupt calls at random times. After an interrupted call, no thread may write to the memory of its results."""
    signal.signal(signal.SIGALRM, ring)
    x, chance = rows(int(size)), random.Random(int(calls))
    call = functools.partial(cunorm.layer_norm, x, WIDTH)
    if op == "layer_norm_backward":
        call = functools.partial(cunorm.layer_norm_backward, x[::-1].copy(), x, WIDTH, *call()[1:])
    expected = call()
    began = time.monotonic()
    call()
    usual = time.monotonic() - began
    until = time.monotonic() + float(seconds)
    done = ended = written = 0
    while done < int(calls) and time.monotonic() < until:
        given = {"out": tuple(map(np.empty_like, expected))} if done % 2 else {}
        # Half of the alarms arrive within 2 ms, often while the launch begins. The others arrive at any time.
        after = chance.uniform(1e-5, chance.choice([2e-3, 1.1 * usual]))
        again = chance.choice([0.0, 5e-5, 3e-4, usual / 4])
        stopped = interrupted(functools.partial(call, **given), after, again)
        if stopped:
            ended += 1
            victims = given["out"] if given else (np.empty_like(x),)  # mostly the memory of the call's own results
            for victim in victims:
                victim.fill(7.0)
            time.sleep(usual / 4)
            written += sum(int((victim != 7.0).sum()) for victim in victims)
        done += 1
    same = all(np.array_equal(a, b) for a, b in zip(call(), expected, strict=True))
    say(calls=done, interrupted=ended, written=written, same=same)


def spin(start: str, build: str) -> None:
    """Launch a kernel whose blocks never end, from block ``start`` on. An alarm must end the launch."""
    from cunorm.executors.cpu import executor

    signal.signal(signal.SIGALRM, ring)
    executor.SPREAD_SECONDS = 0.0
    words = np.zeros(9, np.int32)
    kernel = executor.compile(SPIN, "spin", build=build)
    began = time.monotonic()
    stopped = interrupted(lambda: executor.launch(kernel, 8, 64, 0, [words.ctypes.data, int(start)]), 0.4, 0.0)
    seconds = time.monotonic() - began
    words[:] = 1, *[0] * 8  # a block that still spins would now end and increment its word
    time.sleep(0.2)
    late = int(words[1:].sum())
    executor.launch(kernel, 8, 64, 0, [words.ctypes.data, 8])
    say(stopped=stopped, seconds=seconds, late=late, after=words[1:].tolist())


def handled() -> None:
    """Interrupt calls with a handler that makes the same call and returns. All results must be right."""
    x, found = rows(200), []
    _, mean, rstd = cunorm.layer_norm(x, WIDTH)
    backward = functools.partial(cunorm.layer_norm_backward, x[::-1].copy(), x, WIDTH, mean, rstd)
    expected = backward()

    def call(*_: Any) -> None:
        found.append(backward())
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    results = [backward() for _ in range(3)]
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    same = all(np.array_equal(a, b) for each in results for a, b in zip(each, expected, strict=True))
    inner = all(np.array_equal(a, b) for each in found for a, b in zip(each, expected, strict=True))
    say(handlers=len(found), same=same, inner=inner)


def forking_handler() -> None:
    """Fork in a signal handler while helper threads run: the child's call raises, the parent's call succeeds."""
    x, children = rows(), []
    expected = cunorm.layer_norm(x, WIDTH)

    def fork(*_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        children.append(os.fork())

    signal.signal(signal.SIGALRM, fork)
    statuses, same = [], True
    while len(statuses) < 20 and 2 not in statuses:  # on a busy machine an alarm may miss the launch
        children.clear()
        failed = ""
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            results = cunorm.layer_norm(x, WIDTH)
        except RuntimeError as error:
            failed = str(error)
        while not children:
            time.sleep(0.01)
        if children[0] == 0:  # in the child, in which a later call must succeed
            again = cunorm.layer_norm(x, WIDTH)
            right = all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))
            os._exit(1 if not right else 2 if "a signal handler forked" in failed else 0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        same &= not failed and all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))
    say(children=statuses, same=same)


def leaving_handler() -> None:
    """Fork in a signal handler while helper threads run. The child calls ``sys.exit`` in the handler."""
    x, children = rows(), []
    expected = cunorm.layer_norm(x, WIDTH)

    def fork(*_: Any) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # ends a child that hangs
            sys.exit(3)

    signal.signal(signal.SIGALRM, fork)
    same = True
    for _ in range(3):
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        same &= all(np.array_equal(a, b) for a, b in zip(cunorm.layer_norm(x, WIDTH), expected, strict=True))
    say(children=[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], same=same)


def late() -> None:
    """Launch kernels in which one block waits for ever, while some helper threads start too late to take part.

    Each launch must report a deadlock.
    """
    from cunorm.executors.cpu import executor

    executor.SPREAD_SECONDS = 0.0
    kernel, word, faults = executor.compile(WAIT, "wait_in"), np.zeros(1, np.int32), 0
    for i in range(200):
        try:
            executor.launch(kernel, 200, 32, 0, [word.ctypes.data, 2 + i % 5])
        except KernelFault as fault:
            faults += "deadlock" in str(fault)
    say(faults=faults)


def daemons() -> None:
    """End the interpreter while daemon threads make calls."""
    x = rows()
    cunorm.layer_norm(x, WIDTH)
    begun = threading.Barrier(4)

    def work() -> None:
        begun.wait()
        while True:
            cunorm.layer_norm(x, WIDTH)

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    begun.wait()
    time.sleep(random.uniform(0.0, 0.4))
    say(begun=True)


def few(what: str) -> None:
    """Make calls when the system starts no more threads or has no memory for stacks: same results, one warning.

    ``what`` is the limit on the user's threads, or ``memory``.
    """
    from cunorm.executors.cpu import executor

    x = rows(64)
    os.environ["CUNORM_CPU_CORES"] = "1"
    expected = cunorm.layer_norm(x, WIDTH)
    os.environ["CUNORM_CPU_CORES"] = "5"
    executor.SPREAD_SECONDS = 0.0
    missing = []
    if what != "memory":
        if os.geteuid() == 0:  # RLIMIT_NPROC does not apply to root
            os.setuid(54321)
        most = int(what)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        genuine = executor._run

        def run(kernel: Any, buffer: Any, scratches: Any, arena: int) -> str | None:
            try:
                return genuine(kernel, buffer, scratches, arena)
            finally:
                missing.append((len(scratches), buffer[executor.MISSING]))

        executor._run = run
    else:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + 4 * 2**20  # enough for the results of a call, but not for the stacks of one more thread
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = True
        for _ in range(20):
            same &= all(np.array_equal(a, b) for a, b in zip(cunorm.layer_norm(x, WIDTH), expected, strict=True))
    say(same=same, missing=missing, warnings=[f"{each.category.__name__}: {each.message}" for each in caught])


def first_call() -> None:
    x = rows(64)
    y = cunorm.layer_norm(x, WIDTH)[0]
    say(right=bool(np.allclose(y.mean(1), 0, atol=1e-5) and np.allclose(y.std(1), 1, atol=1e-3)))


def at_exit() -> None:
    """Make the first call in an atexit handler."""
    from cunorm.executors.cpu import executor

    executor.SPREAD_SECONDS = 0.0
    atexit.register(first_call)


def outlive() -> None:
    """Make the first call in a thread that outlives the main thread."""
    from cunorm.executors.cpu import executor

    executor.SPREAD_SECONDS = 0.0
    main = threading.main_thread()

    def work() -> None:
        main.join()
        first_call()

    threading.Thread(target=work).start()


def compiling(seconds: float = 20.0) -> None:
    """Wait until the compiler runs: it creates the file COMPILING (see `slow_compiler` in test_interrupts.py)."""
    until = time.monotonic() + seconds
    while not os.path.exists(os.environ["COMPILING"]):
        assert time.monotonic() < until, "the compiler did not start in time"
        time.sleep(0.01)


def handler_compiles() -> None:
    """Make, in a signal handler, the call whose kernel the main thread is compiling."""
    x, found = rows(4), []

    def call(*_: Any) -> None:
        if not os.path.exists(os.environ["COMPILING"]):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        found.append(cunorm.layer_norm(x, WIDTH)[0])

    signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    y = cunorm.layer_norm(x, WIDTH)[0]
    say(handlers=len(found), same=all(np.array_equal(each, y) for each in found))


def fork_compiles() -> None:
    """Fork while another thread compiles. The child makes the same call."""
    x, found = rows(4), []
    thread = threading.Thread(target=lambda: found.append(cunorm.layer_norm(x, WIDTH)[0]))
    thread.start()
    compiling()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        y = cunorm.layer_norm(x, WIDTH)[0]
        os._exit(0 if np.allclose(y.mean(1), 0, atol=1e-5) else 1)
    status = os.waitpid(child, 0)[1]
    thread.join()
    say(child=status, threads=len(found))


def first_call_at(moments: Iterable[int], then: Callable[[], None]) -> int:
    """Make the first call of a process. Run ``then`` at the calls of Python functions whose numbers are in ``moments``.

    Return the number of calls of Python functions.
    """
    count, awaited = 0, set(moments)

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
            if count in awaited:
                sys.setprofile(None)
                then()
                sys.setprofile(profile)

    x = rows(4)
    sys.setprofile(profile)
    try:
        y = cunorm.layer_norm(x, WIDTH)[0]
    finally:
        sys.setprofile(None)
    assert np.isfinite(y).all()
    return count


def in_child(work: Callable[[], Any], seconds: int = 60) -> int:
    """Run ``work`` in a forked child. Return its wait status: 0 if ``work`` returned, else another number."""
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(seconds, exit=True)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            faulthandler.dump_traceback()
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def call_once() -> None:
    assert np.isfinite(cunorm.layer_norm(rows(4), WIDTH)[0]).all()


def moments(number: str) -> list[int]:
    """At most ``number`` moments of a first call. Half are evenly spaced, half are concentrated at its beginning."""
    command = [sys.executable, __file__, "counted"]
    total = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["calls"]
    half = int(number) // 2
    shares = [(one + 1) / half for one in range(half)]
    return sorted({int(total * share) for share in shares} | {int(total**share) for share in shares})


def counted() -> None:
    """Print the number of calls of Python functions in a first call."""
    say(calls=first_call_at((), lambda: None))


def early_fork(number: str) -> None:
    """Fork at many moments while another thread makes its first call. Each child makes a first call of its own."""
    reached, go, codes = threading.Semaphore(0), threading.Semaphore(0), []

    def pause() -> None:
        reached.release()
        go.acquire()

    planned, ended = moments(number), threading.Event()

    def first_call() -> None:
        first_call_at(planned, pause)
        ended.set()  # with a warm cache, a call has fewer moments than were counted
        reached.release()

    thread = threading.Thread(target=first_call)
    thread.start()
    while reached.acquire(timeout=60) and not ended.is_set():
        codes.append(in_child(call_once, 20))
        go.release()
    thread.join(60)
    say(children=len(codes), failed=sum(code != 0 for code in codes), threads=threading.active_count())


def early_handler(number: str) -> None:
    """Make a call within a first call of the same thread, as a signal handler would.

    This happens at many moments, each in a child process of its own.
    """
    planned = moments(number)
    codes = [in_child(functools.partial(first_call_at, (at,), call_once)) for at in planned]
    say(children=len(codes), failed=sum(code != 0 for code in codes))


if __name__ == "__main__":
    faulthandler.enable()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # intended here
    globals()[sys.argv[1]](*sys.argv[2:])
