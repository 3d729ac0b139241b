"""The counters of the checked build, compared with numbers that are derived by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.core.errors import KernelFault
from cunorm.executors.cpu.checked import Count, Moves
from cunorm.executors.cpu.executor import Kernel
from tests.kernels.kernel_checks import ORDERS, compiled, launch
from tests.support.paths import KERNELS

TEXT = (KERNELS / "counted.cu").read_text(encoding="utf-8")
BLOCKS, THREADS = 2, 64
WARPS = BLOCKS * THREADS // 32


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return compiled(TEXT, "counted", threads=THREADS)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    monkeypatch.setenv("CUNORM_CPU_ORDER", request.param)


def aligned(count: int, shift: int = 0) -> np.ndarray:
    """Zeros that begin ``shift`` floats after a 512-byte boundary."""
    memory = np.zeros(count + 256, np.float32)
    first = -(memory.ctypes.data // 4) % 128 + shift
    return memory[first : first + count]


def count(kernel: Kernel, kind: int, step: int = 1, shift: int = 0) -> Count:
    """The counters of one launch in which x begins ``shift`` floats after a 512-byte boundary."""
    record: list[Count] = []
    arrays = [aligned(3 * 8192, shift), aligned(64), aligned(128)]
    launch(kernel, BLOCKS, THREADS, 4 * 32 * THREADS, arrays, [kind, step], workspace=[2], record=record)
    (found,) = record
    return found


def sectors(shift: int, step: int, width: int) -> int:
    """Number of sectors that a warp reads if its lanes read ``width`` floats each, ``step`` floats apart."""
    return len({4 * (shift + lane * step + i) // 32 for lane in range(32) for i in range(width)})


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("step", "shift"), [(1, 0), (1, 1), (1, 7), (2, 0), (3, 0), (8, 0), (16, 4), (0, 5)])
def test_requests_and_sectors_of_single_elements(kernel: Kernel, step: int, shift: int) -> None:
    found = count(kernel, 0, step, shift).moved["array0"]
    assert found.lane_loaded == found.raw_loaded == 4 * BLOCKS * THREADS
    assert found.load_requests == WARPS
    per_warp = [sectors(shift + 32 * warp * step, step, 1) for warp in range(THREADS // 32)]
    assert found.load_sectors == BLOCKS * sum(per_warp)
    assert (found.lane_stored, found.store_requests, found.store_sectors, found.wide_bytes) == (0, 0, 0, 0)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("step", "shift", "efficiency"), [(1, 0, 1.0), (1, 4, 128 * 4 / (17 * 32)), (2, 0, 0.5)])
def test_sector_efficiency_of_wide_accesses(kernel: Kernel, step: int, shift: int, efficiency: float) -> None:
    found = count(kernel, 1, step, shift).moved["array0"]
    assert found.wide_bytes == found.lane_loaded == 16 * BLOCKS * THREADS
    assert found.load_requests == WARPS
    assert found.wide_bytes / (32 * found.wide_sectors) == pytest.approx(efficiency)


@pytest.mark.usefixtures("order")
def test_divergent_lanes_make_separate_requests(kernel: Kernel) -> None:
    found = count(kernel, 2).moved["array0"]
    assert found.load_requests == WARPS * 2 * 2  # two load instructions, each executed twice
    assert found.load_sectors == WARPS * 2 * 2 * 4
    found = count(kernel, 7).moved["array0"]
    assert found.load_requests == WARPS * 31  # as many as the lane with the most loads executes
    assert found.lane_loaded == WARPS * 4 * sum(range(32))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("kind", "step", "turns"), [(3, 1, 1), (3, 2, 2), (3, 32, 32), (3, 5, 1), (4, 1, 1)])
def test_wavefronts_with_bank_conflicts(kernel: Kernel, kind: int, step: int, turns: int) -> None:
    found = count(kernel, kind, step)
    assert found.shared_requests == 2 * WARPS
    ideal = 2 * WARPS * (4 if kind == 4 else 1)  # 16 bytes per lane: a quarter of a warp per wavefront
    assert found.shared_ideal == ideal
    assert found.shared_wavefronts == ideal * turns


@pytest.mark.usefixtures("order")
def test_barriers_and_shuffles(kernel: Kernel) -> None:
    found = count(kernel, 5, 7)
    assert (found.blocks, found.threads) == (BLOCKS, THREADS)
    assert found.barriers == 7 * BLOCKS
    assert found.shuffles == 7 * WARPS
    assert sum(each.lane_loaded + each.lane_stored for each in found.moved.values()) == 0


@pytest.mark.usefixtures("order")
def test_roles_of_arrays_and_the_trace_of_sectors(kernel: Kernel) -> None:
    found = count(kernel, 6)
    assert found.roles == {"array0": "parameter", "array1": "parameter", "array2": "workspace"}
    assert found.moved["array2"].lane_stored == 4 * BLOCKS * THREADS
    assert found.moved["array0"] == Moves()
    assert found.moved["array2"].store_sectors == len(found.trace) == BLOCKS * THREADS * 4 // 32
    assert (found.trace["region"] == 2 * 2 + 1).all()
    assert sorted(set(found.trace["block"].tolist())) == [0, 1]
    assert len(set(found.trace["sector"].tolist())) == len(found.trace)
    element = (found.trace["sector"].astype(np.int64) - found.starts["array2"] // 32) * 8  # its number is the thread's
    assert (found.trace["warp"] == element % THREADS // 32).all() and (found.trace["block"] == element // THREADS).all()
    assert (found.trace["phase"] == 0).all() and (found.trace["bytes"] == 32).all()


def test_a_fault_frees_the_trace(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    checked, freed = kernel.built("checked"), []
    real = checked._free
    monkeypatch.setitem(vars(checked), "_free", lambda address: freed.append(address) or real(address))
    with pytest.raises(KernelFault, match="out-of-bounds"):
        count(kernel, 0, 350)  # the second block reads past the end of the array
    assert len(freed) == 1 and freed[0]
