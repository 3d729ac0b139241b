"""The compile gate: every kernel compiles with NVRTC for every gated architecture, and none spills. No GPU is needed.

A kernel must not spill with a tile that refuses() accepts: a spill is a fault of the formula in refuses(). The quick
suite compiles each kernel and text of `choice` once for forwards in bfloat16, and the most demanding tiles for
gradients: the generic text in bfloat16, the specialised text in float32. It uses the oldest and the newest NVRTC
installed. `--long` compiles all of `choice`, as `cunorm doctor --kernels` does, and the tiles of `spread`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cunorm.core.devices import KNOWN, known
from cunorm.core.problem import ITEMSIZE, LAYOUTS, Problem
from cunorm.core.strategy import Tile
from cunorm.gate import gate, kernel_report
from cunorm.gate.gate import Build, BuildResult, GateCase
from cunorm.jit import sources
from cunorm.jit.nvrtc import ARCHITECTURES, Nvrtc, Usage
from cunorm.jit.sources import TEXTS
from cunorm.ops.registry import OPS, problem_of
from tests.kernels.kernel_checks import expanded
from tests.support.compilers import NVRTCS, SMALL, needs_nvrtc
from tests.support.covering import every
from tests.support.paths import KERNELS as TEST_KERNELS

#: One compiler thread per worker of pytest-xdist, because the other workers use the other cores.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
CASES = gate.cases()
#: The pairs of op and strategy that have kernels of their own.
OWN = [(op.name, name) for op in OPS.values() for name, one in op.strategies.items() if one.kernels_of is None]
OLD, NEW = Nvrtc("12.8.1", "/nowhere"), Nvrtc("13.5.1", "/elsewhere")

#: Kernels that load or store tensors. Their names end in a strategy or in a phase of it. All other kernels only access
#: workspaces and parameters.
TENSOR_KERNELS = re.compile(
    r"(^|_)(warp|block|cluster|grid|sweep|column|split_sums|split_input|split_moments|split_apply)$"
)
#: Tensor kernels that store no tensor.
SUMS_ONLY = re.compile(r"(_sums|_moments|_sweep|(stats|reduce)_(block|cluster))$")
#: A kernel that must spill: a thread has 200 live values. With 1024 threads per block it gets at most 64 registers.
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
    float held[200];
    #pragma unroll
    for (int i = 0; i < 200; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 200; ++i) y[i * 1024 + threadIdx.x] = held[199 - i] * held[i];
}
"""
#: A kernel that needs a stack: its array is indexed by values that are known only at run time.
STACK = """
extern "C" __global__ void stack(const int* x, int* y) {
    int held[64];
    for (int i = 0; i < 64; ++i) held[i] = x[i];
    for (int i = 0; i < 64; ++i) held[x[i] & 63] += i;
    for (int i = 0; i < 64; ++i) y[i] = held[x[64 + i] & 63];
}
"""


def build_of(text: str, architecture: str = "sm_90", threads: int = 128, version: Nvrtc | None = None) -> Build:
    case, tile = (
        GateCase("group_norm", "block", "float32", "NCHW"),
        Tile("block", threads=threads, groups=1, stages=2, load="cp_async", packs_per_thread=1),
    )
    return Build(case, tile, "kernel", threads, "generic", text, architecture, version or NVRTCS[0])


def faults(results: list[BuildResult]) -> str:
    return "\n".join(dict.fromkeys(fault for result in results for fault in result.faults()))


# ---- the kernels of cunorm ------------------------------------------------------------------------------------------


def all_wide(case: GateCase, results: list[BuildResult]) -> None:
    """Assert that the kernels access tensors 16 bytes at a time."""
    seen: dict[str, set[str]] = {}
    for result in results:
        for usage in result.usages:
            if TENSOR_KERNELS.search(usage.entry):
                seen.setdefault(f"{result.build.tile} {result.build.architecture}", set()).add(usage.entry)
                assert usage.loads_16 > 0, f"{usage.entry} {result.build.tile}: no 16-byte load"
                assert usage.stores_16 > 0 or SUMS_ONLY.search(usage.entry), f"{usage.entry}: no 16-byte store"
    kernels = 2 if case.strategy == "split" and not case.op.startswith("batch_norm") else 1
    assert seen and {len(entries) for entries in seen.values()} == {kernels}


#: Dtypes that only `--long` compiles. The kernels of float16 differ from those of bfloat16 only in conversions, see
#: test_float16_has_no_branch_per_element. float64 is rarely used.
RARE = ("float16", "float64")


def is_long(case: GateCase) -> bool:
    """Whether only `--long` compiles a case. The gradients' kernels need the most registers."""
    return case.dtype in RARE or (case.dtype == "float32" and not OPS[case.op].is_backward)


