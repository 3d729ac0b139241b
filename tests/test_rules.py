"""Every fault of the checked build is caught, with its place, in every order; where the rule is kept, nobody cries."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kernel_checks import KERNELS, ORDERS, compiled, launch, random

from cunorm.cpu import Kernel
from cunorm.errors import KernelFault

TEXT = (KERNELS / "rules.cu").read_text(encoding="utf-8")

#: What a fault says by the kind of rule. "HERE" is the line of the kernel.
SAID = {
    0: r"thread 5: out-of-bounds 4-byte load at HERE: it begins 768 bytes behind the start of array0, which has 768 ",
    1: r"thread 5: out-of-bounds 4-byte load at HERE: it begins 4 bytes before the start of array0",
    2: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 780 bytes behind the start of array1",
    3: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 4768 bytes behind the start of array2",
    4: r"thread 4: misaligned 16-byte load at 0x[0-9a-f]+, at HERE",
    5: r"thread 5: misaligned access \(HERE\): address 0x[0-9a-f]+, which 16-byte alignment does not divide",
    6: r"thread 5: out-of-bounds 4-byte store at HERE: byte 256 of shared memory, of which the launch gave 256",
    7: r"thread [89]: shared-memory race at byte 32: it writes at HERE what thread [89] wrote at HERE, and no ",
    8: r"thread \d+: shared-memory race at byte \d+: it (reads|writes) at \S+ what thread \d+ (read|wrote) at \S+, ",
    9: r"thread \d+: shared-memory race at byte \d+: it (reads|writes) at \S+ what thread \d+ (read|wrote) at \S+, ",
    10: r"thread 56: reads byte 28 of shared memory at HERE, which nobody wrote, and results depend on such reads",
    11: r"thread 5: 4-byte load at HERE of array0 that bypasses load and store",
    12: r"divergent barrier: thread \d+ waits at __syncthreads \(rules.cu:\d+\), thread \d+ waits at __syncthreads",
    13: r"deadlock: thread 0 waits at __syncthreads \(HERE\), thread 63 has ended",
    14: r"a lane of the mask is missing: thread \d+ waits at __shfl_sync with mask 0xffffffff \(HERE\), thread \d+ ",
    15: r"thread \d+: __shfl_sync \(HERE\): lane 20, which it reads from, is not in mask 0x0000ffff",
    16: r"deadlock: thread 0 waits at a polled word \(HERE\)",
    17: r"thread 5: out-of-bounds 4-byte store at HERE",
    18: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 4 bytes before the start of array0",
}


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return compiled(TEXT, "rules", threads=64)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")


def run(kernel: Kernel, kind: int, broken: int) -> tuple[np.ndarray, np.ndarray]:
    x, y, workspace = random(3, 64), np.full((3, 64), np.nan, np.float32), np.zeros((3, 64), np.float32)
    launch(kernel, 3, 64, 256, [x, y, workspace, np.zeros(3, np.uint32)], [kind, broken], workspace=[2])
    return x, y


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", SAID)
def test_a_broken_rule_is_a_fault_that_names_its_place(
    kernel: Kernel, kind: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    (line,) = (number for number, text in enumerate(TEXT.splitlines(), 1) if f"// rule {kind}:" in text)
    said = SAID[kind].replace("HERE", rf"rules\.cu:{line}")
    with pytest.raises(KernelFault, match=rf"^kernel rules, block 1: {said}"):
        run(kernel, kind, 1)
    run(kernel, kind, 0)  # the executor is as good as new


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", SAID)
def test_a_kept_rule_is_no_fault(kernel: Kernel, kind: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    x, y = run(kernel, kind, 0)
    assert np.isfinite(y).all()
    if kind in (2, 3, 6, 7, 12, 13, 16, 17):  # the others bring another's value, or write elsewhere
        assert np.array_equal(y[:2], x[:2])


def test_out_of_bounds_in_the_plain_build(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doors know the arrays in every build."""
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    plain = kernel.built("plain")
    for kind in (0, 1, 2, 3, 4):
        said = SAID[kind].split(" at HERE")[0].split(", at")[0].rstrip(",")
        with pytest.raises(KernelFault, match=rf"^kernel rules, block 1: {said}"):
            run(plain, kind, 1)
        run(plain, kind, 0)


def test_reads_of_unwritten_shared_memory_that_change_nothing_are_no_fault() -> None:
    text = """#include "types.cuh"
    extern "C" __global__ void discards(float* y) {
        int offset = 0;
        float* shared = shared_array<float>(offset, 64);
        if (threadIdx.x < 32) shared[threadIdx.x] = 1.0f;
        __syncthreads();
        const float read = shared[threadIdx.x];
        store(y, threadIdx.x, threadIdx.x < 32 ? read : 2.0f);
    }"""
    y = np.zeros(64, np.float32)
    launch(compiled(text, "discards"), 1, 64, 256, [y])
    assert np.array_equal(y, np.repeat(np.float32([1, 2]), 32))


def test_a_fault_without_a_tool_for_places(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelFault, match=r"out-of-bounds 4-byte load at an unknown place \(.*binutils"):
        run(kernel, 0, 1)


def test_what_was_written_before_a_fault_stays(kernel: Kernel) -> None:
    x, y, workspace = random(3, 64), np.full((3, 64), np.nan, np.float32), np.zeros((3, 64), np.float32)
    with pytest.raises(KernelFault, match=re.escape("block 1")):
        launch(kernel, 3, 64, 256, [x, y, workspace, np.zeros(3, np.uint32)], [0, 1], workspace=[2])
    assert np.isfinite(y[0]).all()
