"""A limit on the instructions per element that the machine code of each strategy executes.

The byte floor says nothing of instructions, and on an H200 most kernels are bound by them. A change that makes a kernel
heavier fails here. A change that makes it lighter fails too, until the table says so.
"""

from __future__ import annotations

import pytest

from benchmarks.simulator import cubin, machine, problems
from benchmarks.simulator.clock import GPUS
from benchmarks.simulator.decode import operation_class
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.jit import sources
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import problem_of
from tests.support.covering import every

GPU = GPUS["H200"]
pytestmark = pytest.mark.usefixtures("tools")

#: (function, shape, layout) -> instructions per element of the default tile in bfloat16, counted with NVRTC 13.5 in the
#: specialised text.
ALLOWED: dict[tuple[str, str, str | None], float] = {
    ("group_norm", "2,320,64x64,32", "NCHW"): 27.1,
    ("group_norm_backward", "2,320,64x64,32", "NCHW"): 22.1,
    # 128 blocks with 80 elements per thread, each of which merges the moments of 64 pieces: `cluster` executes 31.2
    # instructions per element, but its rows are short.
    ("group_norm", "2,320,64x64,32", "NHWC"): 36.8,
    # `grid` with keep="shared": a thread has few packs, and the blocks wait twice for each other. 256 threads execute
    # 34.1, and take as long on an H100.
    ("group_norm_backward", "2,320,64x64,32", "NHWC"): 45.6,
    ("group_norm", "8,320,64x64,32", "NCHW"): 19.1,
    ("group_norm_backward", "8,320,32x32,32", "NCHW"): 21.7,
    ("group_norm", "8,1280,32x32,32", "NHWC"): 17.5,
    ("group_norm_backward", "8,640,16x16,32", "NHWC"): 32.6,
    ("group_norm", "2,320,8x8x8,320", "NCHW"): 27.3,
    ("group_norm_backward", "2,320,8x8x8,320", "NCHW"): 27.7,
    # Two packs per thread. With their former launch bounds, an H100 measured one pack as faster: 3.3 and 3.8 us. No GPU
    # has measured the present kernels.
    ("layer_norm", "512,768", None): 40.2,
    ("layer_norm", "2048,4096", None): 17.4,
    ("layer_norm", "1024,12288", None): 20.1,
    ("layer_norm_backward", "512,768", None): 60.7,
    ("layer_norm_backward", "8192,768", None): 28.8,
    ("layer_norm_backward", "1024,12288", None): 33.0,
    ("layer_norm_backward", "67,123479", None): 61.6,
    ("batch_norm_stats", "32,64,56x56", "NCHW"): 11.5,
    ("batch_norm_stats", "32,64,56x56", "NHWC"): 11.4,
    ("batch_norm_stats", "32,512,28x28", "NCHW"): 10.1,
    ("batch_norm_elemt", "32,64,56x56", "NCHW"): 13.2,
    ("batch_norm_elemt", "32,64,56x56", "NHWC"): 5.7,
    ("batch_norm_backward_reduce", "32,64,56x56", "NCHW"): 9.1,
    ("batch_norm_backward_reduce", "32,512,28x28", "NCHW"): 14.9,
    ("batch_norm_backward_elemt", "32,64,56x56", "NCHW"): 16.0,
    ("batch_norm_backward_elemt", "32,64,56x56", "NHWC"): 10.3,
}
EACH = pytest.mark.parametrize(
    "key", every(4, [(key,) for key in ALLOWED]), ids=["-".join(filter(None, key)) for key in ALLOWED]
)
#: Channels-last slabs, whose threads access channels that are a pack apart: the only arrays in shared memory that need
#: unused places against bank conflicts.
STAGED = [
    ("group_norm", "block", {"threads": 256, "groups": 4, "stages": 4, "load": "cp_async", "packs_per_thread": 1}),
    (
        "group_norm_backward",
        "block",
        {"threads": 256, "groups": 4, "stages": 1, "load": "cp_async", "packs_per_thread": 1},
    ),
    (
        "group_norm_backward",
        "cluster",
        {"threads": 256, "groups": 4, "stages": 1, "load": "cp_async", "cluster": 2, "samples": 1},
    ),
]
#: Wavefronts of a shared memory access without bank conflicts, if all lanes access 16 bytes. Share of all instructions
#: that the further wavefronts may be.
WAVEFRONTS, CONFLICTS = 4, 0.02
#: A count may differ from the table by this share, for instance if another minor version of NVRTC compiles.
MARGIN = 0.03


