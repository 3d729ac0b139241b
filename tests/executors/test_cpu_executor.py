"""The CPU executor: fibers, barriers, shuffles, faults, compilers and their cache."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cunorm.cli.main import main
from cunorm.core import devices
from cunorm.core.errors import CompileError, KernelFault, NoCompilerError
from cunorm.executors.cpu import executor, launch_memory
from cunorm.executors.cpu import kernel as cpu_kernel
from cunorm.jit import cxx
from tests.support.paths import KERNELS

STUCK = """extern "C" __global__ void stuck(int* word) {
    while (threadIdx.x == 0 && atomicMax(word, 0) == 0) {
    }
}"""
ORDERS = ["ascending", "descending", "random", "random:7", "random:12345"]
COMPILERS = {compiler.name: compiler for compiler in cxx.present()}
UCONTEXT = ("CUNORM_CPU_UCONTEXT",)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache folder for all tests of this file, so that they do not depend on earlier runs; default settings."""
    folder = tmp_path_factory.getbasetemp() / "cpu_executor"
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(folder))
    for name in ("CUNORM_CXX", "CUNORM_CPU_ORDER", "CUNORM_CPU_CORES", "CUNORM_CPU_DEVICE", "CUNORM_CPU_BUILD"):
        monkeypatch.delenv(name, raising=False)
    return folder


