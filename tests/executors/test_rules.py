"""The checked build reports every broken rule with its line, in every order of threads; no false faults."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cunorm.core.errors import KernelFault
from cunorm.executors.cpu.executor import Kernel
from tests.kernels.kernel_checks import ORDERS, compiled, launch, random
from tests.support.paths import KERNELS

TEXT = {stem: (KERNELS / f"{stem}.cu").read_text(encoding="utf-8") for stem in ("rules", "async_rules")}
#: Dynamic shared memory of a block of async_rules.cu.
BYTES = 4096

#: Expected fault message for each kind of rule in rules.cu. "HERE" stands for file and line in the kernel.
SAID = {
    0: r"thread 5: out-of-bounds 4-byte load at HERE: it begins 768 bytes after the start of array0, whose size is ",
    1: r"thread 5: out-of-bounds 4-byte load at HERE: it begins 4 bytes before the start of array0",
    2: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 780 bytes after the start of array1",
    3: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 4768 bytes after the start of array2",
    4: r"thread 4: misaligned 16-byte load at 0x[0-9a-f]+, at HERE",
    5: r"thread 5: misaligned access \(HERE\): address 0x[0-9a-f]+ is not a multiple of 16 bytes",
    6: r"thread 5: out-of-bounds 4-byte store at HERE: byte 256 of shared memory, but the launch allocates 256",
    7: r"thread [89]: shared-memory race at byte 32: it writes at HERE what thread [89] wrote at HERE, and no ",
    8: r"thread \d+: shared-memory race at byte \d+: it (reads|writes) at \S+ what thread \d+ (read|wrote) at \S+, ",
    9: r"thread \d+: shared-memory race at byte \d+: it (reads|writes) at \S+ what thread \d+ (read|wrote) at \S+, ",
    10: r"thread 56: reads byte 28 of shared memory at HERE, which no thread wrote, and the results depend on such ",
    11: r"thread 5: 4-byte load at HERE of array0 that bypasses load and store",
    12: r"divergent barrier: thread \d+ waits at __syncthreads \(rules.cu:\d+\), thread \d+ waits at __syncthreads",
    13: r"deadlock: thread 0 waits at __syncthreads \(HERE\), thread 63 has ended",
    14: r"a lane of the mask is missing: thread \d+ waits at __shfl_sync with mask 0xffffffff \(HERE\), thread \d+ ",
    15: r"thread \d+: __shfl_sync \(HERE\): lane 20, from which it reads, is not in mask 0x0000ffff",
    16: r"deadlock: thread 0 waits at a polled word \(HERE\)",
    17: r"thread 5: out-of-bounds 4-byte store at HERE",
    18: r"thread 5: out-of-bounds 4-byte store at HERE: it begins 4 bytes before the start of array0",
    19: r"thread 0: shared-memory race at byte 0: it writes at HERE what thread \d+ read at \S+, and no barrier",
}


#: Expected fault message for each kind of rule in async_rules.cu.
SAID_ASYNC = {
    0: r"thread 5: mbarrier at byte 0 of shared memory used at HERE before its initialisation",
    1: r"thread 0: mbarrier at byte 0 of shared memory: more arrivals in a phase, at HERE, than the 1 it was ",
    2: r"thread 5: mbarrier at 0x[0-9a-f]+, at HERE: expected a multiple of 8 bytes in shared memory",
    3: r"thread 5: mbarrier at 0x[0-9a-f]+, at HERE: expected a multiple of 8 bytes in shared memory",
    4: r"thread 4: asynchronous copy at HERE of 16 bytes between byte 16 of shared memory and 0x[0-9a-f]+, expected ",
    5: r"thread 4: asynchronous copy at HERE: 0x[0-9a-f]+ is not in shared memory",
    6: r"thread 4: the thread ends while a copy of 16 bytes, issued at HERE, is in flight: no thread waited",
    7: r"thread 0: bulk load at HERE of 8 bytes between byte 16 of shared memory and 0x[0-9a-f]+, expected ",
    8: r"thread 0: bulk store at HERE reads byte 1040 of shared memory, which thread 0 wrote at \S+ without a ",
    9: r"thread 5: store at HERE of shared memory of another block of the cluster, before the cluster's first barrier",
    10: r"thread \d+: store at HERE of shared memory of a block that has ended",
    11: r"thread \d+: it arrives at the cluster's barrier twice, at HERE, without a wait between",
    12: r"thread \d+: it waits at the cluster's barrier \(HERE\), where it has not arrived",
    13: r"thread 5: byte 1040 of shared memory in the cluster's block 2, at HERE: expected .* a rank below 2",
    14: r"thread 5: out-of-bounds 4-byte store at HERE: byte 4096 of shared memory, but the launch allocates 4096",
    15: r"thread 5: store at HERE of shared memory of a block that is not in its cluster",
    16: r"thread \d+: the kernel's arrays need \d+ bytes of shared memory at HERE, but the launch allocates 4096",
    17: r"thread 5: misaligned 8-byte store at 0x[0-9a-f]+, at HERE",
    18: r"thread 5: division by zero \(HERE\)",
    19: r"thread 5: out-of-bounds 4-byte store at HERE, outside static shared memory",
    20: r"thread 5: loads from one address 1048576 times in a row at HERE: to wait, use load_acquire",
    21: r"thread 0: shared-memory race at byte \d+: it writes at HERE what thread \d+ of the cluster's block 1 read",
    22: r"thread \d+: shared-memory race at byte 1040: it (writes at \S+ what .* read|reads at HERE what .* wrote)",
    23: r"thread \d+: shared-memory race at byte \d+: it (writes at HERE what .* read|reads at \S+ what .* HERE)",
    24: r"thread 5: out-of-bounds 4-byte load at HERE: it begins \d+ bytes after the start of array",
    25: r"thread 5: out-of-bounds 4-byte store at HERE: byte 4096 of shared memory, but the launch allocates 4096",
    26: r"deadlock: thread 5 of block 1 waits at a polled word \(HERE\)",
}
RULES = [("rules", kind, said) for kind, said in SAID.items()]
RULES += [("async_rules", kind, said) for kind, said in SAID_ASYNC.items()]
NAMED = [f"{stem}-{kind}" for stem, kind, _ in RULES]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return {stem: compiled(text, stem, threads=64) for stem, text in TEXT.items()}


@pytest.fixture
def kernel(kernels: dict[str, Kernel]) -> Kernel:
    return kernels["rules"]


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")


def run(kernel: Kernel, kind: int, broken: int) -> tuple[np.ndarray, np.ndarray]:
    if kernel.name == "async_rules":
        x, y = random(4, 64), np.full((4, 64), np.nan, np.float32)
        numbers = [0, kind, broken, BYTES]
        launch(kernel, 4, 64, BYTES, [x, y, np.zeros(16, np.uint32)], numbers, cluster=2, resident=2)
        return x, y
    x, y, workspace = random(3, 64), np.full((3, 64), np.nan, np.float32), np.zeros((3, 64), np.float32)
    launch(kernel, 3, 64, 256, [x, y, workspace, np.zeros(3, np.uint32)], [kind, broken], workspace=[2])
    return x, y


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("stem", "kind", "said"), RULES, ids=NAMED)
def test_a_broken_rule_is_a_fault_that_names_its_place(
    kernels: dict[str, Kernel], stem: str, kind: int, said: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    (line,) = (number for number, text in enumerate(TEXT[stem].splitlines(), 1) if f"// rule {kind}:" in text)
    said = said.replace("HERE", rf"{stem}\.cu:{line}")
    with pytest.raises(KernelFault, match=rf"^kernel {stem}, block 1: {said}"):
        run(kernels[stem], kind, 1)
    run(kernels[stem], kind, 0)  # a fault does not affect later launches


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("stem", "kind", "said"), RULES, ids=NAMED)
def test_a_kernel_that_keeps_a_rule_has_no_fault(
    kernels: dict[str, Kernel], stem: str, kind: int, said: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    x, y = run(kernels[stem], kind, 0)
    assert np.isfinite(y).all()
    if stem == "rules" and kind in (2, 3, 6, 7, 12, 13, 16, 17):  # others may store other values
        assert np.array_equal(y[:2], x[:2])
    if stem == "async_rules" and kind not in (18, 21, 22, 23, 24):
        assert np.array_equal(y, x)


def test_illegal_addresses_in_the_plain_build(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` and `store` check bounds and alignment in every build."""
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    plain = kernel.built("plain")
    for kind in (0, 1, 2, 3, 4):
        said = SAID[kind].split(" at HERE")[0].split(", at")[0].rstrip(",")
        with pytest.raises(KernelFault, match=rf"^kernel rules, block 1: {said}"):
            run(plain, kind, 1)
        run(plain, kind, 0)


def test_reads_of_unwritten_shared_memory_that_change_nothing_are_no_fault() -> None:
    text = """#include "common/types.cuh"
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


def test_a_fault_without_binutils_has_an_unknown_place(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelFault, match=r"out-of-bounds 4-byte load at an unknown place \(.*binutils"):
        run(kernel, 0, 1)


def test_stores_before_a_fault_remain(kernel: Kernel) -> None:
    x, y, workspace = random(3, 64), np.full((3, 64), np.nan, np.float32), np.zeros((3, 64), np.float32)
    with pytest.raises(KernelFault, match=re.escape("block 1")):
        launch(kernel, 3, 64, 256, [x, y, workspace, np.zeros(3, np.uint32)], [0, 1], workspace=[2])
    assert np.isfinite(y[0]).all()
