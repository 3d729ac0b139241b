"""The kernels under the compiler's sanitisers, in child processes; and tests that the sanitisers report faults."""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from cunorm.core.errors import KernelFault
from cunorm.jit import cxx
from cunorm.ops.registry import OPS
from tests.battery import cases as battery
from tests.executors import run_sanitised
from tests.support.paths import KERNELS

TEXT = (KERNELS / "sanitised_faults.cu").read_text()
LENGTH, SHARED_BYTES = 40, 64
#: The word at the end of a kernel's line, a harmless operand, an operand that causes a fault, and the fault's message.
FAULTS = [
    ("read", 3, LENGTH + 2, "heap-buffer-overflow, 4-byte load"),
    ("write", 3, LENGTH + 2, "heap-buffer-overflow, 4-byte store"),
    ("index", 3, 4, r"index 4 out of bounds for type 'float \[4\]'"),
    ("frame", 3, 4, "stack-buffer-overflow, 4-byte load"),
    ("bool", 0, 1, "load of value 255, which is not a valid value for type 'bool'"),
    ("shift", 3, 33, "shift exponent 33 is too large for 32-bit type 'int'"),
    ("sum", 3, 41, r"signed integer overflow: .* cannot be represented in type 'int'"),
    ("alignment", 4, 2, "load of misaligned address 0x[0-9a-f]+ for type 'const float', which requires 4 byte"),
    ("division", 3, 0, "division by zero"),
    ("shared", SHARED_BYTES // 4 - 1, SHARED_BYTES // 4, "use-after-poison, 4-byte store"),
]


@pytest.fixture(autouse=True, scope="module")
def _sanitisers() -> None:
    if (reason := run_sanitised.missing()) is not None:
        pytest.skip(f"no sanitised build: {reason}")


def line_of(word: str) -> int:
    return next(number for number, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"// {word}"))


def run_kernel(*runs: tuple[str, int]) -> list[float]:
    """In the child: the sum of y after the case of each word has run with its operand."""
    results = []
    for word, operand in runs:
        arrays = [np.arange(LENGTH, dtype=np.float32), np.zeros(LENGTH, np.float32)]
        what = [fault[0] for fault in FAULTS].index(word)
        _, y = run_sanitised.launched(TEXT, "sanitised_faults", arrays, [what, operand], SHARED_BYTES)
        results.append(float(y.sum()))
    return results


def test_harmless_operands_cause_no_report() -> None:
    found = run_sanitised.call(run_kernel, *((word, good) for word, good, _, _ in FAULTS))
    assert found == [3.0, 1.0, 4.0, 4.0, 1.0, 8.0, float(np.float32(2147483610)), 1.0, 33.0, 7.0]


#: Faults that only `--long` causes: the same sanitisers report others. Each child process takes two seconds.
RARE = ("write", "index", "frame", "shift", "bool")
CAUSED = [pytest.param(*one, id=one[0], marks=pytest.mark.long if one[0] in RARE else ()) for one in FAULTS]


@pytest.mark.parametrize(("word", "good", "bad", "sentence"), CAUSED)
def test_a_report_becomes_a_kernel_fault(word: str, good: int, bad: int, sentence: str) -> None:
    place = rf"sanitised_faults\.cu:{line_of(word)}\b"
    with pytest.raises(KernelFault, match=f"^kernel sanitised_faults: {sentence}.* at {place}") as caught:
        run_sanitised.call(run_kernel, (word, good), (word, bad))
    assert "\n" not in str(caught.value)
    if word in ("read", "write"):
        assert re.search(rf", 8 bytes [a-z ]*{4 * LENGTH}-byte region$", str(caught.value))


def run_after_a_fault() -> list[float]:
    """In the child: a fault of the runtime abandons fibers, and the next launch reuses their stacks."""
    arrays = [np.zeros(LENGTH, np.float32)] * 2
    for _ in range(2):
        with pytest.raises(KernelFault, match="__trap"):
            run_sanitised.launched(TEXT, "sanitised_faults", arrays, [len(FAULTS), 0], SHARED_BYTES)
    return run_kernel(("frame", 3))


