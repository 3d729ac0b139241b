"""Every kernel compiles with NVRTC, without a GPU, for every gated architecture, and none spills a register.

What refuses() accepts must not spill: a spill is a fault of the formula in refuses(). The quick gate takes, for each
strategy, direction, dtype and layout, the tile that needs the most registers; --long takes them all.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

import pytest
from nvrtc import ARCHITECTURES, compile_for, ptx_of

from cunorm.arrays import DTYPES
from cunorm.devices import KNOWN, Device
from cunorm.ops import OPS
from cunorm.problem import Problem, accumulator
from cunorm.sources import kernel_text
from cunorm.strategy import Strategy, Tile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="needs CuPy for NVRTC: pip install 'cunorm[cuda12]'"
)

#: Types that only some ops have, beside those of the tensors: sums and running statistics in the accumulator's.
OTHERS = {
    "batch_norm_gather_stats": ("running_mean_t", "running_var_t"),
    "batch_norm_backward_reduce": ("sum_dy_t", "sum_dy_xmu_t", "dgamma_t", "dbeta_t"),
    "batch_norm_backward_elemt": ("sum_t",),
}
STRATEGIES = [strategy for op in OPS.values() for strategy in op.strategies.values()]


def device_for(architecture: str) -> Device:
    """The known device of an architecture; the one nearest below it where none is known yet."""
    number = int(architecture.removeprefix("sm_"))
    below = [d for d in KNOWN.values() if int(d.architecture.removeprefix("sm_")) <= number]
    return max(below, key=lambda device: device.compute_capability)


def problem_of(strategy: Strategy, dtype: str, layout: str, tile: Tile) -> Problem:
    """A problem that the tile takes, if the strategy takes that layout at all."""
    op, sums = strategy.op, accumulator(dtype)
    gamma = None if op in ("batch_norm_stats", "batch_norm_gather_stats") else dtype
    beta = dtype if op in ("group_norm", "layer_norm", "batch_norm_elemt") else None
    if op.startswith("layer_norm"):
        sizes = (layout, 256, 32, 1, 1)
    elif op.startswith("batch_norm"):
        sizes = (layout, 8, 64, 1 if op == "batch_norm_gather_stats" else 64, 64)
    else:
        # As large a group as a warp's tile holds, else a middling one.
        HxW, group = (1, 4) if strategy.name == "warp" else (64, 32)
        channels = tile.lanes * tile.packs * (16 // DTYPES[dtype].itemsize) if strategy.name == "warp" else 8
        sizes = (layout, 256, channels * group, HxW, group)
    others = tuple((name, sums) for name in OTHERS.get(op, ()))
    if op == "batch_norm_gather_stats":
        others += (("count_t", "int64"),)
    return Problem(op, dtype, gamma, beta, sums, *sizes, OPS[op].results, others)


def accepted(strategy: Strategy, dtype: str, layout: str, device: Device) -> Iterator[tuple[Problem, Tile]]:
    """Every tile of the space that refuses() accepts, but for fields that the kernel does not know."""
    seen = set()
    for tile in strategy.tiles():
        compiled = tuple(item for item in tile.fields if item[0] in strategy.constants)
        problem = problem_of(strategy, dtype, layout, tile)
        if compiled not in seen and strategy.refuses(problem, tile, device) is None:
            seen.add(compiled)
            yield problem, tile


def demand(strategy: Strategy, problem: Problem, tile: Tile) -> tuple[float, int]:
    """How close a tile comes to the registers that its threads have; then its size."""
    registers = max(launch.registers for launch in strategy.launches(problem, tile))
    return registers * tile.threads / 65536 if strategy.name != "warp" else registers / 255, tile.threads


def check(strategy: Strategy, problem: Problem, tile: Tile, architecture: str) -> int:
    compiled = 0
    for launch in {launch.kernel: launch for launch in strategy.launches(problem, tile)}.values():
        for usage in compile_for(kernel_text(launch, problem, strategy, tile), architecture):
            compiled += 1
            where = f"{usage.entry} {tile} on {architecture}: {usage}"
            assert usage.spill_bytes == 0, f"spills: {where}"
            assert usage.stack_bytes == 0, f"uses the stack: {where}"
            assert usage.registers * launch.threads <= 65536, f"cannot be launched: {where}"
    return compiled


CASES = [
    pytest.param(strategy, dtype, layout, id=f"{strategy.op}-{strategy.name}-{dtype}-{layout}")
    for strategy in STRATEGIES
    for dtype in DTYPES
    for layout in (("NCHW",) if strategy.op.startswith(("layer_norm", "batch_norm_gather")) else ("NCHW", "NHWC"))
    if next(accepted(strategy, dtype, layout, KNOWN["H200"]), None) is not None
]


def test_every_strategy_has_cases() -> None:
    """A case that nothing accepts is left out above; a strategy without any would go unchecked."""
    found = {(case.values[0].op, case.values[0].name, case.values[1]) for case in CASES}
    assert found == {(strategy.op, strategy.name, dtype) for strategy in STRATEGIES for dtype in DTYPES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("strategy", "dtype", "layout"), CASES)
def test_the_most_demanding_tile_does_not_spill(strategy: Strategy, dtype: str, layout: str, architecture: str) -> None:
    tiles = list(accepted(strategy, dtype, layout, device_for(architecture)))
    problem, tile = max(tiles, key=lambda pair: demand(strategy, *pair))
    assert check(strategy, problem, tile, architecture) >= 1


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("strategy", "dtype", "layout"), CASES)
def test_no_accepted_tile_spills(strategy: Strategy, dtype: str, layout: str, architecture: str) -> None:
    compiled = 0
    for problem, tile in accepted(strategy, dtype, layout, device_for(architecture)):
        compiled += check(strategy, problem, tile, architecture)
    assert compiled > 0


#: Kernels that move tensors, by the strategy's name; the others move workspaces and parameters.
TENSOR_KERNELS = re.compile(r"_(warp|block|sweep|column|split_sums|split_input|split_moments|split_apply)$")
#: Those of them that write no tensor.
SUMS_ONLY = re.compile(r"(_sums|_moments|_sweep|(stats|reduce)_block)$")


@pytest.mark.parametrize(
    ("strategy", "dtype", "layout"), [case for case in CASES if case.values[0].op != "batch_norm_gather_stats"]
)
def test_tensors_are_moved_16_bytes_at_a_time(strategy: Strategy, dtype: str, layout: str) -> None:
    problem, tile = next(accepted(strategy, dtype, layout, KNOWN["H200"]))
    seen = 0
    for launch in {launch.kernel: launch for launch in strategy.launches(problem, tile)}.values():
        for part in ptx_of(kernel_text(launch, problem, strategy, tile)).split(".visible .entry ")[1:]:
            entry = re.match(r"\w+", part)
            assert entry is not None
            if TENSOR_KERNELS.search(entry[0]):
                seen += 1
                assert re.search(r"ld\.global\.(v4\.[ufb]32|v2\.[ufb]64)", part), f"{entry[0]}: no 16-byte load"
                writes = not SUMS_ONLY.search(entry[0])
                assert not writes or "st.global.v4.b32" in part, f"{entry[0]}: no 16-byte store"
    kernels = 2 if strategy.name == "split" and not strategy.op.startswith("batch_norm") else 1
    assert seen == kernels + (strategy.op == "layer_norm" and strategy.name == "split")  # GroupNorm's, and its own


def test_the_gate_sees_a_spill() -> None:
    """A kernel that cannot but spill: 200 live values, 1024 threads with 64 registers each."""
    text = """
    extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
        float held[200];
        #pragma unroll
        for (int i = 0; i < 200; ++i) held[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 200; ++i) y[i * 1024 + threadIdx.x] = held[199 - i] * held[i];
    }
    """
    (usage,) = compile_for(text, "sm_90")
    assert usage.spill_bytes > 0