QUICK = [pytest.param(case, id=str(case), marks=[pytest.mark.long] if is_long(case) else []) for case in CASES]


def most_demanding(planned: list[Build]) -> list[Build]:
    """The builds of the most demanding tiles, and of the tiles that select a kernel which these do not contain."""
    first = [build for build in planned if build.tile == gate.spread(build.case, build.architecture)[0][1]]
    kernels = {build.kernel for build in first}
    tiles = {build.tile for build in first} | {build.tile for build in planned if build.kernel not in kernels}
    return [build for build in planned if build.tile in tiles]


def specialised(planned: list[Build]) -> list[Build]:
    """The builds of specialised texts, and those of kernels that have none among these."""
    kernels = {build.kernel for build in planned if build.kind == "specialised"}
    return [build for build in planned if build.kind == "specialised" or build.kernel not in kernels]


def quick_builds(planned: list[Build]) -> list[Build]:
    """The builds of a case that the quick suite compiles: one of each kernel and text, of its most demanding tile.

    A forward in bfloat16 has both texts, for which its other tiles count too. Gradients are compiled for two dtypes: in
    bfloat16 `choice` has their generic text, so float32 has the other one.
    """
    case, hard = planned[0].case, most_demanding(planned)
    if case.dtype == "float32":
        hard = specialised(hard)
    elif not OPS[case.op].is_backward:
        hard += [build for build in planned if build not in hard]
    return [*{(build.kernel, build.kind): build for build in reversed(hard)}.values()]


@needs_nvrtc
@pytest.mark.parametrize("case", QUICK)
def test_no_tile_of_the_choice_spills_and_tensor_accesses_have_16_bytes(
    case: GateCase, pytestconfig: pytest.Config
) -> None:
    planned = gate.builds(NVRTCS, only=case)
    results = gate.run(planned if pytestconfig.getoption("--long") else quick_builds(planned), threads=THREADS)
    assert faults(results) == ""
    assert {result.build.case for result in results} == {case}
    if case.op != "batch_norm_gather_stats":
        all_wide(case, results)


def in_warps(packs: int, rows: int) -> Tile:
    return Tile("warp", packs_per_thread=packs, rows_per_team=rows, lanes=32, threads=128)


def in_warps_of_gradients(packs: int, *, lanes: int, stages: int, threads: int) -> Tile:
    """Tile of `warp` in a backward with a row per team."""
    return Tile("warp", packs_per_thread=packs, lanes=lanes, rows_per_team=1, stages=stages, threads=threads)


def in_clusters(packs: int, teams: int, threads: int) -> Tile:
    sizes = {"cluster": 8, "teams_per_block": teams, "threads": threads}
    return Tile("cluster", packs_per_thread=packs, rows_per_team=2, **sizes)


def in_registers(packs: int, threads: int, groups: int = 1) -> Tile:
    return Tile("block", groups=groups, load="registers", packs_per_thread=packs, stages=1, threads=threads)


def staged_in_clusters(samples: int) -> Tile:
    sizes = {"cluster": 4, "groups": 1, "samples": samples, "threads": 128}
    return Tile("cluster", load="bulk", stages=4, **sizes)


def kept_on_chip(threads: int) -> Tile:
    return Tile("grid", chunk=64, groups=4, keep="shared", prefetch_tiles=1, threads=threads)


def in_columns(threads: int) -> Tile:
    return Tile("column", chunk=4, columns=8, threads=threads)


#: Tiles, and the architecture and the NVRTC with which their generic text once spilled. The quick suite compiles each
#: fourth one.
GENERIC_SPILLS = [
    ("layer_norm", "bfloat16", "NCHW", in_warps(12, rows=1), "sm_80", 0),
    ("layer_norm", "float32", "NCHW", in_warps(6, rows=2), "sm_80", 0),
    ("rms_norm", "float64", "NCHW", in_warps(8, rows=2), "sm_80", 0),
    ("layer_norm_backward", "float64", "NCHW", in_warps_of_gradients(1, lanes=16, stages=1, threads=128), "sm_90", 0),
    ("rms_norm_backward", "float64", "NCHW", in_warps_of_gradients(2, lanes=16, stages=2, threads=128), "sm_90", 0),
    ("layer_norm", "bfloat16", "NCHW", in_clusters(2, teams=2, threads=256), "sm_120", 0),
    ("layer_norm", "bfloat16", "NCHW", in_clusters(4, teams=1, threads=512), "sm_120", -1),
    ("rms_norm", "bfloat16", "NCHW", in_clusters(4, teams=2, threads=384), "sm_120", 0),
    ("group_norm", "bfloat16", "NCHW", in_registers(packs=8, threads=512), "sm_120", -1),
    ("group_norm_backward", "bfloat16", "NHWC", kept_on_chip(threads=128), "sm_120", 0),
    ("group_norm_backward", "bfloat16", "NHWC", kept_on_chip(threads=512), "sm_120", 0),
    ("group_norm_backward", "bfloat16", "NHWC", in_registers(packs=6, threads=512, groups=2), "sm_120", 0),
    ("group_norm_backward", "float16", "NCHW", staged_in_clusters(samples=2), "sm_90", 0),
    ("batch_norm_elemt", "bfloat16", "NHWC", in_columns(threads=128), "sm_89", -1),
    ("batch_norm_backward_reduce", "bfloat16", "NHWC", in_columns(threads=128), "sm_120", 0),
]


