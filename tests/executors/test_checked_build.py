"""The checked build, used by public functions: bitwise equal to the plain build, inputs unchanged, no false faults."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core import settings
from cunorm.core.errors import KernelFault
from cunorm.executors.cpu import executor
from cunorm.jit import cxx
from tests.kernels.kernel_checks import compiled, launch
from tests.support.problems import group_arrays, laid_out, layer_arrays

#: The battery uses these tiles too, so that its builds are reused here.
SPLIT = {"strategy": "split", "threads": 64, "chunk": 16}
BLOCK = {"strategy": "block", "threads": 64, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")


def backward(a: Any, **options: Any) -> Any:
    given = (a.dy, a.x, a.mean, a.rstd, a.gamma)
    return cunorm.group_norm_backward(*given, num_groups=a.groups, **options)


def test_bitwise_equal_to_the_plain_build(monkeypatch: pytest.MonkeyPatch) -> None:
    a = group_arrays((3, 12, 5, 7), 3)
    bits = []
    for build in ("plain", "checked"):
        monkeypatch.setenv("CUNORM_CPU_BUILD", build)
        bits.append([result.tobytes() for result in backward(a, tile=SPLIT)])
    assert bits[0] == bits[1]


@pytest.mark.usefixtures("checked")
def test_arrays_that_share_memory() -> None:
    a = group_arrays((3, 12, 5, 7), 3)
    expected = backward(a, tile=SPLIT)[0].copy()
    out = a.dy
    assert backward(a, tile=SPLIT, out=(out, None, None))[0] is out
    assert np.array_equal(out, expected)
    # gamma is stored at the address of x, and mean and rstd are one array: every input shares its memory with another.
    x = np.abs(a.x)
    cunorm.group_norm(x, 3, x.reshape(-1)[:12], tile=BLOCK)
    same = np.ascontiguousarray(a.rstd)
    cunorm.group_norm_backward(x, x, same, same, x.reshape(-1)[:12], num_groups=3, tile=BLOCK)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("layout", ["reversed", "channels last", "misaligned", "padded rows"])
def test_inputs_are_unchanged_and_may_be_read_only(layout: str) -> None:
    a = group_arrays((3, 12, 5, 7), 3)
    a.x, a.dy = laid_out(np, a.x, layout), laid_out(np, a.dy, layout)
    before = a.x.copy(), a.dy.copy()
    a.x.flags.writeable = a.dy.flags.writeable = a.gamma.flags.writeable = False
    a.check_backward(*backward(a, tile=BLOCK))
    assert np.array_equal(a.x, before[0])
    assert np.array_equal(a.dy, before[1])


def test_one_plan_runs_in_both_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    a = layer_arrays((9, 33), 33)
    tile = {"strategy": "block", "threads": 64, "packs_per_thread": 2, "rows_per_team": 1, "teams_per_block": 1}
    plan = cunorm.plan("layer_norm", shape=(9, 33), dtype="float32", normalized_shape=33, device="cpu", tile=tile)
    for build in ("plain", "checked", "plain"):
        monkeypatch.setenv("CUNORM_CPU_BUILD", build)
        a.check_forward(*plan(a.x, a.gamma, a.beta))


@pytest.mark.usefixtures("checked")
def test_several_threads_at_once() -> None:
    a = group_arrays((3, 12, 5, 7), 3)
    expected = [result.tobytes() for result in backward(a, tile=SPLIT)]
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        found[i] = [result.tobytes() for result in backward(a, tile=SPLIT)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_an_unknown_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "fast")
    with pytest.raises(ValueError, match=r"CUNORM_CPU_BUILD: 'fast', expected plain or checked"):
        settings.cpu_build()
    with pytest.raises(ValueError, match="CUNORM_CPU_BUILD"):
        cunorm.layer_norm(np.ones((3, 5), np.float32), 5)


def test_the_sanitised_build_is_refused_without_the_sanitisers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "sanitised")
    with pytest.raises(ValueError, match=r"'sanitised' needs the sanitiser's library .* pytest --sanitise"):
        cunorm.layer_norm(np.ones((3, 5), np.float32), 5)


def test_a_workspace_that_is_too_small_is_a_fault_in_both_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may access only the plan's ``workspace_nbytes`` bytes, even if the array is larger."""
    a = group_arrays((3, 12, 5, 7), 3)
    plan = cunorm.plan(
        "group_norm_backward",
        shape=(3, 12, 5, 7),
        dtype="float32",
        num_groups=3,
        gamma_dtype="float32",
        tile=SPLIT,
        device="cpu",
    )
    assert plan.workspace_nbytes > 16
    object.__setattr__(plan, "workspace_nbytes", plan.workspace_nbytes - 8)
    for build in ("plain", "checked"):
        monkeypatch.setenv("CUNORM_CPU_BUILD", build)
        with pytest.raises(KernelFault, match=r"out-of-bounds 8-byte store at .* of workspace, whose size is \d+ "):
            plan(a.dy, a.x, a.mean, a.rstd, a.gamma, workspace=np.empty(1 << 16, np.uint8))


