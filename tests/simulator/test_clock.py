"""The clock, on programs of a few instructions whose time follows from the facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator import clock, machine
from benchmarks.simulator.clock import GPUS, Gpu, Timing
from benchmarks.simulator.machine import Kernel
from cunorm.core.errors import KernelFault
from tests.simulator.programs import CONTROL, kernel, launch, line

GPU = GPUS["H200"]
FACTS = GPU.cycles
#: stall 1, write scoreboard 0; and a wait for it.
LOADS, WAITS = 1 | 0 << 5 | 7 << 8, CONTROL | 1 << 11


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    machine.engine()


def timed(
    program: Sequence[str | tuple[str, int]], arrays: Sequence[np.ndarray] = (), gpu: Gpu = GPU, **options: int
) -> Timing:
    """Time a program; an instruction may have a control word."""
    plain = [(one, CONTROL) if isinstance(one, str) else one for one in program]
    code = kernel([text for text, _ in plain], arguments=len(arrays), shared_bytes=options.pop("static", 0)).code
    registers = options.pop("registers", 32)
    lines = tuple(line(text, number, control) for number, (text, control) in enumerate(plain))
    made = Kernel(replace(code, lines=lines, registers=registers))
    return clock.timed(launch(made, arrays, **options), gpu)


def cycles(*arguments: object, **options: object) -> float:
    """Cycles of a program after the start of its launch."""
    return timed(*arguments, **options).seconds * GPU.clock - FACTS["launch_latency"]  # type: ignore[arg-type]


def test_stall_counts_space_the_instructions_of_a_warp() -> None:
    add = ("FADD R1,R1,R1", CONTROL - 1 + 5)
    assert cycles([add] * 100 + ["EXIT"]) == pytest.approx(500, abs=2)
    # Warps in one partition fill each other's gaps: 16 warps are 4 in each partition.
    assert cycles([add] * 100 + ["EXIT"], threads=512) == pytest.approx(500, abs=10)


def test_a_partition_issues_one_instruction_per_cycle() -> None:
    count, warps = 100, 32
    took = cycles(["NOP"] * count + ["EXIT"], threads=32 * warps)
    assert took == pytest.approx((count + 1) * warps / 4, rel=0.02)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("MUFU.EX2 R1,R2", 8),
        ("IADD3 R1,R2,R3,R4", 2),
        ("IMAD R1,R2,R3,R4", 2),
        ("FFMA R1,R2,R3,R4", 1),
        ("DFMA R4,R6,R6,R8", 2),
    ],
)
def test_a_pipe_limits_its_instructions(text: str, interval: int) -> None:
    count, warps = 50, 16
    took = cycles([text] * count + ["EXIT"], threads=32 * warps)
    assert took == pytest.approx(count * warps / 4 * interval, rel=0.05)


def load(stride: int) -> list[str | tuple[str, int]]:
    """Load a word per lane, with a stride in bytes, and use it."""
    return [
        ("S2R R0,SR_TID.X", LOADS),
        ("LDC.64 R2,c[0x0][0x210]", LOADS),
        (f"IMAD.WIDE.U32 R4,R0,{stride:#x},R2", WAITS),
        ("LDG.E R6,desc[UR4][R4.64]", LOADS),
        ("FADD R7,R6,R6", WAITS),
    ]


def test_a_load_comes_from_the_nearest_memory_that_has_it() -> None:
    array = np.zeros(4096, np.uint32)
    once = cycles([*load(4), "EXIT"], [array])
    again = cycles([*load(4), *load(4), "EXIT"], [array])
    strong = [
        ("LDG.E.STRONG.GPU" + text[5:], control) if text.startswith("LDG") else (text, control)
        for text, control in load(4)
    ]
    from_l2 = cycles([*load(4), *strong, "EXIT"], [array])
    around = FACTS["constant_latency"] + FACTS["special_latency"]
    assert once == pytest.approx(FACTS["dram_latency"] + around, abs=30)
    assert again - once == pytest.approx(FACTS["l1_latency"] + FACTS["constant_latency"], abs=15)
    assert from_l2 - once == pytest.approx(FACTS["l2_latency"] + FACTS["constant_latency"], abs=15)


def test_scattered_lanes_move_more_sectors() -> None:
    array = np.zeros(2**20, np.uint32)
    near, far = (timed([*load(stride), "EXIT"], [array]) for stride in (4, 256))
    assert (near.dram_read, far.dram_read) == (128, 32 * 64)


def test_the_l1_cache_keeps_sectors() -> None:
    """Lanes 0 to 7 read the first sector of a line; then all lanes read the line, which is not wholly there."""
    array = np.zeros(4096, np.uint32)
    some = [*load(4)]
    some.insert(3, ("ISETP.GE.AND P0,PT,R0,0x8,PT", CONTROL))
    some[4] = ("@!P0 LDG.E R6,desc[UR4][R4.64]", LOADS)
    first, both = (timed([*some, *more, "EXIT"], [array]) for more in ([], load(4)))
    assert (first.dram_read, first.l2_hit) == (64, 0)
    assert (both.dram_read, both.l2_hit) == (128, 32)


def test_bank_conflicts_take_wavefronts() -> None:
    def program(stride: int) -> list[str | tuple[str, int]]:
        head: list[str | tuple[str, int]] = [("S2R R0,SR_TID.X", LOADS), (f"IMAD R1,R0,{stride:#x},RZ", WAITS)]
        return [*head, *[("LDS R2,[R1+0x400]", CONTROL)] * 200, "EXIT"]

    plain, conflicts = (cycles(program(stride), static=8192) for stride in (4, 128))
    assert plain == pytest.approx(200, rel=0.3)
    assert conflicts == pytest.approx(200 * 32, rel=0.05)


def test_blocks_beyond_the_resident_ones_wait() -> None:
    body = [("FADD R1,R1,R1", CONTROL - 1 + 15)] * 300 + ["EXIT"]
    wave = 132 * 32
    one, two = (timed(body, grid=blocks) for blocks in (wave, wave + 1))
    assert one.resident == two.resident == 32
    added = (two.seconds - one.seconds) * GPU.clock
    assert added == pytest.approx(300 * 15 + FACTS["block_latency"], rel=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threads": 1024, "registers": 32}, 2),
        ({"threads": 256, "registers": 213}, 1),
        ({"threads": 128, "registers": 128}, 4),
        ({"threads": 32, "static": 100 * 1024}, 2),
        ({"threads": 32}, 32),
    ],
)
def test_resident_blocks(options: dict[str, int], expected: int) -> None:
    """CUDA's occupancy: registers in units of 8 per thread and warp, shared memory plus 1 KiB, threads, blocks."""
    assert timed(["EXIT"], **options).resident == expected


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="by_hand: a multiprocessor of NVIDIA H200 cannot hold one of its blocks"):
        timed(["EXIT"], threads=1024, registers=255)