def builds_of(op: str, dtype: str, layout: str, tile: Tile, kind: str, compiler: tuple[str, Nvrtc]) -> list[Build]:
    """The builds of one tile, for an architecture and an NVRTC."""
    case = GateCase(op, tile.strategy, dtype, layout)
    problem, accepted = next(one for one in gate.accepted(case, compiler[0]) if one[1].as_dict() == tile.as_dict())
    posed = gate.problems_of(case, compiler[0], problem, accepted)
    return [build for one in posed for build in gate.builds_of(case, one, accepted, kind, *compiler)]


@needs_nvrtc
@pytest.mark.parametrize(("op", "dtype", "layout", "tile", "architecture", "which"), every(4, GENERIC_SPILLS))
def test_the_generic_text_does_not_spill(
    op: str, dtype: str, layout: str, tile: Tile, architecture: str, which: int
) -> None:
    """It holds sizes, predicates and parts of addresses, which are constants of the specialised text."""
    assert faults(gate.run(builds_of(op, dtype, layout, tile, "generic", (architecture, NVRTCS[which])))) == ""


@needs_nvrtc
def test_staged_float64_in_a_cluster_does_not_spill() -> None:
    """The positions of a piece are computed again for every slab."""
    tile = Tile("cluster", cluster=4, groups=1, load="cp_async", stages=4, threads=128)
    assert faults(gate.run(builds_of("group_norm", "float64", "NCHW", tile, "specialised", ("sm_90", NVRTCS[0])))) == ""


def ragged(length: int, packs: int) -> tuple[Problem, Tile]:
    """RMSNorm's backward on rows that are not whole packs, with a gamma that is wider than x, and a tile for it."""
    problem = problem_of(
        "rms_norm_backward", shape=(4096, length), dtype="bfloat16", normalized_shape=length, gamma_dtype="float32"
    )
    return problem, Tile("warp", lanes=32, packs_per_thread=packs, rows_per_team=4, stages=1, threads=128)


@needs_nvrtc
@pytest.mark.parametrize("which", every(2, [(0,), (-1,)]))
def test_ragged_rows_with_a_wide_gamma_do_not_spill(which: int) -> None:
    """The compiler of the specialised text widens the elements of all packs at once."""
    case = GateCase("rms_norm_backward", "warp", "bfloat16", "NCHW")
    problem, tile = ragged(1501, packs=6)
    assert case.solver.refuses(problem, tile, known("H200")) is None
    assert faults(gate.run(gate.builds_of(case, problem, tile, "specialised", "sm_90", NVRTCS[which]))) == ""


def test_ragged_rows_with_a_wide_gamma_and_eight_packs_are_refused() -> None:
    problem, tile = ragged(2003, packs=8)
    solver = OPS[problem.op].strategies["warp"]
    assert "registers per thread" in str(solver.refuses(problem, tile, known("H200")))
    whole, _ = ragged(2000, packs=8)
    assert solver.refuses(whole, tile, known("H200")) is None


def test_rows_of_the_gate_fill_the_registers_of_a_team() -> None:
    """In shorter rows the compiler of the specialised text removes the packs without elements."""
    of_rows = [
        case for case in CASES if "normalized_shape" in OPS[case.op].takes and case.strategy in ("warp", "block")
    ]
    assert len(of_rows) == 4 * 2 * 4  # ops, strategies, dtypes
    for case in of_rows:
        for problem, tile in gate.spread(case, "sm_90"):
            lanes = tile.lanes if case.strategy == "warp" else tile.threads // tile.teams_per_block
            assert lanes * tile.packs_per_thread * problem.pack == problem.C


