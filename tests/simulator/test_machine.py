"""The machine: control flow, barriers, memory, and what it says of a kernel that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator import cubin, machine
from benchmarks.simulator.machine import Kernel, Launch
from cunorm.core.errors import CompileError, KernelFault
from cunorm.executors.cpu.guarded_arrays import PARAMETER, Region
from tests.kernels import kernel_checks
from tests.kernels.kernel_checks import CHECKS
from tests.simulator.programs import LANES, evaluate, kernel, launch, predicates
from tests.support.paths import KERNELS

# ---- control flow ---------------------------------------------------------------------------------------------------


def test_lanes_diverge_and_meet() -> None:
    """Odd lanes add 5, even lanes 7; all shuffle after they have met."""
    code = ["LOP3.LUT P0,RZ,R10,0x1,RZ,0xc0,!PT", "MOV R11,R10", "BSSY B0,0x0", "@P0 BRA 0xd0"]
    # 6 instructions of the prologue come first: the branch at 0x90 goes to 0xd0.
    start = len(["S2R", "LDC", "LDC", "IMAD", "IMAD", "LDG"]) * 16
    there, here = f"{start + 7 * 16:#x}", f"{start + 6 * 16:#x}"
    code = [code[0], code[1], code[2], f"@P0 BRA {here}", "VIADD R11,R10,0x7", f"BRA {there}"]
    code += ["VIADD R11,R10,0x5", "BSYNC B0", "SHFL.IDX PT,R20,R11,0x3,0x1f", "MOV R21,R11"]
    shuffled, own = evaluate(code, list(range(LANES)), results=2)
    assert own == [lane + (5 if lane % 2 else 7) for lane in range(LANES)]
    assert shuffled == [3 + 5] * LANES


@pytest.mark.parametrize(("taking", "expected"), [(0x1, 7), (0x0, 0)])
def test_a_uniform_branch_is_taken_by_all_lanes_or_none(taking: int, expected: int) -> None:
    """``BRA.U`` with a predicate that only some lanes have: none jumps, so that all still shuffle together."""
    start = len(["S2R", "LDC", "LDC", "IMAD", "IMAD", "LDG"]) * 16
    code = [f"LOP3.LUT P0,RZ,R10,{taking:#x},RZ,0xc0,!PT", "MOV R11,RZ", f"@!P0 BRA.U {start + 4 * 16:#x}"]
    code += ["MOV R11,0x7", "SHFL.IDX PT,R20,R11,0x2,0x1f"]
    (shuffled,) = evaluate(code, list(range(LANES)))
    assert shuffled == [expected] * LANES


def test_a_shuffle_from_a_lane_that_does_not_take_part_is_a_fault() -> None:
    code = ["LOP3.LUT P0,RZ,R10,0x1,RZ,0xc0,!PT", "@P0 SHFL.IDX PT,R20,R10,0x2,0x1f"]
    with pytest.raises(
        KernelFault, match=r"warp 0: lane 1 shuffles from lane 2, which does not take part \(/\*0070\*/"
    ):
        evaluate(code, list(range(LANES)))


@pytest.mark.parametrize(
    ("kind", "by", "limits", "expected"),
    [
        ("BFLY", 1, 0x1F, lambda lane: lane ^ 1),
        ("UP", 2, 0x0, lambda lane: lane - 2 if lane >= 2 else lane),
        ("DOWN", 3, 0x1F, lambda lane: lane + 3 if lane < 29 else lane),
        ("IDX", 5, 0x181F, lambda lane: lane // 8 * 8 + 5),
        ("DOWN", 1, 0x1C03, lambda lane: lane + 1 if lane % 4 != 3 else lane),
    ],
)
def test_shuffles(kind: str, by: int, limits: int, expected: Callable[[int], int]) -> None:
    """PTX ISA, shfl.sync: the limits are the clamp in bits 0 to 4 and the segment mask in bits 8 to 12."""
    if kind == "IDX":
        limits = 0x18 << 8 | 0x1F
    (found,) = evaluate([f"SHFL.{kind} PT,R20,R10,{by:#x},{limits:#x}"], list(range(LANES)))
    assert found == [expected(lane) for lane in range(LANES)]


def test_votes_and_election() -> None:
    code = ["LOP3.LUT P0,RZ,R10,0x1,RZ,0xc0,!PT", "VOTE.ANY R20,P1,P0", "@P0 ELECT P2,URZ,PT", "VOTEU.ALL UP0,P0"]
    code += [
        "PLOP3.LUT P3,PT,P2,P0,PT,0xc0,0x0",
        "MOV R9,0x1",
        "SEL R21,R9,RZ,P3",
        "USEL UR6,UR6,URZ,!UPT",
        "SEL R22,R9,RZ,P1",
    ]
    ballot, elected, some = evaluate(code, list(range(LANES)), results=3)
    assert ballot == [0xAAAAAAAA] * LANES
    assert elected == [int(lane == 1) for lane in range(LANES)]
    assert some == [1] * LANES
    assert evaluate(["VOTEU.ALL UP0,PT", *predicates("UP0")], [0]) == [[1] * LANES]


def test_a_call_returns() -> None:
    start = 6 * 16
    code = ["MOV R8,RZ", f"MOV R12,{start + 3 * 16:#x}", f"CALL.REL.NOINC {start + 6 * 16:#x}", "MOV R20,R8"]
    code += ["NOP", f"BRA {start + 8 * 16:#x}", "VIADD R8,R10,0x9", "RET.REL.NODEC R12,by_hand"]
    assert evaluate(code, list(range(LANES))) == [[lane + 9 for lane in range(LANES)]]


def test_local_memory_belongs_to_a_lane() -> None:
    found = np.zeros(LANES, np.uint32)
    texts = ["LDC R1,c[0x0][0x28]", "VIADD R1,R1,-0x8", "S2R R0,SR_TID.X", "STL [R1+0x4],R0", "LDL R20,[R1+0x4]"]
    texts += ["LDC.64 R4,c[0x0][0x210]", "IMAD.WIDE.U32 R4,R0,0x4,R4", "STG.E desc[UR4][R4.64],R20", "EXIT"]
    machine.run(launch(kernel(texts, arguments=1, local_bytes=8), [found]))
    assert found.tolist() == list(range(LANES))


def test_a_barrier_of_the_block_waits_for_diverged_lanes() -> None:
    """Odd lanes write shared memory after even lanes have arrived; even lanes then read what they wrote."""
    found = np.zeros(LANES, np.uint32)
    texts = ["S2R R0,SR_TID.X", "LOP3.LUT P0,RZ,R0,0x1,RZ,0xc0,!PT", "IMAD R1,R0,0x4,RZ", "@P0 BRA 0xb0"]
    texts += ["BAR.SYNC.DEFER_BLOCKING 0x0", "LOP3.LUT R1,R1,0x4,RZ,0xfc,!PT", "LDS R5,[R1+0x400]"]
    texts += ["LDC.64 R2,c[0x0][0x210]", "IMAD.WIDE.U32 R2,R0,0x4,R2", "STG.E desc[UR4][R2.64],R5", "EXIT"]
    texts += ["STS [R1+0x400],R0", "BRA 0x40"]
    machine.run(launch(kernel(texts, arguments=1, shared_bytes=128), [found]))
    assert found.tolist() == [lane | 1 for lane in range(LANES)]


def test_a_barrier_of_the_cluster_does_not_wait_for_warps_that_have_ended() -> None:
    """PTX ISA, barrier.cluster: threads that have exited count as arrived."""
    texts = ["S2R R0,SR_TID.X", "ISETP.GE.AND P0,PT,R0,0x20,PT", "@P0 EXIT", "UCGABAR_ARV", "UCGABAR_WAIT", "EXIT"]
    found = machine.run(launch(kernel(texts, arguments=0), [], grid=2, threads=64, cluster=2))
    assert found["warps"].tolist() == [4, 4, 4, 2, 2, 2]


# ---- faults ---------------------------------------------------------------------------------------------------------

FAULTS = r"""
#include "common/async.cuh"
extern "C" __global__ void broken(float* data, long long kind) {
    extern __shared__ float shared[];
    const int thread = threadIdx.x;
    shared[thread] = data[thread];
    if (kind == 1 && thread == 40) {
        data[64] = 1.0f;  // line 8
    }
    if (kind == 2 && thread == 7) {
        *reinterpret_cast<double*>(data + 1) = 1.0;  // line 11
    }
    if (kind == 3 && thread == 9) {
        data[0] = shared[100000];  // line 14
    }
    if (kind == 4 && thread == 0) {
        mbarrier_init(reinterpret_cast<unsigned long long*>(shared), 1);
        mbarrier_wait(reinterpret_cast<unsigned long long*>(shared), 0);  // waits in async.cuh
    }
    if (kind == 5 && thread < 32) {
        while (*reinterpret_cast<volatile float*>(data) != 3.5f) {  // line 21
        }
    }
    __syncthreads();
    data[thread] = shared[63 - thread];
}
"""


def run_broken(kind: int) -> np.ndarray:
    text = kernel_checks.sources._head({"data_t": "float32"}, "NCHW", {}) + kernel_checks.expanded(FAULTS, "broken")
    data = np.arange(64, dtype=np.float32)
    memory = [Region("data", int(data.ctypes.data), data.nbytes, PARAMETER)]
    machine.run(Launch(Kernel.of_text(text, "broken"), 1, 64, 256, [memory[0].address, kind], memory))
    return data


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (1, r"kernel broken, block 0, warp 1: writes 4 bytes at byte 256 of data, which has 256 at broken\.cu:8 \(/\*"),
        (2, r"warp 0: accesses 8 bytes of global memory at the misaligned address 0x[0-9a-f]+ at broken\.cu:11 "),
        (3, r"warp 0: accesses 4 bytes at byte 400000 of shared memory, which has 256 at broken\.cu:14 "),
        (4, r"warp 0: polls a word or an mbarrier, in vain at common/async\.cuh:\d+ "),
        (5, r"warp 0: polls a word or an mbarrier, in vain at broken\.cu:21 "),
    ],
)
def test_a_fault_has_its_source_line(kind: int, message: str) -> None:
    assert np.array_equal(run_broken(0), np.arange(64)[::-1])
    with pytest.raises(KernelFault, match=message):
        run_broken(kind)


def test_a_barrier_that_a_warp_never_reaches_is_a_fault() -> None:
    """Warp 1 waits at the cluster's barrier, at which warp 0 does not arrive because it waits for the block."""
    texts = ["S2R R0,SR_TID.X", "ISETP.GE.AND P0,PT,R0,0x20,PT", "@P0 BRA 0x40", "BAR.SYNC.DEFER_BLOCKING 0x0"]
    texts += ["UCGABAR_ARV", "UCGABAR_WAIT", "EXIT"]
    with pytest.raises(KernelFault, match=r"block 0, warp 0: waits at a barrier of the block, in vain"):
        machine.run(launch(kernel(texts, arguments=0), [], threads=64))