def test_clusters_share_a_group_of_multiprocessors() -> None:
    """Blocks that fill a multiprocessor: a group of 18 holds two clusters of 8, and two multiprocessors stay idle."""
    body: list[str | tuple[str, int]] = [*[("FADD R1,R1,R1", CONTROL - 1 + 15)] * 300, "EXIT"]
    fitting = GPU.device.resident_clusters(8, 1)
    one, two = (timed(body, grid=8 * count, cluster=8, static=200 * 1024) for count in (fitting, fitting + 1))
    assert one.resident == 1
    assert two.seconds - one.seconds > 4000 / GPU.clock


def test_a_block_waits_at_its_barrier() -> None:
    """One warp computes for 1000 cycles; the others wait for it."""
    program: list[str | tuple[str, int]] = [("S2R R0,SR_TID.X", LOADS), ("ISETP.GE.AND P0,PT,R0,0x20,PT", WAITS)]
    program += [("@P0 BRA 0x670", CONTROL), *[("FADD R1,R1,R1", CONTROL - 1 + 10)] * 100]
    program += [("BAR.SYNC.DEFER_BLOCKING 0x0", CONTROL), "EXIT"]
    found = timed(program, threads=128)
    assert found.seconds * GPU.clock - FACTS["launch_latency"] == pytest.approx(1000 + FACTS["barrier_latency"], abs=60)
    assert found.waits["BARRIER"] > 0.5