def kernel(name: str, above: str = "", **options: Any) -> executor.Kernel:
    return executor.compile(above + (KERNELS / f"{name}.cu").read_text(), name, **options)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def ramp(count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(count).astype(dtype)


# ---- barriers and shared memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_barriers_order_shared_memory(order: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    x, y = ramp(3 * threads), np.zeros(3 * threads, np.float32)
    for rounds in (1, 4):
        executor.launch(kernel("reverse"), 3, threads, 4 * threads, [address(x), address(y), rounds])
        turned = x.reshape(3, threads)[:, :: -1 if rounds % 2 else 1]
        np.testing.assert_array_equal(y.reshape(3, threads), turned)


def test_a_missing_barrier_gives_wrong_results_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = ramp(64), np.zeros(64, np.float32)
    for order in ORDERS:
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        executor.launch(kernel("racy"), 1, 64, 256, [address(x), address(y)])
        assert not np.array_equal(y, x[::-1]), order
        assert np.isnan(y).any(), order  # a thread read a word before it was written; the poison is NaN


def test_shared_memory_is_poisoned_before_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_CORES", "1")
    seen = np.zeros(4 * 64, np.uint32)
    for words in (64, 1000, 227 * 256):
        seen[:] = 0
        executor.launch(kernel("poison"), 4, 64, 4 * words, [address(seen), words])
        assert (seen == 0xFFFFFFFF).all()


def test_random_orders_differ_by_seed_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """extern "C" __global__ void turns(int* turn) {
        turn[1 + blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(turn, 1);
    }"""
    compiled = executor.compile(text, "turns")
    monkeypatch.setenv("CUNORM_CPU_CORES", "1")

    def turns(order: str) -> list[int]:
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        out = np.zeros(1 + 2 * 64, np.int32)
        executor.launch(compiled, 2, 64, 0, [address(out)])
        return out[1:].tolist()

    assert turns("ascending") == list(range(128))
    assert turns("descending") == [*range(63, -1, -1), *range(127, 63, -1)]
    assert turns("random:1") == turns("random:1") != turns("random:2")
    assert sorted(turns("random:1")) == list(range(128))
    first, second = turns("random:1")[:64], turns("random:1")[64:]
    assert first != [turn - 64 for turn in second]  # every block has its own permutation
    assert turns("random:1")[:32] != sorted(turns("random:1")[:32])


@pytest.mark.parametrize("order", ["sideways", "random:", "random:x", "ascending:3", "Random"])
def test_an_unknown_order_is_refused(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    with pytest.raises(ValueError, match=r"CUNORM_CPU_ORDER: .*expected ascending, descending, random or random:SEED"):
        executor.launch(kernel("reverse"), 1, 32, 128, [0, 0, 0])


# ---- warps ----------------------------------------------------------------------------------------------------------


def shuffled(kind: int, lane: int, operand: int, width: int) -> int:
    """The lane that a shuffle reads, according to the CUDA C++ programming guide."""
    first = lane // width * width
    if kind == 0:
        return first + operand % width
    if kind == 1:
        return lane ^ operand if (lane ^ operand) < first + width else lane
    source = lane - operand if kind == 2 else lane + operand
    return source if first <= source < first + width else lane


@pytest.mark.parametrize(
    ("c_type", "dtype"),
    [("int", "i4"), ("unsigned", "u4"), ("float", "f4"), ("double", "f8"), ("long long", "i8")],
)
def test_shuffles(c_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = kernel("shuffles", f"typedef {c_type} T;\n")
    rng = np.random.default_rng(5)
    x = rng.integers(-(2**31), 2**31, 64).astype(dtype)
    if x.itemsize == 8:
        x = x * 3 + x.dtype.type(1) / 3 if dtype == "f8" else x * 2**31 + 12345
    y = np.zeros_like(x)
    for kind in range(4):
        for width in (1, 2, 4, 8, 16, 32):
            monkeypatch.setenv("CUNORM_CPU_ORDER", ORDERS[(kind + width) % 3])
            # In __shfl_sync each lane chooses its source. In xor, up and down all lanes use one distance, as is usual.
            operand = rng.integers(0, 32, 64) if kind == 0 else np.full(64, rng.integers(0, 32))
            operand = operand.astype(np.int32)
            executor.launch(compiled, 1, 64, 0, [address(x), address(y), address(operand), kind, width])
            source = [i // 32 * 32 + shuffled(kind, i % 32, int(operand[i]), width) for i in range(64)]
            np.testing.assert_array_equal(y, x[source], f"kind {kind}, width {width}, operand {operand}")


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_lanes_progress_independently(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    y = np.zeros((5, 32), np.int32)
    executor.launch(kernel("masks"), 1, 32, 0, [address(y)])
    lane = np.arange(32)
    for r in range(3):
        np.testing.assert_array_equal(y[r], 100 * r + (lane ^ (1 << r)))
    halves = np.where(lane < 16, sum(range(16)), lane ^ 15)
    np.testing.assert_array_equal(y[3], halves)
    np.testing.assert_array_equal(y[4], np.where(lane < 16, halves[(lane + 16) % 32], halves))


@pytest.mark.parametrize("order", ORDERS[:3])
def test_votes(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    for chance in (0.0, 0.1, 0.5, 0.9, 1.0):
        predicate = (np.random.default_rng(3).random(64) < chance).astype(np.int32) * 256
        y = np.zeros((3, 64), np.uint32)
        executor.launch(kernel("votes"), 1, 64, 0, [address(predicate), address(y)])
        warps, halves = (predicate != 0).reshape(2, 32), (predicate != 0).reshape(4, 16)
        ballots = [sum(1 << i for i in range(32) if warp[i]) for warp in warps]
        np.testing.assert_array_equal(y[0], np.repeat(np.array(ballots, np.uint32), 32))
        np.testing.assert_array_equal(y[1], np.repeat(halves.any(1), 16))
        np.testing.assert_array_equal(y[2], np.repeat(halves.all(1), 16))


# ---- launches -------------------------------------------------------------------------------------------------------


def test_arguments_reach_the_kernel_exactly() -> None:
    integers, reals = np.zeros(6, np.int64), np.zeros(2)
    compiled = kernel("arguments")
    assert compiled.signature == "PqdPdqP"
    values = [address(integers), -(2**63) + 1, 1e-5, address(reals), 2, 2**62 + 1, 0]
    executor.launch(compiled, 7, 96, 0, values)
    assert integers.tolist() == [-(2**63) + 1, 2**62 + 1, 1, 7096, 4, 0]
    assert reals.tolist() == [1e-5, 2.0]
    executor.launch(compiled, 7, 96, 0, [*values[:2], np.float64(-0.0), *values[3:]])
    assert np.signbit(reals[0])


@pytest.mark.parametrize(
    "arguments", [(0, 1.5, 0.0, 0, 0.0, 0, 0), (0, 1, 0.0, 0, 0.0, 0), (0,) * 8, (0, 2**63, 0, 0, 0, 0, 0)]
)
def test_wrong_arguments_are_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(TypeError, match=r"arguments: \(0.* arguments takes \(pointer, long long, double, pointer,"):
        executor.launch(kernel("arguments"), 1, 32, 0, arguments)


@pytest.mark.parametrize(
    ("grid", "threads", "shared", "blocks", "message"),
    [
        (0, 32, 0, None, r"grid: 0 blocks, expected 1 to"),
        (2**31, 32, 0, None, r"grid: 2147483648 blocks"),
        (1, 0, 0, None, r"threads: 0, expected whole warps"),
        (1, 48, 0, None, r"threads: 48, expected whole warps"),
        (1, 1056, 0, None, r"threads: 1056, .* up to 1024"),
        (1, 32, -1, None, r"shared_bytes: -1"),
        (1, 32, 227 * 1024 + 1, None, r"shared_bytes: 232449, expected 0 to 232448"),
        (4, 32, 0, (2, 5), r"blocks: \(2, 5\)"),
        (4, 32, 0, (3, 2), r"blocks: \(3, 2\)"),
    ],
)
def test_illegal_launch(grid: int, threads: int, shared: int, blocks: tuple[int, int] | None, message: str) -> None:
    ran = np.zeros(4 * 32, np.int32)
    with pytest.raises(ValueError, match=message):
        executor.launch(kernel("blocks"), grid, threads, shared, [address(ran), 0], blocks=blocks)
    assert not ran.any()


def test_limits_of_the_device_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert executor.limits() is devices.KNOWN["H200"]
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "a100")
    assert executor.limits() is devices.KNOWN["A100"]
    with pytest.raises(ValueError, match="shared_bytes: 200000, expected 0 to 166912"):
        executor.launch(kernel("blocks"), 1, 32, 200000, [0, 0])
    with pytest.raises(ValueError, match="ordinal: 1"):
        executor.limits(1)
    executor.synchronise()


@pytest.mark.parametrize("cores", ["1", "2", "5"])
def test_every_block_runs_once(cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_CORES", cores)
    for grid, work in ((1, 0), (2, 0), (3, 2000), (500, 0), (300, 500), (50000, 0)):
        ran = np.zeros(grid * 64, np.int32)
        executor.launch(kernel("blocks"), grid, 64, 0, [address(ran), work])
        assert (ran == 1).all(), (grid, work)


def test_a_launch_of_part_of_a_grid() -> None:
    for first, last in ((0, 0), (0, 1), (3, 9), (99, 100), (0, 100), (1, 100)):
        ran = np.zeros((100, 32), np.int32)
        executor.launch(kernel("blocks"), 100, 32, 0, [address(ran), 1000], blocks=(first, last))
        assert (ran[first:last] == 1).all()
        assert ran.sum() == 32 * (last - first)


def test_large_launches_use_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    genuine = executor._run
    monkeypatch.setattr(executor, "_run", lambda *a: (used.append(len(a[2])), genuine(*a))[1])
    monkeypatch.setenv("CUNORM_CPU_CORES", "2")
    ran = np.zeros((200, 64), np.int32)
    executor.launch(kernel("blocks"), 200, 64, 0, [address(ran), 3000])
    assert used == [1, 2]  # the first block runs alone
    for _ in range(5):  # on a busy machine a small launch may be timed as a large one, but not every time
        used.clear()
        executor.launch(kernel("blocks"), 5, 32, 0, [address(ran), 0])
        if used == [1, 1]:
            return
    pytest.fail("a launch of a few microseconds was spread")


@pytest.mark.parametrize(("others", "threads"), [(0, 4), (1, 3), (3, 1), (9, 1)])
def test_simultaneous_launches_share_the_cores(others: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    genuine = executor._run
    monkeypatch.setattr(executor, "_run", lambda *a: (used.append(len(a[2])), genuine(*a))[1])
    monkeypatch.setattr(executor, "SPREAD_SECONDS", 0.0)
    monkeypatch.setenv("CUNORM_CPU_CORES", "4")
    ran = np.zeros((200, 64), np.int32)
    elsewhere = [launch_memory.take(32, 4096, 4096) for _ in range(others)]  # as launches in other threads take them
    for _ in range(2):
        executor.launch(kernel("blocks"), 200, 64, 0, [address(ran), 0])
    assert used == [1, threads] * 2
    assert launch_memory.lent() == len(elsewhere)
    while elsewhere:
        launch_memory.give_back(elsewhere.pop())
    assert launch_memory.lent() == 0


def test_scratches_are_returned_after_a_fault() -> None:
    """Scratches are returned even if the caller keeps the exception, whose traceback keeps the launch's variables."""
    compiled, ran, kept = executor.compile(STUCK, "stuck"), np.zeros(1, np.int32), []
    for _ in range(3):
        with pytest.raises(KernelFault) as caught:
            executor.launch(compiled, 4, 32, 0, [address(ran)])
        kept.append(caught.value)
    assert launch_memory.lent() == 0


def test_a_launch_without_memory_for_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that needs more memory than is cached raises MemoryError; a launch that does not still works.

    Later launches work too, even if the allocation failed halfway.
    """
    ran = np.zeros(1024, np.int32)
    compiled, arguments = kernel("blocks"), [address(ran), 0]

    class Halfway(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise MemoryError

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for broken in (fails, Halfway):
        for threads in (32, 1024):
            launch_memory._free.clear()
            executor.launch(compiled, 1, 32, 0, arguments)
            with monkeypatch.context() as patch:
                patch.setattr(mmap, "mmap", broken)
                if threads == 1024:
                    with pytest.raises(MemoryError):
                        executor.launch(compiled, 1, threads, 0, arguments)
                else:
                    executor.launch(compiled, 1, threads, 0, arguments)
            ran[:] = 0
            executor.launch(compiled, 1, 1024, 0, arguments)
            assert (ran == 1).all()


def test_operating_system_threads_of_a_launch_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks except the first, which runs alone, wait until one block per operating-system thread has begun."""
    text = """extern "C" __global__ void meet(int* begun, long long count) {
        if (threadIdx.x == 0 && blockIdx.x != 0) {
            atomicAdd(begun, 1);
            while (atomicMax(begun, 0) < count) {
            }
        }
    }"""
    compiled = executor.compile(text, "meet")
    monkeypatch.setattr(executor, "SPREAD_SECONDS", 0.0)
    monkeypatch.setenv("CUNORM_CPU_CORES", "3")
    for _ in range(20):
        begun = np.zeros(1, np.int32)
        executor.launch(compiled, 10, 32, 0, [address(begun), 3])
        assert begun[0] == 9
    begun = np.zeros(1, np.int32)
    with pytest.raises(KernelFault, match=r"kernel meet, block \d: deadlock: thread 0 waits at a polled word"):
        executor.launch(compiled, 10, 32, 0, [address(begun), 4])


@pytest.mark.parametrize("order", ORDERS[:3])
def test_atomics_on_several_operating_system_threads(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    monkeypatch.setenv("CUNORM_CPU_CORES", "3")
    monkeypatch.setattr(executor, "SPREAD_SECONDS", 0.0)
    grid, threads = 1000, 128
    n = grid * threads
    counter, total, maximum = np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.full(1, -2000, np.int32)
    taken, swapped, locked = np.zeros(n, np.uint32), np.zeros(2, np.int32), np.array([-1, 0], np.int32)
    arrays = [counter, total, maximum, taken, swapped, locked]
    executor.launch(kernel("atomics"), grid, threads, 0, [address(a) for a in arrays])
    assert counter[0] == n
    assert (taken == 1).all()
    assert total[0] == 50 * ((n << 33) + n * (n - 1) // 2)
    assert maximum[0] == n - 1 - 1000
    assert (int(swapped[0]) + int(swapped[1]) - n * (n - 1) // 2) % 2**32 == 0
    assert 0 <= locked[0] < n
    assert locked[1] == 1


# ---- faults ---------------------------------------------------------------------------------------------------------

FAULTS = {
    0: r"deadlock: thread 1 waits at __syncthreads \(faults\.cu:9\), thread 0 has ended$",
    1: r"divergent barrier: thread \d+ waits at __syncthreads \(faults\.cu:1[35]\), "
    r"thread \d+ waits at __syncthreads \(faults\.cu:1[35]\)$",
    2: r"a lane of the mask is missing: thread 0 waits at __shfl_xor_sync with mask 0xffffffff \(faults\.cu:19\), "
    r"thread 7 has ended$",
    3: r"a lane of the mask is missing: thread 32 waits at __shfl_down_sync with mask 0xffffffff \(faults\.cu:25\), "
    r"thread 40 waits at __syncthreads \(faults\.cu:23\)$",
    4: r"thread 5: misaligned 16-byte load at 0x[0-9a-f]*4$",
    5: r"thread 33: misaligned 4-byte store at 0x[0-9a-f]*2$",
    6: r"thread 6: wrong by 42$",
    7: r"a lane of the mask is missing: thread 0 waits at __shfl_sync with mask 0x00000003 \(faults\.cu:38\), "
    r"thread 1 waits at __shfl_sync with mask 0x0000000f \(faults\.cu:38\)$",
    8: r"lanes of one mask disagree: thread \d+ waits at __a(ny|ll)_sync with mask 0x00000003 \(faults\.cu:41\), "
    r"thread \d+ waits at __a(ny|ll)_sync with mask 0x00000003 \(faults\.cu:41\)$",
    9: r"thread \d+: __shfl_sync \(faults\.cu:44\): lane \d+, the calling lane, is not in mask 0x00000001$",
    10: r"thread \d+: __shfl_sync \(faults\.cu:47\): lane 5, from which it reads, is not in mask 0x00000003$",
    11: r"thread \d+: __shfl_xor_sync \(faults\.cu:50\): width 12, expected 1, 2, 4, 8, 16 or 32$",
    12: r"thread 1: __trap\(\)$",
    13: r"a lane of the mask is missing: thread 0 waits at __syncwarp with mask 0x0000001f \(faults\.cu:56\), "
    r"thread 4 has ended$",
}


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("kind", FAULTS)
def test_fault_messages(kind: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    data = np.zeros(64 + 2)
    aligned = address(data) + -address(data) % 16
    with pytest.raises(KernelFault, match=rf"^kernel faults, block 3: ({FAULTS[kind]})"):
        executor.launch(kernel("faults"), 5, 64, 0, [aligned, kind])
    ran = np.zeros(64, np.int32)  # a fault does not affect later launches
    executor.launch(kernel("blocks"), 1, 64, 0, [address(ran), 0])
    assert (ran == 1).all()


def test_fault_message_of_a_helper_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_CORES", "3")
    monkeypatch.setattr(executor, "SPREAD_SECONDS", 0.0)
    data = np.zeros(66)
    for _ in range(20):
        with pytest.raises(KernelFault, match="kernel faults, block 3: thread 6: wrong by 42"):
            executor.launch(kernel("faults"), 50, 64, 0, [address(data), 6])


def test_a_frame_too_large_for_a_fiber_does_not_compile() -> None:
    text = """extern "C" __global__ void large(char* data, long long n) {
        volatile char held[40000];
        for (long long i = 0; i < n; ++i) held[i] = data[i];
        __syncthreads();
        for (long long i = 0; i < n; ++i) data[i] = held[n - i];
    }"""
    for compiler in (cxx.chosen(), COMPILERS.get("clang++", cxx.chosen())):
        with pytest.raises(CompileError, match="frame"):
            executor.compile(text, "large", compiler=compiler)


# ---- compilers and the cache ----------------------------------------------------------------------------------------


def check_layer_norm(compiled: executor.Kernel) -> bytes:
    x = np.random.default_rng(1).standard_normal((7, 1000), dtype=np.float32) + 3
    y = np.zeros_like(x)
    executor.launch(compiled, 7, 256, 256, [address(x), address(y), 1000, 1e-5])
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, expected, atol=3e-6)
    return y.tobytes()


@pytest.mark.parametrize("defines", [(), UCONTEXT], ids=["assembly", "ucontext"])
@pytest.mark.parametrize("name", ["g++", "clang++", "zig"])
def test_all_compilers_give_bitwise_equal_results(
    name: str, defines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in COMPILERS:
        pytest.skip(f"no {name} on this machine")
    bits = check_layer_norm(kernel("layer_norm", compiler=COMPILERS[name], defines=defines))
    assert bits == check_layer_norm(kernel("layer_norm"))
    monkeypatch.setenv("CUNORM_CPU_ORDER", "random:3")
    assert bits == check_layer_norm(kernel("layer_norm", compiler=COMPILERS[name], defines=defines))


@pytest.mark.parametrize("name", ["g++", "clang++", "zig"])
def test_products_are_rounded_before_they_are_added(name: str) -> None:
    """Compilers contract a * b + c differently. Without contraction the results of all compilers are bitwise equal."""
    if name not in COMPILERS:
        pytest.skip(f"no {name} on this machine")
    text = 'extern "C" __global__ void square(float* x) { x[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x] - x[32]; }'
    x = np.full(33, 1 + 2.0**-12, np.float32)
    x[32] = x[0] * x[0]
    executor.launch(executor.compile(text, "square", compiler=COMPILERS[name]), 1, 32, 0, [address(x)])
    assert (x[:32] == 0).all()


@pytest.mark.parametrize("kind", [0, 3, 6])
def test_faults_under_ucontext(kind: int) -> None:
    compiled = kernel("faults", defines=UCONTEXT)
    assert "swapcontext" in compiled.path.read_bytes().decode("latin1")
    with pytest.raises(KernelFault, match=FAULTS[kind]):
        executor.launch(compiled, 5, 64, 0, [address(np.zeros(66)), kind])


def test_masks_under_ucontext() -> None:
    bits = []
    for defines in ((), UCONTEXT):
        y = np.zeros((5, 32), np.int32)
        executor.launch(kernel("masks", defines=defines), 1, 32, 0, [address(y)])
        bits.append(y.tobytes())
    assert bits[0] == bits[1] != bytes(640)


def test_compile_errors_name_file_and_line() -> None:
    text = '#line 41 "somewhere.cuh"\nextern "C" __global__ void broken(long long n) {\n    n = nonsense;\n}\n'
    with pytest.raises(CompileError, match=r"(?s)^broken does not compile with .*somewhere\.cuh:42.*nonsense"):
        executor.compile(text, "broken")
    with pytest.raises(CompileError, match=r"absent\.cu:|entry:.*absent|'absent'"):
        executor.compile("", "absent")
    with pytest.raises(CompileError, match="pointers, long long and double only"):
        executor.compile('extern "C" __global__ void narrow(int n) {}', "narrow")
    long = "\n".join(f"int a{i} = b{i};" for i in range(100))
    with pytest.raises(CompileError, match=r"more lines$") as caught:
        executor.compile(long + '\nextern "C" __global__ void many() {}', "many")
    assert len(str(caught.value).splitlines()) <= 42


def test_kernels_may_define_names_of_libc_and_cannot_include_the_cpp_library() -> None:
    executor.compile(
        """static __device__ bool finite(double x) { return x - x == 0.0; }
        static __device__ float gamma(double x) { return x; }
        extern "C" __global__ void names(float* x) { x[0] = finite(x[0]) ? gamma(1.0f) : 0.0f; }""",
        "names",
    )
    with pytest.raises(CompileError, match="vector"):
        executor.compile('#include <vector>\nextern "C" __global__ void fat() {}', "fat")


#: The functions that CUDA and the C library share, with a function of Python on floats.
SHARED = {
    **{name: getattr(math, name) for name in ("exp", "log", "sqrt", "fabs", "floor", "ceil", "tanh", "erf", "pow")},
    **{
        "exp2": lambda x: 2**x,
        "log2": math.log2,
        "rint": round,
        "fmax": max,
        "fmin": min,
        "fma": lambda x, y, z: x * y + z,
    },
}


@pytest.mark.parametrize(("c_type", "suffix"), [("double", ""), ("float", "f")])
def test_functions_that_cuda_and_the_c_library_share(c_type: str, suffix: str) -> None:
    """They are declared without <math.h>. Only few and small headers of the C library precede a kernel."""
    counts = {name: {"pow": 2, "fmax": 2, "fmin": 2, "fma": 3}.get(name, 1) for name in SHARED}
    calls = [f"{name}{suffix}({', '.join('xyz'[:count])})" for name, count in counts.items()]
    body = "".join(f"to[{place}] = {call};" for place, call in enumerate(calls))
    given = f"{c_type} x = 1.75, y = 0.5, z = -3;"
    text = f'extern "C" __global__ void shared(double* to) {{ {given} if (threadIdx.x == 0) {{ {body} }} }}'
    kernel, found = executor.compile(text, "shared"), np.zeros(len(calls))
    executor.launch(kernel, 1, 32, 0, [found.ctypes.data])
    wanted = [function(*(1.75, 0.5, -3.0)[: counts[name]]) for name, function in SHARED.items()]
    np.testing.assert_allclose(found, wanted, rtol=1e-6 if suffix else 1e-15)
    source = kernel.path.with_name("kernel.cpp").read_text(encoding="utf-8")
    assert {*re.findall(r"#include <(.*)>", source)} == {"stddef.h", "stdint.h", "string.h", "ucontext.h"}


def test_a_second_compile_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "new"))
    genuine, runs = cxx._run, []
    monkeypatch.setattr(cxx, "_run", lambda *a: (runs.append(a), genuine(*a)))
    first = kernel("votes")
    assert len(runs) == 3  # the runtime is compiled, then the kernel is compiled and linked
    assert kernel("votes") is first  # cached in the process
    cpu_kernel._kernels.clear()
    again = kernel("votes")
    assert again.path == first.path  # cached on disk
    assert len(runs) == 3
    assert (KERNELS / "votes.cu").read_text() in first.path.with_name("kernel.cpp").read_text()
    (runtime,) = (tmp_path / "new" / "cpu").glob("runtime-*")
    assert {*(tmp_path / "new" / "cpu").iterdir()} == {first.path.parent, runtime}  # no work folder

    kernel("votes", "// one more line\n")
    assert len(runs) == 5
    monkeypatch.setattr(cxx, "processor", lambda: "another machine that shares the folder")
    cpu_kernel._kernels.clear()
    kernel("votes")
    assert len(runs) == 8


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "file"))
    words = r"cannot write the cache folder .*file \(Not a directory\); set CUNORM_CACHE_DIR"
    with pytest.raises(CompileError, match=words):
        kernel("votes")
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    sealed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(sealed))
    if os.access(sealed, os.W_OK):
        return  # root may write to every folder
    with pytest.raises(CompileError, match="set CUNORM_CACHE_DIR"):
        kernel("votes")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cxx.importlib.util, "find_spec", lambda name: None)
    assert cxx.present() == []
    with pytest.raises(CompileError, match=r"found none of g\+\+, clang\+\+, zig; .*pip install 'cunorm\[cpu\]'"):
        executor.compile('extern "C" __global__ void alone() {}', "alone")
    monkeypatch.setenv("CUNORM_CXX", "/nowhere/c++")
    with pytest.raises(CompileError, match=r"CUNORM_CXX: '/nowhere/c\+\+' does not run"):
        executor.compile('extern "C" __global__ void alone() {}', "alone")


@pytest.mark.parametrize("text", ['g++ "', "g++ 'x", "g++ \\\\\\"])
def test_a_compiler_that_is_no_command(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CXX", text)
    with pytest.raises(
        CompileError, match=r"^CUNORM_CXX: .* is no command: no (closing|escaped) .*; unset it, or install"
    ):
        executor.compile('extern "C" __global__ void alone() {}', "alone")
    assert cxx.present() == [one for one in COMPILERS.values() if one.name != text]


def test_a_compiler_script_whose_interpreter_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports such a script as a missing file. The message must not blame the cache folder."""
    script = tmp_path / "c++"
    script.write_text(f'#!/bin/sh\nexec {" ".join(cxx.chosen().command)} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CUNORM_CXX", str(script))
    assert cxx.chosen().command == (str(script),)
    script.write_text(script.read_text().replace("/bin/sh", "/nowhere/sh"))
    with pytest.raises(
        CompileError, match=r"alone: the compiler .*c\+\+ does not run: .*the interpreter .*; install a C"
    ):
        executor.compile('extern "C" __global__ void alone(float* gone) {}', "alone")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("asked", [None, "g++ -march=native"])
def test_a_compiler_that_cannot_be_started_now(
    number: int, asked: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error does not say that the compiler is missing, and the next call finds it.

    A compilation that cannot start raises the same error.
    """
    if asked is not None:
        monkeypatch.setenv("CUNORM_CXX", asked)
    found = cxx.chosen()

    def run(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    text = f'extern "C" __global__ void alone(float* busy) {{}}  // {number} {asked}'
    with monkeypatch.context() as patched:
        patched.setattr(cxx.subprocess, "run", run)
        with pytest.raises(CompileError, match=r"^alone: the compiler g\+\+.* cannot be started now: .*; call again"):
            executor.compile(text, "alone", compiler=found)
        cxx._version.cache_clear()
        with pytest.raises(
            CompileError, match=r"^the compiler .*g\+\+ cannot be started now: .*; call again"
        ) as caught:
            executor.compile(text, "alone")
        assert not isinstance(caught.value, NoCompilerError)
        assert main(["doctor"]) in (0, 1)
        assert "cannot be started now" in " ".join(capsys.readouterr().out.split())
    assert cxx.chosen() == found
    executor.compile(text, "alone")


def test_the_compiler_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cxx.present(), "this file's other tests need a compiler"
    assert cxx.chosen() == cxx.present()[0]
    last = cxx.present()[-1]
    monkeypatch.setenv("CUNORM_CXX", " ".join(last.command))
    assert cxx.chosen().command == last.command
    assert cxx.present()[0] == cxx.chosen()
    for compiler in cxx.present():
        assert Path(compiler.command[0]).is_absolute()
        assert any(character.isdigit() for character in compiler.version)


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_speed_of_layer_norm_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a fifth of the speed of an idle core of 2023, so that it detects a lost optimisation.

    A busy machine does not fail the test.
    """
    monkeypatch.setenv("CUNORM_CPU_CORES", "1")
    x = np.ones((64, 4096), np.float32)
    y = np.empty_like(x)
    compiled, best = kernel("layer_norm"), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        executor.launch(compiled, 64, 256, 256, [address(x), address(y), 4096, 1e-5])
        best = min(best, time.perf_counter() - began)
    assert x.size / best > 5e6, f"{x.size / best / 1e6:.1f} million elements a second"