def problem(function: str, shape: str, layout: str | None) -> Problem:
    return problem_of(function, **plan_options(function, shape, "bfloat16", layout))


def fault(key: tuple[str, str, str | None]) -> str | None:
    """What is wrong with the count of a problem; None if it is as the table says."""
    counted, allowed = problems.instructions_per_element(problem(*key), GPU), ALLOWED[key]
    if abs(counted - allowed) <= MARGIN * allowed:
        return None
    found = f"{key}: {counted:.1f} instructions per element with NVRTC {cubin.compiler().version}, expected {allowed}"
    if counted > allowed:
        return f"{found}: make the kernel as light as it was, or say in the table why it must be heavier"
    return f"{found}: the kernel is lighter, so lower the number in the table"


def local_accesses(key: tuple[str, str, str | None]) -> list[str]:
    """Accesses to local memory in the machine code that runs: registers that were spilled."""
    plan = problems.plan_of(problem(*key), GPU)
    kernels = [machine.kernel_of(*one) for one in plan.texts("specialised")]
    classes = [(kernel.code.entry, operation_class(line.opcode)) for kernel in kernels for line in kernel.code.lines]
    return [entry for entry, found in classes if found == "local"]


def conflicts(asked: Problem, tile: Tile | None = None) -> float:
    """Wavefronts of shared memory beyond `WAVEFRONTS` per access, over all instructions of a call's first launch."""
    launches, kept = problems.launches_of(problems.plan_of(asked, GPU, tile), "specialised")
    first = launches[0]
    found = machine.run(first, 0, min(first.blocks, first.cluster * problems.SAMPLE))
    del kept
    further = sum(max(0, int(one["wavefronts"]) - WAVEFRONTS * int(one["warps"])) for one in found)
    return further / int(found["warps"].sum())


@pytest.mark.parametrize(
    ("function", "strategy", "fields"), STAGED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_channels_of_a_slab_are_in_different_banks(function: str, strategy: str, fields: dict[str, int | str]) -> None:
    share = conflicts(problem(function, "64,2048,7x7,32", "NHWC"), Tile(strategy, **fields))
    assert share <= CONFLICTS


@EACH
def test_a_specialised_kernel_does_not_spill(key: tuple[str, str, str | None]) -> None:
    """The compile gate has small problems of its own. These are the sizes of users."""
    assert local_accesses(key) == []


@EACH
def test_a_kernel_is_not_heavier_than_allowed(key: tuple[str, str, str | None]) -> None:
    assert fault(key) is None


def test_a_kernel_made_heavier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition is put into each conversion of an element."""
    key = ("batch_norm_elemt", "32,64,56x56", "NCHW")
    expand = sources._expand.__wrapped__
    plain = "return bits_to_float(static_cast<unsigned>(value.bits) << 16);"

    def expanded(kernel: str) -> str:
        text: str = expand(kernel)
        assert plain in text
        return text.replace(plain, plain.replace("return", "return 1.5f +"))

    monkeypatch.setattr(sources, "_expand", expanded)
    found = fault(key)
    assert found is not None and "make the kernel as light as it was" in found


def test_a_lighter_kernel_asks_for_a_lower_number(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("batch_norm_elemt", "32,64,56x56", "NCHW")
    monkeypatch.setitem(ALLOWED, key, 2 * ALLOWED[key])
    found = fault(key)
    assert found is not None and "lower the number in the table" in found