def test_the_dram_limits_a_stream() -> None:
    """A load of 16 bytes per thread from 64 MiB, with nothing else to do: the bytes over the copy's bandwidth."""
    array = np.zeros(2**26, np.uint8)
    program: list[str | tuple[str, int]] = [("S2R R0,SR_TID.X", LOADS), ("S2R R1,SR_CTAID.X", LOADS)]
    program += [("LDC.64 R2,c[0x0][0x210]", LOADS), ("IMAD R0,R1,0x400,R0", WAITS)]
    program += [
        "IMAD.WIDE.U32 R4,R0,0x10,R2",
        ("LDG.E.128 R8,desc[UR4][R4.64]", LOADS),
        ("FADD R7,R8,R8", WAITS),
        "EXIT",
    ]
    found = timed(program, [array], grid=2**26 // 16 // 1024, threads=1024)
    assert found.dram_read == 2**26
    assert found.seconds == pytest.approx(2**26 / GPU.copy, rel=0.2)
    assert found.dram > 0.85


def test_a_wait_that_never_ends_is_a_fault() -> None:
    with pytest.raises(KernelFault, match=r"kernel by_hand, block -1, warp -1: polls in vain for \d+ cycles"):
        timed(["YIELD", "BRA 0x0"])


def test_the_time_does_not_change_between_runs() -> None:
    array = np.zeros(4096, np.uint32)
    program = [*load(4), "EXIT"]
    assert len({timed(program, [array], grid=64, threads=64).seconds for _ in range(3)}) == 1


def copy_waits(copy: list[str | tuple[str, int]], wait: list[str | tuple[str, int]]) -> float:
    """Cycles from the start of a kernel that copies to shared memory until it may use the bytes."""
    head: list[str | tuple[str, int]] = [("LDC.64 R2,c[0x0][0x210]", LOADS), ("MOV R6,0x400", WAITS)]
    return cycles([*head, *copy, *wait, "EXIT"], [np.zeros(4096, np.uint32)], static=1024)


def test_a_wait_for_asynchronous_copies_lasts_until_they_arrive() -> None:
    copy: list[str | tuple[str, int]] = ["LDGSTS.E.BYPASS.128 [R6],desc[UR4][R2.64]", "LDGDEPBAR"]
    arrived = copy_waits(copy, ["DEPBAR.LE SB0,0x0"])
    not_waited = copy_waits(copy, ["DEPBAR.LE SB0,0x1"])
    assert not_waited < 100 < FACTS["dram_latency"] < arrived < FACTS["dram_latency"] + 150


def test_a_wait_for_a_bulk_copy_lasts_until_it_arrives() -> None:
    """One thread copies 64 bytes; the phase of the mbarrier is complete when they have arrived."""
    program: list[str | tuple[str, int]] = [("ULDC.64 UR10,c[0x0][0x210]", LOADS), ("UMOV UR4,0x1ffffe", WAITS)]
    program += ["UMOV UR5,URZ", "UMOV UR6,0x400", "SYNCS.EXCH.64 URZ,[UR6],UR4", "MOV R10,0x40"]
    program += ["UMOV UR8,0x440", "UMOV UR9,0x400", "UMOV UR7,0x4", "SYNCS.ARRIVE.TRANS64 RZ,[UR6],R10"]
    program += ["UBLKCP.S.G [UR8],[UR10],UR7", ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0,[UR6],RZ", LOADS)]
    program += [("@P0 EXIT", WAITS), "BRA 0xb0"]
    took = cycles(program, [np.zeros(64, np.uint32)], threads=1, static=256)
    assert FACTS["dram_latency"] < took < FACTS["dram_latency"] + 200


def test_a_cluster_waits_at_its_barrier() -> None:
    program: list[str | tuple[str, int]] = ["UCGABAR_ARV", "UCGABAR_WAIT", "EXIT"]
    assert cycles(program, grid=4, cluster=4) == pytest.approx(FACTS["cluster_latency"], abs=20)


def test_what_exceeds_the_dirty_lines_goes_to_the_dram() -> None:
    array = np.zeros(2**25, np.uint8)
    program: list[str | tuple[str, int]] = [("S2R R0,SR_TID.X", LOADS), ("S2R R1,SR_CTAID.X", LOADS)]
    program += [("LDC.64 R2,c[0x0][0x210]", LOADS), ("IMAD R0,R1,0x400,R0", WAITS), "IMAD.WIDE.U32 R4,R0,0x10,R2"]
    found = timed([*program, "STG.E.128 desc[UR4][R4.64],R8", "EXIT"], [array], grid=2**25 // 2**14, threads=1024)
    assert found.dram_written == pytest.approx(2**25 - FACTS["dirty_capacity"], rel=0.01)


def test_a_sector_that_is_still_dirty_is_written_to_the_dram_once() -> None:
    # Threads t and t + 512 of a block store to the same 16 bytes.
    array = np.zeros(2**25, np.uint8)
    program: list[str | tuple[str, int]] = [("S2R R0,SR_TID.X", LOADS), ("S2R R1,SR_CTAID.X", LOADS)]
    program += [("LDC.64 R2,c[0x0][0x210]", LOADS), ("LOP3.LUT R0,R0,0x1ff,RZ,0xc0,!PT", WAITS)]
    program += ["IMAD R0,R1,0x200,R0", "IMAD.WIDE.U32 R4,R0,0x10,R2"]
    found = timed([*program, "STG.E.128 desc[UR4][R4.64],R8", "EXIT"], [array], grid=2**25 // 2**13, threads=1024)
    assert found.dram_written == pytest.approx(2**25 - FACTS["dirty_capacity"], rel=0.01)
