"""Run a function in a child process under the compiler's sanitisers, and raise their reports as exceptions.

AddressSanitizer must be loaded before all other libraries, and it ends the process at its first finding. Therefore the
function runs in a child process. There the sanitiser's library is preloaded, its allocator allocates NumPy's buffers,
and kernels run in the sanitised build.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cunorm.core.errors import CompileError, KernelFault
from cunorm.executors.cpu import checked as cpu_checked
from cunorm.executors.cpu import executor
from cunorm.executors.cpu.guarded_arrays import TENSOR, Region
from cunorm.jit import cxx
from tests.battery.case import Case
from tests.support.paths import environment

LIBRARY = "libasan.so"
OPTIONS = {
    # detect_leaks: the interpreter itself leaks memory. allocator_may_return_null: an allocation that is too large
    # returns null, as malloc does. detect_stack_use_after_return: ASan's fake frames would be lost when fibers switch.
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "PYTHONMALLOC": "malloc",  # in the interpreter's own pools, accesses past the end of a buffer would not be detected
    "CUNORM_CPU_BUILD": "sanitised",
}
#: Fails if the sanitiser is not loaded. The loader only prints a warning if it cannot preload a library.
PROBE = "import ctypes; ctypes.CDLL(None).__asan_init"
SECONDS = 900.0
LAST_LINES = 15
_PLACE = re.compile(r"^ +#\d+ .*/\.build-[^/]*/(.+):(\d+)(?::\d+)?$", re.MULTILINE)
_ENTRY = re.compile(r"\bcunorm_cpu_call_(\w+)")


class ChildFailed(RuntimeError):
    """The child process ended without a result and without a sanitiser's report, or exceeded its time limit."""


# ---- in the parent --------------------------------------------------------------------------------------------------


@cache
def _library(compiler: cxx.Compiler) -> Path | None:
    """Path of a compiler's sanitiser library, or None."""
    done = subprocess.run(
        [*compiler.command, f"-print-file-name={LIBRARY}"], capture_output=True, text=True, timeout=60, check=False
    )
    path = Path(done.stdout.strip())  # only the file name if the compiler has no such library
    return path.resolve() if done.returncode == 0 and path.is_absolute() and path.exists() else None


@cache
def _starts(library: Path) -> str | None:
    """Return the reason why a child process with the library preloaded does not start, or None."""
    environment = dict(os.environ, LD_PRELOAD=str(library), **OPTIONS)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 0:
        return None
    return f"{library} cannot be loaded first: exit status {done.returncode}, {_last(done.stderr)}"


def missing() -> str | None:
    """Return the reason why the sanitised build cannot run on this machine, or None."""
    try:
        compiler = cxx.chosen()
    except CompileError as error:
        return str(error)
    if compiler.name == "zig" or "clang" in compiler.version.lower():
        return f"{compiler.name}: its sanitiser's library cannot be loaded first; g++ is needed"
    library = _library(compiler)
    return f"{compiler.name} has no {LIBRARY}" if library is None else _starts(library)


def call(function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> Any:
    """Run ``function(*arguments)`` in a child process under the sanitisers, and return its result.

    Parameters
    ----------
    function : callable
        A function of a module that the child can import.
    *arguments
        Arguments of the function. The child receives copies.
    seconds : float, optional
        Time limit of the child, seconds.

    Raises
    ------
    KernelFault
        If a sanitiser reported a fault. The message contains the kind of fault and its line in the kernel.
    ChildFailed
        If the child ended for another reason, or exceeded the time limit.
    Exception
        The exception that the function raised.
    """
    library = _library(cxx.chosen())
    with tempfile.TemporaryDirectory(prefix="cunorm-sanitised-") as folder:
        task, result = Path(folder, "task"), Path(folder, "result")
        task.write_bytes(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
        around = environment(LD_PRELOAD=str(library), **OPTIONS)
        command = [sys.executable, "-m", "tests.executors.run_sanitised", str(task), str(result)]
        try:
            done = subprocess.run(
                command,
                env=around,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"no result after {seconds:g} s: {function.__name__}{arguments}") from None
        if (sentence := fault_in(done.stderr)) is not None:
            raise KernelFault(sentence)
        if done.returncode != 0 or not result.exists():
            raise ChildFailed(f"the child ended with exit status {done.returncode}: {_last(done.stderr)}")
        value, error, trace = pickle.loads(result.read_bytes())
    if error is not None:
        raise error from RuntimeError(f"in the child:\n{trace}")
    return value


def _last(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:]) or "no error output"


def fault_in(report: str) -> str | None:
    """Return a one-line message for a sanitiser's report, or None if the text contains no report."""
    found = re.search(r"ERROR: AddressSanitizer:? (?:attempting )?([\w-]+)|: runtime error: (.+)", report)
    if found is None:
        return None
    own = report[found.end() :].partition("\n\n")[0]  # the stack of the access; the allocation's follows it
    kernel = _ENTRY.search(own)
    places = _PLACE.findall(own)
    places = [place for place in places if not cpu_checked.DOORS.match(place[0])] or places
    at = " at {}:{}".format(*places[0]) if places else ""
    head = f"kernel {kernel[1]}: " if kernel else "outside of a kernel: "
    if found[2] is not None:
        return f"{head}{found[2]}{at}"
    access = re.search(r"^(READ|WRITE) of size (\d+)", own, re.MULTILINE)
    what = f", {access[2]}-byte {'load' if access[1] == 'READ' else 'store'}" if access else ""
    beside = re.search(r"is located (\d+ bytes .*?region)", report)
    return f"{head}{found[1]}{what}{at}" + (f", {beside[1]}" if beside else "")


# ---- in the child ---------------------------------------------------------------------------------------------------


def run_cases(cases: Sequence[Case], orders: Sequence[str]) -> int:
    """Run cases of the battery in each order of threads. Return the number of runs."""
    runs = 0
    for case in cases:
        for order in orders:
            os.environ["CUNORM_CPU_ORDER"] = order
            print(f"{case}, {order}", file=sys.stderr, flush=True)
            case.run()
            runs += 1
    return runs


def launched(
    text: str, entry: str, arrays: Sequence[np.ndarray], numbers: Sequence[int], shared_bytes: int = 0
) -> list[np.ndarray]:
    """Run one block of 32 threads on copies of the arrays, and return the copies.

    Each copy has an allocation of its own, so that the sanitiser detects accesses past its end.
    """
    own = [array.copy() for array in arrays]
    places = [array.ctypes.data for array in own]
    memory = [Region("x", place, array.nbytes, TENSOR) for place, array in zip(places, own, strict=True)]
    executor.launch(executor.compile(text, entry), 1, 32, shared_bytes, [*places, *numbers], memory=memory)
    return own


def _main(task: Path, result: Path) -> None:
    del os.environ["LD_PRELOAD"]  # the compiler must run without the sanitiser
    sys.path, inner = pickle.loads(task.read_bytes())
    value = error = trace = None
    try:
        function, arguments = pickle.loads(inner)
        value = function(*arguments)
    except Exception as raised:
        error, trace = raised, traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(repr(error))
    result.write_bytes(pickle.dumps((value, error, trace)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