@pytest.mark.parametrize("build", ["plain", "checked"])
def test_a_plan_runs_with_the_limits_of_its_own_device(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan uses more shared memory than a block may use on the device that CUNORM_CPU_DEVICE names."""
    monkeypatch.setenv("CUNORM_CPU_BUILD", build)
    monkeypatch.setenv("CUNORM_CPU_DEVICE", "A100")
    plan = cunorm.plan("group_norm", shape=(1, 1, 50000), dtype="float32", num_groups=1, device="H200", tile=BLOCK)
    x = np.ones((1, 1, 50000), np.float32)
    assert np.array_equal(plan(x)[0], np.zeros_like(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": 3}, r"cluster: 3 blocks, expected 1 to 16, a divisor of grid = 4"),
        ({"cluster": 32}, r"cluster: 32 blocks"),
        ({"cluster": 2, "blocks": (1, 4)}, r"blocks: \(1, 4\), expected a range within grid = 4, in whole clusters"),
        ({"resident": 0}, "resident: 0 clusters, expected at least 1"),
        ({"resident": -1}, "resident: -1 clusters"),
        ({"cluster": 2, "resident": 600}, "resident: 600 clusters of 2 blocks, expected at most 1024 blocks"),
    ],
)
def test_illegal_numbers_of_blocks_per_cluster_and_resident_clusters(options: dict[str, Any], message: str) -> None:
    kernel = executor.compile('extern "C" __global__ void idle(float*) {}', "idle")
    options = {"resident": None, **options}
    with pytest.raises(ValueError, match=message):
        executor.launch(kernel, 4, 32, 0, [0], **options)


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("order", ["ascending", "descending", "random:3"])
def test_syncthreads_count_or_and(build: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", build)
    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
    text = """#include "common/types.cuh"
    extern "C" __global__ void counts(int* y) {
        int sum = 0;
        for (int i = 0; i < 5; ++i) {
            sum = sum * 100 + __syncthreads_count(threadIdx.x % (i + 1) == 0);
        }
        const int any = __syncthreads_or(threadIdx.x == 9), all = __syncthreads_and(threadIdx.x != 9);
        store(y, blockIdx.x * 64 + threadIdx.x, sum / 100 + any * 1000000000 - all);
    }"""
    y = np.zeros(2 * 64, np.int32)
    launch(compiled(text, "counts"), 2, 64, 0, [y])
    counts = [sum(t % (i + 1) == 0 for t in range(64)) for i in range(5)]
    expected = np.int32(0)
    with np.errstate(over="ignore"):
        for found in counts:
            expected = np.int32(expected * np.int32(100)) + np.int32(found)
    assert (y == int(np.trunc(expected / 100)) + 1000000000).all()


@pytest.mark.parametrize("build", ["plain", "checked"])
def test_a_lock_that_is_never_released_is_a_deadlock(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that poll a lock with an atomic and __nanosleep deadlock if the lock is never released.

    If it is released, there is no fault.
    """
    monkeypatch.setenv("CUNORM_CPU_BUILD", build)
    text = """extern "C" __global__ void locks(int* lock, long long opened) {
        if (threadIdx.x % 2 == 0) {
            while (atomicCAS(lock, 0, 1) != 0) {
                __nanosleep(100);
            }
            if (opened) atomicExch(lock, 0);
        }
    }"""
    kernel = executor.compile(text, "locks", build=build)
    lock = np.zeros(1, np.int32)
    executor.launch(kernel, 3, 64, 0, [lock.ctypes.data, 1], resident=2)
    assert lock[0] == 0
    with pytest.raises(
        KernelFault, match=r"deadlock: thread \d+( of block \d)? waits at a polled word \(locks\.cu:\d\)"
    ):
        executor.launch(kernel, 3, 64, 0, [lock.ctypes.data, 0], resident=2)
    lock[0] = 1
    with pytest.raises(KernelFault, match="deadlock"):  # also with one block alive at a time
        executor.launch(kernel, 50, 64, 0, [lock.ctypes.data, 0])


COMPILERS = {compiler.name: compiler for compiler in cxx.present()}


# zig first compiles libraries of its own, which takes a minute for a program and some seconds for a kernel.
SLOW = {"zig": pytest.mark.long}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in ("g++", "clang++", "zig")])
def test_the_checked_build_of_every_compiler_loads(name: str) -> None:
    """The kernel of `grid` uses atomics. By default, clang calls hooks for them that the runtime does not define."""
    if name not in COMPILERS:
        pytest.skip(f"no {name} on this machine")
    script = (
        "import numpy as np, cunorm\n"
        "x = np.arange(128, dtype=np.float32).reshape(1, 2, 64)\n"
        "tile = cunorm.Tile('grid', threads=32, chunk=32, groups=1, prefetch_tiles=1, keep='l2')\n"
        "print(cunorm.group_norm(x, 2, tile=tile)[1].tolist())"
    )
    words = shlex.join(COMPILERS[name].command)
    environment = {**os.environ, "CUNORM_CPU_BUILD": "checked", "CUNORM_CXX": words}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "[[31.5, 95.5]]\n", done.stderr