def test_an_access_across_the_end_of_an_array_is_a_fault() -> None:
    texts = ["LDC.64 R2,c[0x0][0x210]", "LDG.E.128 R4,desc[UR4][R2.64+0x20]", "EXIT"]
    with pytest.raises(KernelFault, match="reads 16 bytes at byte 32 of array0, which has 40 "):
        machine.run(launch(kernel(texts, arguments=1), [np.zeros(10, np.uint32)]))


def test_shared_memory_of_a_block_that_has_ended_is_out_of_reach() -> None:
    """Rank 1 ends at once. Rank 0 then reads its shared memory, whose address has the rank in bits 24 and up."""
    texts = [
        "S2R R0,SR_CgaCtaId",
        "ISETP.NE.AND P0,PT,R0,RZ,PT",
        "@P0 EXIT",
        *["NOP"] * 600,
        "LDS R1,[0x1000400]",
        "EXIT",
    ]
    with pytest.raises(KernelFault, match="block 0, warp 0: accesses shared memory of rank 1, which has ended"):
        machine.run(launch(kernel(texts, arguments=0, shared_bytes=64), [], grid=2, cluster=2))


@pytest.mark.parametrize(
    ("opcode", "address", "wavefronts"),
    [
        ("LDS", "R0,0x4", 1), ("LDS", "R0,0x80", 32), ("LDS", "RZ,RZ", 1),
        ("LDS.64", "R0,0x8", 2), ("LDS.64", "RZ,RZ", 2), ("LDS.128", "R0,0x10", 4), ("LDS.128", "RZ,RZ", 4),
    ],
)  # fmt: skip
def test_wavefronts_of_shared_memory(opcode: str, address: str, wavefronts: int) -> None:
    """8-byte accesses go by half warps and 16-byte ones by quarter warps, even if all lanes read the same words."""
    texts = ["S2R R0,SR_TID.X", f"IMAD R1,{address},RZ", f"{opcode} R4,[R1+0x400]", "EXIT"]
    found = machine.run(launch(kernel(texts, arguments=0, shared_bytes=4096), []))
    assert int(found["wavefronts"][2]) == wavefronts