def test_a_cluster_of_blocks_of_512_threads_holds_six_packs_of_float64() -> None:
    """LayerNorm's backward has two sums per row, of other blocks too: with eight packs the newest compiler spills."""
    case = GateCase("layer_norm_backward", "cluster", "float64", "NCHW")
    tile = in_clusters(6, teams=1, threads=512)
    problem = gate.problem_for(case.op, case.strategy, case.dtype, case.layout, tile)
    assert case.solver.refuses(problem, tile, KNOWN["H100"]) is None
    more = in_clusters(8, teams=1, threads=512)
    assert "registers per thread" in str(case.solver.refuses(problem, more, KNOWN["H100"]))


def test_sixteen_packs_of_16_bit_data_with_a_mean_are_refused() -> None:
    """The compiler spills with every number of registers. Rows of float32 of as many packs have half the predicates."""
    case = GateCase("layer_norm", "warp", "bfloat16", "NCHW")
    tile = Tile("warp", packs_per_thread=16, lanes=32, rows_per_team=1, threads=128)
    problem = gate.problem_for(case.op, case.strategy, case.dtype, case.layout, tile)
    assert "packs_per_thread is 16, expected at most 12" in str(case.solver.refuses(problem, tile, KNOWN["H100"]))
    narrower = replace(problem, dtype="float32", C=problem.C // 2)
    assert case.solver.refuses(narrower, tile, KNOWN["H100"]) is None


def test_eight_packs_of_float64_are_refused_with_an_activation() -> None:
    case = GateCase("group_norm_backward", "warp", "float64", "NCHW")
    tile = Tile("warp", packs_per_thread=8, lanes=32, samples_per_team=4, threads=128)
    problem = gate.problem_for(case.op, case.strategy, case.dtype, case.layout, tile)
    assert case.solver.refuses(problem, tile, KNOWN["H100"]) is None
    activated = replace(gate.demanding(problem), extras=(), outputs=problem.outputs)
    assert activated.activation
    assert "registers per thread" in str(case.solver.refuses(activated, tile, KNOWN["H100"]))


@needs_nvrtc
@pytest.mark.parametrize(("op", "strategy"), [
    ("layer_norm", "warp"),
    ("group_norm", "block"),
    ("batch_norm_stats", "split"),
    ("batch_norm_backward_reduce", "split"),
])  # fmt: skip
def test_float16_has_no_branch_per_element(op: str, strategy: str) -> None:
    """Its conversions are asm, which the compiler moves out of no condition. Those of bfloat16 are arithmetic."""
    branches = {}
    for dtype in ("bfloat16", "float16"):
        case = GateCase(op, strategy, dtype, "NCHW")
        problem, tile = gate.spread(case, "sm_90")[0]
        text = sources.kernel_text(case.solver.launches(problem, tile)[0], problem, case.solver, tile)
        branches[dtype] = len(re.findall(r"\bbra\b", NVRTCS[-1].compile(text, "compute_90")[0]))
    assert branches["float16"] <= branches["bfloat16"] + 2  # a branch per element would be tens


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_batch_norm_gather_stats_does_not_spill_in_the_calls_of_its_divisions(dtype: str) -> None:
    """A compiler saves registers around those calls. With three ranks at a time it spilled some."""
    case, found = GateCase("batch_norm_gather_stats", "column", dtype, "NCHW"), []
    for architecture, version in (("sm_80", NVRTCS[0]), ("sm_90", NVRTCS[-1]), ("sm_120", NVRTCS[0])):
        for problem, tile in gate.accepted(case, architecture):
            found += gate.builds_of(case, problem, tile, "generic", architecture, version)
    assert faults(gate.run(found, threads=THREADS)) == ""


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_a_grid_without_an_activation_does_not_spill(dtype: str) -> None:
    """The demanding problems have an activation, with which the kernel's launch bound leaves more registers."""
    case, found = GateCase("group_norm_backward", "grid", dtype, "NCHW"), []
    for architecture in ("sm_80", "sm_90"):
        problem, tile = gate.spread(case, architecture)[0]
        assert problem.activation is None
        for text in TEXTS:
            found += gate.builds_of(case, problem, tile, text, architecture, NVRTCS[-1])
    assert faults(gate.run(found, threads=THREADS)) == ""


@needs_nvrtc
@pytest.mark.parametrize(("op", "activation", "most"), [
    pytest.param("group_norm", "silu", (11, 8, 7), marks=pytest.mark.long),
    ("group_norm_backward", "silu", (6, 6, 6)),
    pytest.param("group_norm_backward", None, (8, 8, 8), marks=pytest.mark.long),
])  # fmt: skip
def test_a_cluster_of_columns_with_many_packs_does_not_spill(
    op: str, activation: str | None, most: tuple[int, ...]
) -> None:
    """Its packs per thread follow from the problem, and the gate's problem for the tile has few."""
    case, found = GateCase(op, "cluster", "bfloat16", "NHWC"), []
    samples = {"samples": 1} if op.endswith("backward") else {}
    for groups, packs in zip((1, 2, 4), most, strict=True):
        tile = Tile("cluster", threads=256, cluster=2, groups=groups, load="registers", stages=1, **samples)
        problem = gate.demanding(gate.problem_for(case.op, case.strategy, case.dtype, case.layout, tile))
        problem = replace(problem, activation=activation)
        # Groups of 10 channels end within packs.
        problem = replace(problem, C=32 * (8 if groups == 1 else 20 if groups == 2 else 10))
        columns = groups * problem.group_channels // problem.pack
        problem = replace(problem, HxW=2 * packs * (tile.threads // columns))
        assert case.solver.of(problem, tile).refuses(KNOWN["H100"]) is None
        assert case.solver.of(replace(problem, HxW=problem.HxW + 2), tile).refuses(KNOWN["H100"]) is not None
        launch = case.solver.launches(problem, tile)[0]
        assert launch.constants["packs_per_thread"] == packs
        for text in TEXTS:
            found += gate.builds_of(case, problem, tile, text, "sm_90", NVRTCS[-1])
    assert faults(gate.run(found, threads=THREADS)) == ""


@needs_nvrtc
@pytest.mark.parametrize(
    "case", every(8, [case for case in CASES if is_long(case) and case.dtype != "float16"]), ids=str
)
def test_the_quick_suite_compiles_other_cases_to_ptx(case: GateCase) -> None:
    """The compiler proper, without ptxas, takes a fraction of a second. It checks the operands of inline PTX."""
    planned = gate.builds(NVRTCS, only=case)
    kernels = {build.kernel: build for build in reversed(planned)}.values()
    found = [one.nvrtc.compile(one.text, one.architecture.replace("sm", "compute"))[0] for one in kernels]
    assert any({"float32": ".f32", "float64": ".f64"}[case.dtype] in ptx for ptx in found)


@needs_nvrtc
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_tile_of_the_spread_spills(case: GateCase) -> None:
    """The spread is compiled for every pair. `cunorm doctor --kernels --tiles all` compiles the other tiles.

    Architectures before sm_90 have no clusters, so no tile.
    """
    results = gate.run(gate.builds(NVRTCS, tiles="spread", only=case), threads=THREADS)
    assert faults(results) == ""
    met = {(result.build.architecture, result.build.nvrtc) for result in results}
    having = [one for one in ARCHITECTURES if gate.accepted(case, one)]
    assert "sm_90" in having
    assert met == {(architecture, version) for architecture in having for version in NVRTCS}


def test_both_ends_of_the_supported_versions_are_installed() -> None:
    versions = [version.version for version in NVRTCS]
    if (advice := kernel_report.missing(versions)) is not None:
        pytest.skip(f"only NVRTC {' and '.join(versions) or 'none'}; type: {advice}")
    assert len(versions) == 2


# ---- the selection of builds ----------------------------------------------------------------------------------------


def test_every_strategy_has_cases() -> None:
    """`gate.cases` drops a case without a legal tile. A strategy without any case would not be checked."""
    found = {(case.op, case.strategy, case.dtype) for case in CASES}
    assert found == {(*one, dtype) for one in OWN for dtype in ITEMSIZE}


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"])
def test_tiles_with_the_same_fields_and_other_constants_are_all_accepted(op: str) -> None:
    """With and without a loop over rows, the next row in registers, and rows in shared memory."""
    case = GateCase(op, "block", "bfloat16", "NCHW")
    cuts = [case.solver.of(*taken) for taken in gate.accepted(case, "sm_90")]
    assert {one.reads_ahead for one in cuts} == {True, False}
    assert {one.staged for one in cuts} == ({True, False} if op.endswith("backward") else {False})
    assert {one.single_row for one in cuts} == ({False} if op.endswith("backward") else {True, False})


def test_a_strategy_with_the_kernels_of_another_op_has_tiles_that_are_compiled_for_that_op() -> None:
    """Each text of its tiles is also one of the other op's, whose gate compiles it."""
    others = [(op.name, name, one) for op in OPS.values() for name, one in op.strategies.items() if one.kernels_of]
    assert {op for op, *_ in others} == {"instance_norm", "instance_norm_backward"}
    for op, name, strategy in others:
        for layout in LAYOUTS:
            mine, its = (GateCase(each, name, "bfloat16", layout) for each in (op, str(strategy.kernels_of)))
            found = gate.accepted(mine, "sm_90")
            assert bool(found) == bool(gate.accepted(its, "sm_90"))
            for problem, tile in found[:: max(1, len(found) // 4)]:
                same = replace(problem, op=its.op)
                assert its.solver.refuses(same, tile, gate.device_of("sm_90")) is None
                for launch in strategy.launches(problem, tile):
                    text = sources.kernel_text(launch, problem, strategy, tile)
                    assert text == sources.kernel_text(launch, same, its.solver, tile)
                    assert launch.kernel in {launch.kernel for launch in its.solver.launches(same, tile)}


def test_the_choice_compiles_every_strategy_for_every_pair() -> None:
    """The choice compiles every strategy for every pair of an architecture and an NVRTC.

    Each case compiles its most demanding tile, and nearly every case a second tile. For each strategy, layout and
    element size, the most demanding tiles are compiled for two architectures and both NVRTCs. The dtypes of one element
    size share these pairs. Both texts of each strategy are compiled in the quick suite.
    """
    chosen = gate.builds([OLD, NEW])
    pairs = {(architecture, version) for architecture in ARCHITECTURES for version in (OLD, NEW)}
    for op, name in OWN:
        of_it = [build for build in chosen if (build.case.op, build.case.strategy) == (op, name)]
        own = [case for case in CASES if (case.op, case.strategy) == (op, name)]
        quick = [quick_builds([build for build in of_it if build.case == case]) for case in own if not is_long(case)]
        assert {build.kind for builds in quick for build in builds} == set(TEXTS), (op, name)
        able = {one for one in pairs if any(gate.accepted(case, one[0]) for case in own)}
        assert {(build.architecture, build.nvrtc) for build in of_it} == able
        assert able == pairs or name == "cluster"
    others = 0
    met: dict[tuple[Any, ...], set[tuple[str, Nvrtc]]] = {}
    for case in CASES:
        of_it = [build for build in chosen if build.case == case]
        able_here = [architecture for architecture in ARCHITECTURES if gate.accepted(case, architecture)]
        worst = {architecture: gate.spread(case, architecture)[0][1] for architecture in able_here}
        most = {(build.architecture, build.nvrtc) for build in of_it if build.tile == worst[build.architecture]}
        assert most
        met.setdefault((case.op, case.strategy, case.layout, ITEMSIZE[case.dtype]), set()).update(most)
        others += len({build.tile for build in of_it} - set(worst.values()))
        ranked = [gate.demand(case, case.solver.of(*taken)) for taken in gate.accepted(case, "sm_90")]
        spread = [gate.demand(case, case.solver.of(*taken)) for taken in gate.spread(case, "sm_90")]
        assert (spread[0], spread[-1]) == (max(ranked), min(ranked))
        main = {gate._kernel(case, *taken) for taken in gate.accepted(case, "sm_90")}
        assert main == {gate._kernel(case, *taken) for taken in gate.spread(case, "sm_90")}
        assert min(5, len(ranked)) <= len(spread) <= 5 + len(main) - 1
        assert main == {build.kernel for build in of_it if build.kernel in main}, case
    # `cluster` runs on three architectures only: two dtypes may be compiled for the same one.
    for (_, strategy, *_), several in met.items():
        assert len({architecture for architecture, _ in several}) >= (1 if strategy == "cluster" else gate.QUICK_PAIRS)
        assert {version for _, version in several} == {OLD, NEW}
    assert others > 0.8 * len(CASES)


def test_the_quick_suite_compiles_every_kernel_of_float32() -> None:
    """Every strategy and layout is compiled for a pair; together, for both NVRTCs."""
    versions = set()
    for case in (one for one in CASES if one.dtype == "float32"):
        whole = gate.builds([OLD, NEW], only=case)
        quick = quick_builds(whole)
        assert {build.kernel for build in quick} == {build.kernel for build in whole}, case
        assert len({(build.architecture, build.nvrtc) for build in most_demanding(whole)}) >= gate.QUICK_PAIRS, case
        versions |= {build.nvrtc for build in quick if build.kind == "specialised"}
    assert versions == {OLD, NEW}


@pytest.mark.parametrize(("tiles", "several"), [("spread", gate.spread), ("all", gate.accepted)])
@pytest.mark.parametrize("versions", [[OLD], [OLD, NEW]])
def test_spread_and_all_compile_every_tile_for_every_pair(versions: list[Nvrtc], tiles: str, several: Any) -> None:
    case = GateCase("layer_norm", "block", "bfloat16", "NCHW")
    found: dict[tuple[str, Nvrtc], Counter[Tile]] = {}
    for build in gate.builds(versions, tiles=tiles, only=case):
        found.setdefault((build.architecture, build.nvrtc), Counter())[build.tile] += 1
    assert set(found) == {(name, version) for name in ARCHITECTURES for version in versions}
    for (name, _), built in found.items():
        assert set(built) == {tile for _, tile in several(case, name)}
        # One problem has parameters of the data's dtype, two have wide parameters, one of them with y in float32 too;
        # each has two texts.
        assert set(built.values()) == {6}
    assert len(gate.accepted(case, "sm_90")) >= 16


def test_a_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Counter[tuple[str, str, Nvrtc]] = Counter()

    def usages(text: str, architecture: str, version: Nvrtc) -> list[Usage]:
        compiled[text, architecture, version] += 1
        return [Usage("kernel", 32, 0, 0, 0, 0, 1, 1)]

    monkeypatch.setattr(gate, "usages", usages)
    planned = gate.builds([OLD, NEW])
    results = gate.run(planned)
    assert [result.build for result in results] == planned
    assert set(compiled.values()) == {1}
    assert len(compiled) < len(planned)  # tiles share helper kernels such as parameter_sums


# ---- the faults that the gate finds ---------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("version", NVRTCS, ids=lambda version: version.version)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gate_finds_spills_and_stacks(architecture: str, version: Nvrtc) -> None:
    spills, stack, small = gate.run([build_of(text, architecture, 128, version) for text in (SPILLS, STACK, SMALL)])
    assert spills.usages[0].spill_bytes > 0
    assert re.match(r"spills: spills \d+ bytes.*: group_norm-block.* on " + architecture, spills.faults()[0])
    assert stack.usages[0].spill_bytes == 0
    assert stack.usages[0].stack_bytes == 256
    assert "has a stack of 256 bytes" in stack.faults()[0]
    assert small.faults() == []


def test_the_gate_finds_kernels_that_cannot_be_launched() -> None:
    for registers, threads, fits in [(64, 1024, True), (65, 1000, False), (65, 896, True), (255, 256, True)]:
        usage = Usage("kernel", registers, 0, 0, 0, 0, 1, 1)
        found = BuildResult(build_of(SMALL, threads=threads, version=OLD), (usage,)).faults()
        assert found == [] if fits else "cannot be launched" in found[0], (registers, threads)


def test_the_gate_finds_loads_that_are_cut_except_those_of_gamma_and_beta() -> None:
    for cut, allowed in [(0, True), (2, True), (3, False), (4, False)]:
        usage = Usage("kernel", 64, 0, 0, 0, 0, 4, 1, taken_apart=cut)
        found = BuildResult(build_of(SMALL, version=OLD), (usage,)).faults()
        assert found == [] if allowed else f"cuts {cut} of 4 16-byte loads" in found[0], cut


@needs_nvrtc
def test_a_kernel_that_does_not_compile_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    (result,) = gate.run([build_of("#error not yet\n" + SMALL)])
    assert "does not compile" in result.faults()[0] and "not yet" in result.faults()[0]
    assert not [*(tmp_path / "nvrtc").iterdir()]


# ---- test kernels ---------------------------------------------------------------------------------------------------

TYPES = {"data_t": "bfloat16", "gamma_t": "float32", "beta_t": "float32", "stat_t": "float32"}
HEAD = sources._head(TYPES, "NCHW", {"threads": 128, "cluster": 2})
INCLUDE = re.compile(r'^#include "([\w/]+\.cuh)"$', re.MULTILINE)


def gated(path: Path) -> list[str]:
    """Return the architectures for which a test kernel must compile.

    ``// gate: sm_90`` as the first line means sm_90 and all later architectures. Without such a line, a kernel that
    includes a header of kernels_cu must compile for all of them. Any other kernel is only for the CPU executor and must
    compile for none.
    """
    text = path.read_text(encoding="utf-8")
    marked = re.match(r"// gate: (sm_\d+)\n", text)
    if marked is not None:
        return list(ARCHITECTURES[ARCHITECTURES.index(marked[1]) :])
    return list(ARCHITECTURES) if INCLUDE.search(text) else []


def compiles_for(path: Path, architecture: str) -> None:
    """Compile a test kernel with every NVRTC and assert that the gate finds no fault."""
    text = HEAD + expanded(path.read_text(encoding="utf-8"), path.stem)
    results = gate.run([build_of(text, architecture, version=version) for version in NVRTCS], threads=THREADS)
    assert faults(results) == ""


KERNELS = [(path, name) for path in sorted(TEST_KERNELS.glob("*.cu")) for name in gated(path)]


@needs_nvrtc
@pytest.mark.parametrize(
    ("path", "architecture"), every(2, KERNELS), ids=[f"{path.stem}-{name}" for path, name in KERNELS]
)
def test_test_kernels_compile(path: Path, architecture: str) -> None:
    compiles_for(path, architecture)


@needs_nvrtc
def test_a_test_kernel_with_a_gate_line_is_compiled_from_that_architecture_on(tmp_path: Path) -> None:
    assert ("conversions", "sm_80") in [(path.stem, name) for path, name in KERNELS]
    path = tmp_path / "clusters.cu"
    body = '#include "common/reduce.cuh"\n#include "common/types.cuh"\n' + SMALL.replace(
        "x[threadIdx.x] = 1", 'asm volatile("barrier.cluster.arrive;" ::: "memory"); store(x, 0, widen(data_t()))'
    )
    path.write_text("// gate: sm_90\n" + body)
    assert gated(path) == ["sm_90", "sm_100", "sm_120"]
    compiles_for(path, "sm_90")
    with pytest.raises(AssertionError, match="does not compile"):
        compiles_for(path, "sm_80")


# ---- the report -----------------------------------------------------------------------------------------------------


def invented(build: Build, spill: int = 0) -> BuildResult:
    entry = build.kernel if build.kernel != "group_norm_split" else "group_norm_split_apply"
    return BuildResult(build, (Usage(entry, 40 + build.threads // 64, spill, 0, 0, 1, 4, 4),))


@pytest.mark.parametrize("versions", [[NEW], [OLD, NEW]])
def test_the_report_lists_every_op_and_strategy(versions: list[Nvrtc]) -> None:
    results = [invented(build) for build in gate.builds(versions)]
    names = [version.version for version in versions]
    document = kernel_report.document(results, names, "choice")
    assert document["ok"] and document["faults"] == []
    assert json.loads(json.dumps(document))["schema"] == "cunorm-kernels/1"
    listed = {(op, row["dtype"]) for row in document["kernels"] for op in row["ops"]}
    wanted = {f"{op} {name}" for op, name in OWN}
    assert listed == {(op, dtype) for op in wanted for dtype in ITEMSIZE}
    lines = kernel_report.report(results, names, "choice").splitlines()
    assert max(len(line) for line in lines if not line.startswith("  pip ")) <= 120
    kernels = {row["kernel"] for row in document["kernels"]}
    assert kernels <= {line.split()[0] for line in lines if line and line[0] != " "}
    assert sum(line.startswith(" bfloat16 ") for line in lines) == len(kernels)


def test_a_row_of_the_report_has_the_extremes_of_its_tiles() -> None:
    uses = [(Usage("k", 32, 0, 0, 0, 1, 1, 1), 128), (Usage("k", 200, 8, 16, 400, 1, 1, 1), 256)]
    results = [BuildResult(build_of(f"{use}", "sm_90", threads, OLD), (use,)) for use, threads in uses]
    (row,) = kernel_report.rows([*results, results[0]])
    assert (row.tiles, row.registers, row.threads) == (2, (32, 200), (128, 256))
    assert (row.spill_bytes, row.stack_bytes, row.shared_bytes) == (8, 16, 400)
    assert row.resident == 256 / 2048
    assert "fault: k: spills 8 bytes" in kernel_report.report(results, ["12.8.1"], "all")


@pytest.mark.parametrize(
    ("registers", "threads", "architecture", "share"),
    [
        (32, 256, "sm_90", 1.0),
        (33, 256, "sm_90", 0.75),  # rounded up to 40 registers: 12 warps per quarter of a multiprocessor
        (64, 1024, "sm_90", 0.5),
        (128, 512, "sm_90", 0.25),
        (255, 256, "sm_90", 0.125),
        (24, 32, "sm_90", 0.5),  # a multiprocessor holds at most 32 blocks
        (40, 512, "sm_89", 1.0),
        (40, 1024, "sm_120", 1024 / 1536),
    ],
)
def test_share_of_resident_threads(registers: int, threads: int, architecture: str, share: float) -> None:
    """The expected shares are from NVIDIA's occupancy calculator."""
    assert kernel_report.resident(registers, threads, architecture) == pytest.approx(share)


def test_missing_nvrtc_versions_are_reported_with_advice() -> None:
    assert kernel_report.missing(["12.8.93", "13.5.37"]) is None
    assert "nvidia-cuda-nvrtc>=13,<14" in str(kernel_report.missing(["12.8.93", "12.9.86"]))
    assert "nvidia-cuda-nvrtc-cu12==12.8.*" in str(kernel_report.missing(["12.9.86", "13.5.37"]))
    assert str(kernel_report.missing([])).count("pip install") == 2