def test_a_fault_of_the_runtime_is_not_reported_by_the_sanitisers() -> None:
    assert run_sanitised.call(run_after_a_fault) == [4.0]


def test_a_fault_in_a_common_header_names_the_line_of_the_kernel() -> None:
    text = """#line 1 "common/types.cuh"
    static __device__ void store(float* array, long long index, float value) {
        array[index] = value;
    }
    #line 7 "through.cu"
    extern "C" __global__ void through(float* y, long long index) {
        store(y, index, 1.0f);
    }"""
    with pytest.raises(KernelFault, match=r"^kernel through: heap-buffer-overflow, 4-byte store at through\.cu:8, "):
        run_sanitised.call(run_sanitised.launched, text, "through", [np.zeros(LENGTH, np.float32)], [-1])


# ---- the child ------------------------------------------------------------------------------------------------------


def test_results_and_exceptions_of_the_child() -> None:
    assert run_sanitised.call(divmod, 7, 3) == (2, 1)
    with pytest.raises(ValueError, match="invalid literal for int") as caught:
        run_sanitised.call(int, "seven")
    assert "in the child" in str(caught.value.__cause__)


def test_a_child_that_dies_or_hangs_is_an_exception() -> None:
    with pytest.raises(run_sanitised.ChildFailed, match=r"ended with exit status -6: "):
        run_sanitised.call(os.abort)
    with pytest.raises(run_sanitised.ChildFailed, match=r"ended with exit status 0: "):
        run_sanitised.call(os._exit, 0)
    with pytest.raises(run_sanitised.ChildFailed, match=r"no result after 3 s: sleep\(60,\)"):
        run_sanitised.call(time.sleep, 60, seconds=3)
    with pytest.raises(KernelFault, match=r"^outside of a kernel: SEGV$"):
        run_sanitised.call(ctypes.string_at, 8, 8)


def test_reasons_why_the_sanitised_build_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str, *command: str) -> None:
        monkeypatch.setattr(cxx, "chosen", lambda: cxx.Compiler(name, command, f"{name} 1.0"))

    chosen("zig", "python", "-m", "ziglang", "c++")
    assert run_sanitised.missing() == "zig: its sanitiser's library cannot be loaded first; g++ is needed"
    chosen("g++", "echo")
    assert run_sanitised.missing() == "g++ has no libasan.so"
    monkeypatch.undo()
    monkeypatch.setenv("CUNORM_CXX", "no-such-compiler")
    assert re.match("CUNORM_CXX: 'no-such-compiler' does not run", run_sanitised.missing() or "")


def test_a_sanitiser_library_that_does_not_load(tmp_path: Path) -> None:
    library = tmp_path / "libasan.so"
    library.write_text("no library")
    assert "cannot be loaded first" in (run_sanitised._starts(library) or "")


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "strategy", "labels"),
    [
        ("layer_norm", "block", ["long rows"]),
        ("group_norm_backward", "warp", ["one channel per group, misaligned"]),
        ("batch_norm_stats", "split", ["one block for all"]),
    ],
)
def test_some_kernels_under_the_sanitisers(op: str, strategy: str, labels: list[str]) -> None:
    found = [case for case in battery.cases(op, strategy) if case.label in labels]
    assert run_sanitised.call(run_sanitised.run_cases, found, ["random:3"]) == len(labels)


#: The ops; those without a kernel of their own are marked long.
WITH_KERNELS = [
    pytest.param(op, marks=pytest.mark.long if all(one.kernels_of for one in spec.strategies.values()) else ())
    for op, spec in OPS.items()
]


@pytest.mark.sanitise
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_every_kernel_of_an_op_under_the_sanitisers(op: str, pytestconfig: pytest.Config) -> None:
    """One order of threads, and the cases that need few builds; with --long two orders, and all cases."""
    long = pytestconfig.getoption("--long")
    orders = ["ascending", "random:3"] if long else ["random:3"]
    found = []
    for strategy in OPS[op].strategies:
        chosen = battery.cases(op, strategy) if long else battery.with_few_builds(op, strategy)
        assert chosen, f"cases.py has no case for strategy {strategy} of {op}"
        found += chosen
    assert run_sanitised.call(run_sanitised.run_cases, found, orders) == len(found) * len(orders)
