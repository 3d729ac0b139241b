"""Hostile tests of LayerNorm: sums of many equal rows, products near overflow, guard pages, tiles beyond the space."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem, laid_out
from cunorm.core.strategy import Tile
from cunorm.jit.nvrtc import Usage, ends, supported, usages
from cunorm.jit.sources import kernel_text
from cunorm.ops.common import limits
from cunorm.ops.layer_norm.grid import MOST_ROUNDS
from cunorm.ops.layer_norm.strategies import FORWARD
from cunorm.runtime import plans
from tests.conftest import Executor
from tests.ops.layer_norm.test_layer_norm import STRATEGIES, Case, run, tile_of
from tests.support.paths import environment
from tests.support.problems import forget_calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameter_sums_of_equal_rows(strategy: str, executor: Executor) -> None:
    """dy = 0.1 everywhere, with as many rows per team as in the cost model's tile for 75600 x 5120."""
    plan = cunorm.plan(
        "layer_norm_backward", shape=(75600, 5120), dtype="float32", normalized_shape=5120, device="H200"
    )
    assert plan.tile is not None
    grid = strategy == "grid"  # its rows per team are limited to the largest number that is worth trying
    rows = MOST_ROUNDS * 4 if grid else 256 * 16
    case = Case(rows, 20 if strategy in ("cluster", "grid") else 4, "float32", None)
    case.dy[:] = 0.1
    tile = {"strategy": strategy, "threads": 128, "packs_per_thread": 1}
    owned = {"rows_per_team": plan.tile.rows_per_team}
    more = {
        "warp": {"lanes": 32, "stages": 1, **owned},
        "block": {"cluster": 1, "teams_per_block": 1, "stages": 1, **owned},
        "cluster": {"cluster": 2, "teams_per_block": 1, **owned},
        "grid": {"lanes": 32, "slabs": 2, "smem_kib": 64},
        "split": owned,
    }
    case.backward(executor, (grid, True, True), tile=tile | more[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dy", "spread"), [(1e30, 1e10), (1e35, 1e5)])
def test_products_do_not_overflow_if_results_are_finite(
    dy: float, spread: float, strategy: str, executor: Executor
) -> None:
    case = Case(5, 130, "float32")
    case.dy *= np.float32(dy)
    case.x *= np.float32(spread)
    with np.errstate(all="ignore"):
        assert run(case, strategy, "backward", executor)


def compile_for(text: str, architecture: str) -> list[Usage]:
    """Resource usage that ptxas reports with the oldest installed NVRTC. Raises CompileError if it does not compile."""
    if not ends():
        pytest.skip(f"needs NVRTC {supported()}")
    return usages(text, architecture, ends()[0])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy for NVRTC")
@pytest.mark.parametrize(("dtype", "packs"), [("bfloat16", 6), ("float32", 16)])
def test_split_refuses_tiles_that_would_spill_registers(dtype: str, packs: int) -> None:
    strategy, tile = FORWARD["split"], Tile("split", threads=256, packs_per_thread=packs, rows_per_team=4, chunk=4096)
    sizes = ("NCHW", 512, 50000, 1, 1)
    problem = Problem(
        op="layer_norm",
        dtype=dtype,
        gamma_dtype=dtype,
        beta_dtype=dtype,
        stats_dtype="float32",
        **laid_out(*sizes),
        outputs=("y", "mean", "rstd"),
    )
    if strategy.refuses(problem, tile, KNOWN["H200"]) is None:
        apply = strategy.launches(problem, tile)[-1]
        assert all(u.spill_bytes == 0 for u in compile_for(kernel_text(apply, problem, strategy, tile), "sm_90"))


@pytest.mark.parametrize(("rows", "length"), [(802816, 64), (131072, 128), (589824, 128)])
def test_neighbouring_lanes_read_neighbouring_bytes(rows: int, length: int) -> None:
    """A team reads at least two adjacent sectors, 64 bytes."""
    plan = cunorm.plan("layer_norm", shape=(rows, length), dtype="bfloat16", normalized_shape=length, device="H200")
    assert plan.tile is not None
    assert plan.tile.as_dict()["lanes"] * 16 >= 64, plan.tile


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("constant", [0.1, 100.1, 1e5 + 0.1, 1e37])
def test_a_constant_row_without_eps(constant: float, strategy: str, executor: Executor) -> None:
    """The variance is exactly 0. The sum does not overflow, because it is relative to an element of the row."""
    case = Case(3, 130, "float32")
    case.x[:] = constant
    with np.errstate(all="ignore"):
        options: dict[str, Any] = {"eps": 0, "tile": tile_of(strategy, "forward")}
        _, mean, rstd = cunorm.layer_norm(executor.put(case.x), 130, **options)
    assert np.all(executor.get(mean) == np.float32(constant))
    assert np.all(np.isposinf(executor.get(rstd)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_row_of_x_that_is_not_finite(value: float, strategy: str, executor: Executor) -> None:
    """It affects its own row of dx and, because its xhat is NaN, dgamma, but neither dbeta nor another row."""
    case = Case(11, 130, "float32")
    case.x[3, 7] = value
    with np.errstate(all="ignore"):
        assert run(case, strategy, "backward", executor)


def test_split_with_one_block_and_more_strips_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every warp contributes to the fold of strips, and the scratch memory of the preceding row is reused."""
    monkeypatch.setattr(limits, "MAX_GRID", 1)
    plans._plans.clear()
    forget_calls()
    try:
        for order in ("ascending", "descending", "random:1"):
            monkeypatch.setenv("CUNORM_CPU_ORDER", order)
            tile = {"strategy": "split", "threads": 128, "packs_per_thread": 1, "rows_per_team": 2}
            Case(4, 128 * 100, "float32").backward(Executor("cpu"), tile=tile)
    finally:
        plans._plans.clear()
        forget_calls()


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends at a protected page, so that a read past its end is a segmentation fault."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


def inside_fences() -> None:
    """Run every strategy on arrays and workspaces that end at a protected page. Runs in a separate process."""
    for rows, length, dtype in ((9, 13, "float32"), (41, 67, "bfloat16"), (3, 130, "float64"), (700, 3, "float32")):
        case = Case(rows, length, dtype)
        assert case.gamma is not None and case.beta is not None
        given = [fenced(a) for a in (case.dy, case.x, *case.statistics(), case.gamma)]
        for strategy in (name for name in STRATEGIES if name != "cluster" or length > 50):
            tile = tile_of(strategy, "backward")
            tile |= {"rows_per_team": 1} if "rows_per_team" in tile else {}
            plan = cunorm.plan(
                "layer_norm_backward", shape=(rows, length), dtype=dtype, gamma_dtype=dtype, normalized_shape=length,
                tile=tile, device="cpu",
            )  # fmt: skip
            out: Any = tuple(fenced(a * 0) for a in (case.x, case.gamma, case.gamma))
            work = fenced(np.full(-(-plan.workspace_nbytes // 16) * 16, 0xFF, np.uint8))
            dy, x, mean, rstd, gamma = given
            found = cunorm.layer_norm_backward(dy, x, length, mean, rstd, gamma, out=out, tile=tile, workspace=work)
            case.check_gradients(Executor("cpu"), found)
            exact = reference.layer_norm(case.x, length, case.gamma, case.beta)
            y = cunorm.layer_norm(
                x, length, gamma, fenced(case.beta), out=(fenced(case.x * 0), fenced(case.statistics()[0]), None),
                tile=tile_of(strategy, "forward"),
            )[0]  # fmt: skip
            assert np.allclose(y.astype(np.float64), exact[0], rtol=2**-6, atol=2**-6)


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_nothing_past_the_arrays_is_read() -> None:
    command = [sys.executable, "-m", "tests.ops.layer_norm.test_layer_norm_attack"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"


if __name__ == "__main__":
    inside_fences()