@pytest.mark.parametrize("past", range(4))
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in COMPILERS])
def test_an_access_past_the_only_static_array_is_out_of_bounds(name: str, past: int) -> None:
    """Also if the array's size is no multiple of 16 bytes: nothing behind the array looks like shared memory."""
    text = """extern "C" __global__ void past(float* y, long long at) {
        __shared__ float held[33];
        held[threadIdx.x] = 1;
        if (threadIdx.x == 0) held[at] = 2;
        __syncthreads();
        y[threadIdx.x] = held[threadIdx.x];
    }"""
    kernel, y = executor.compile(text, "past", compiler=COMPILERS[name], build="checked"), np.zeros(32, np.float32)
    executor.launch(kernel, 1, 32, 0, [y.ctypes.data, 32])
    with pytest.raises(KernelFault, match=r"out-of-bounds 4-byte store at .*, outside static shared memory"):
        executor.launch(kernel, 1, 32, 0, [y.ctypes.data, 33 + past])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_functions_that_the_host_calls_have_no_hooks() -> None:
    """A hook looks for a fiber's header on its own stack. On the host's stack it would find other data."""
    text = 'extern "C" __global__ void hooks(float* y) { y[threadIdx.x] = 1.0f; }'
    library = executor.compile(text, "hooks", build="checked").path
    done = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True)
    hooked = {
        found[1]
        for found in re.finditer(r"^[0-9a-f]+ <(\w+)>:\n((?:.+\n)+)", done.stdout, re.MULTILINE)
        if re.search(r"<__tsan_\w*(?:read|write)", found[2]) and not found[1].startswith("__tsan")
    }
    assert hooked == {"hooks"}