def test_arguments_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="arguments: 8 bytes, kernel by_hand takes 16"):
        machine.run(launch(kernel(["EXIT"], arguments=2), [np.zeros(1)]))


def test_an_entry_that_the_text_lacks_is_refused(tools: None) -> None:
    with pytest.raises(CompileError, match="entry: 'other', the cubin has no such kernel"):
        cubin.compiled('extern "C" __global__ void one() {}', "other")
    with pytest.raises(CompileError, match="architecture: 'sm_80', expected one of sm_90"):
        cubin.compiled("", "one", "sm_80")


# ---- the test kernels of tests/kernels ------------------------------------------------------------------------------


@pytest.fixture
def simulated_kernels(monkeypatch: pytest.MonkeyPatch, tools: None) -> list[str]:
    """Checks of kernel_checks.py run on the simulator; the list has the entries of the kernels that ran."""
    ran: list[str] = []

    def run(kernel: Kernel, grid: int, threads: int, shared_bytes: int, arguments: Any, **options: Any) -> None:
        blocks = options.get("blocks") or (0, grid)
        alive = options.get("resident") or 1
        made = Launch(
            kernel, grid, threads, shared_bytes, arguments, options["memory"], options.get("cluster", 1), alive
        )
        machine.run(made, blocks[0], blocks[1] - blocks[0])
        ran.append(kernel.code.entry)

    plain = SimpleNamespace(compile=Kernel.of_text, launch=run, Kernel=Kernel)
    monkeypatch.setattr(kernel_checks, "executor", plain)
    monkeypatch.setenv("CUNORM_CPU_BUILD", "plain")
    return ran


ON_A_GPU = sorted(
    name for name in CHECKS if name in ("async_copy", "async_bulk", "cluster_sum", "ticket_wait", "last_block")
)


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_test_kernel_is_right(name: str, simulated_kernels: list[str]) -> None:
    CHECKS[name]((KERNELS / f"{name}.cu").read_text(encoding="utf-8"))
    assert name in simulated_kernels
