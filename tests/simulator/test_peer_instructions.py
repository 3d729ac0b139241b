"""Instructions that only the kernels of PyTorch and Triton use: pairs of bfloat16, matrices, atomics, local memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.simulator import machine
from benchmarks.simulator.machine import Launch, Placed
from cunorm.core.errors import KernelFault
from cunorm.executors.cpu.guarded_arrays import PARAMETER
from tests.simulator.programs import LANES, evaluate, kernel, launch

#: The first byte of shared memory in its window.
SHARED = 0x400


def run(texts: Sequence[str], *arrays: np.ndarray, **options: int) -> None:
    """Run a program whose arguments are the addresses of arrays, found in R2, R4 and so on; R0 is the lane."""
    prologue = ["S2R R0,SR_TID.X", *(f"LDC.64 R{2 + 2 * k},c[0x0][{0x210 + 8 * k:#x}]" for k in range(len(arrays)))]
    made = kernel([*prologue, *texts, "EXIT"], arguments=len(arrays), **options)
    machine.run(launch(made, arrays))


# ---- pairs of bfloat16 ----------------------------------------------------------------------------------------------


def value(bits: int) -> Fraction:
    return Fraction(float(np.array([bits << 16], np.uint32).view(np.float32)[0]))


def nearest(exact: Fraction) -> int:
    """The bits of the bfloat16 nearest to a number, to even."""
    towards_zero = int(np.array([float(exact)]).astype(np.float32).view(np.uint32)[0]) >> 16
    candidates = range(towards_zero - 1, towards_zero + 2)
    return min(candidates, key=lambda bits: (abs(value(bits) - exact), bits & 1))


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("HADD2.BF16_V2 R20,R10,R11", lambda x, y, z: x + y),
        ("HADD2.BF16_V2 R20,R10,-R11", lambda x, y, z: x - y),
        ("HMUL2.BF16_V2 R20,R10,R11", lambda x, y, z: x * y),
        ("HFMA2.BF16_V2 R20,R10,R11,R12", lambda x, y, z: x * y + z),
        ("HFMA2.MMA.BF16_V2 R20,R10,1,1,R12", lambda x, y, z: x + z),
        ("HFMA2.MMA.BF16_V2 R20,R10,R11,R12", lambda x, y, z: x * y + z),
    ],
)
def test_pairs_of_bfloat16(text: str, exact: Callable[..., Fraction]) -> None:
    random = np.random.default_rng(0)
    # Normal numbers of both signs, between 2^-12 and 2^12.
    halves = random.integers(115 << 7, 139 << 7, (3, 2, LANES)) | random.integers(0, 2, (3, 2, LANES)) << 15
    inputs = halves[:, 1] << 16 | halves[:, 0]
    (found,) = evaluate([text], *inputs.tolist())
    for lane in range(LANES):
        for half in range(2):
            expected = nearest(exact(*(value(int(bits)) for bits in halves[:, half, lane])))
            assert found[lane] >> 16 * half & 0xFFFF == expected, (lane, half)


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        # 259/256 lies halfway between 129/128 and 130/128, 2^-40 less does not; a float32 loses the 2^-40.
        (Fraction(7, 4), Fraction(37, 64), -Fraction(1, 2**40), Fraction(129, 128)),
        # 261/256 lies halfway between 130/128 and 131/128, 2^-40 more does not.
        (Fraction(9, 8), Fraction(29, 32), Fraction(1, 2**40), Fraction(131, 128)),
    ],
)
def test_a_product_and_a_sum_are_rounded_once(x: Fraction, y: Fraction, z: Fraction, expected: Fraction) -> None:
    (found,) = evaluate(["HFMA2.BF16_V2 R20,R10,R11,R12"], *([nearest(one)] for one in (x, y, z)))
    assert value(found[0] & 0xFFFF) == expected


def test_halves_are_repeated() -> None:
    (low,) = evaluate(["HADD2.BF16_V2 R20,R10.H0_H0,R11.H1_H1"], [0x40003F80], [0x41004080])
    assert low == [0x41104110] * LANES  # 1 + 8 in both halves


def test_an_addition_of_two_constants_moves_them() -> None:
    (found,) = evaluate(["HADD2 R20,-RZ.H0_H0,1.875,1.875"], [0])
    assert found == [0x3F803F80] * LANES


# ---- matrices in shared memory --------------------------------------------------------------------------------------

#: Each lane's row of 16 bytes: lane l stores the halves 8 l to 8 l + 7.
ROWS = np.arange(LANES * 8, dtype=np.uint16).reshape(4, 8, 8)
ADDRESS = ["IMAD R8,R0,0x10,RZ", f"VIADD R8,R8,{SHARED:#x}"]


@pytest.mark.parametrize(("name", "transposed"), [("M88", False), ("MT88", True)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded(name: str, transposed: bool, count: int) -> None:
    given, found = ROWS.copy(), np.zeros((4, LANES), np.uint32)
    suffix = f".{count}" if count > 1 else ""
    texts = [*ADDRESS, "IMAD.WIDE R2,R0,0x10,R2", "IMAD.WIDE R4,R0,0x4,R4", "LDG.E.128 R12,desc[UR4][R2.64]"]
    texts += ["STS.128 [R8],R12", f"LDSM.16.{name}{suffix} R20,[R8]"]
    texts += [f"STG.E desc[UR4][R4.64+{hex(4 * LANES * k)}],R{20 + k}" for k in range(count)]
    run(texts, given, found, shared_bytes=512)
    for k in range(count):
        matrix = ROWS[k].T if transposed else ROWS[k]
        expected = matrix.reshape(LANES, 2)  # lane l: row l / 4, columns 2 (l % 4) and the next
        assert (found[k].view(np.uint16).reshape(LANES, 2) == expected).all()


def test_matrices_are_stored() -> None:
    given, found = ROWS.copy(), np.zeros((4, 8, 8), np.uint16)
    texts = [*ADDRESS, "IMAD.WIDE R2,R0,0x4,R2", "IMAD.WIDE R4,R0,0x10,R4"]
    texts += [f"LDG.E R{20 + k},desc[UR4][R2.64+{hex(4 * LANES * k)}]" for k in range(4)]
    texts += ["STSM.16.M88.4 [R8],R20", "LDS.128 R12,[R8]", "STG.E.128 desc[UR4][R4.64],R12"]
    run(texts, given, found, shared_bytes=512)
    assert (found == ROWS).all()


# ---- atomics, local memory, constants, ends -------------------------------------------------------------------------


def test_floats_are_added_atomically() -> None:
    total, values = np.array([0.5], np.float32), np.arange(LANES, dtype=np.float32)
    texts = ["IMAD.WIDE R4,R0,0x4,R4", "LDG.E R10,desc[UR4][R4.64]"]
    run([*texts, "ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU PT,RZ,desc[UR4][R2.64],R10"], total, values)
    assert total[0] == 0.5 + values.sum()


def test_a_value_is_replaced_if_it_is_the_expected_one() -> None:
    word, before = np.array([7], np.uint32), np.zeros(LANES, np.uint32)
    # Every lane expects 7 and offers 100 + its number: the first one wins. The word has a wide address, for which
    # nvdisasm prints only the lower register.
    texts = ["S2R R0,SR_TID.X", "LDC.64 R2,c[0x0][0x210]", "LDC.64 R4,c[0x0][0x218]", "MOV R10,0x7"]
    texts += ["VIADD R11,R0,0x64", "ATOMG.E.CAS.STRONG.GPU PT,R20,[R2],R10,R11", "IMAD.WIDE R4,R0,0x4,R4"]
    memory = [
        Placed("word", 5 << 32, word.nbytes, PARAMETER, int(word.ctypes.data)),
        Placed("before", 0x10000, before.nbytes, PARAMETER, int(before.ctypes.data)),
    ]
    made = kernel([*texts, "STG.E desc[UR4][R4.64],R20", "EXIT"], arguments=2)
    machine.run(Launch(made, 1, LANES, 0, [region.address for region in memory], memory))
    assert word[0] == 100
    assert before.tolist() == [7] + [100] * (LANES - 1)


def test_generic_addresses_reach_local_memory() -> None:
    found = np.zeros(LANES, np.uint32)
    texts = ["LDC R6,c[0x0][0x20]", "LDC R7,c[0x0][0x24]", "STL [RZ+0x4],R0", "LD.E R20,desc[UR4][R6.64+0x4]"]
    run([*texts, "IMAD.WIDE R2,R0,0x4,R2", "STG.E desc[UR4][R2.64],R20"], found, local_bytes=8)
    assert found.tolist() == list(range(LANES))


@pytest.mark.parametrize(("text", "expected"), [("LDC.U8", 0x85), ("LDC.S8", 0xFFFFFF85), ("LDC.U16", 0x8502)])
def test_constants_of_less_than_a_word(text: str, expected: int) -> None:
    found = np.zeros(LANES, np.uint32)
    at = 0x219 if "8" in text else 0x218
    made = kernel(
        ["S2R R0,SR_TID.X", "LDC.64 R2,c[0x0][0x210]", f"{text} R20,c[0x0][{at:#x}]", "IMAD.WIDE R2,R0,0x4,R2",
         "STG.E desc[UR4][R2.64],R20", "EXIT"], arguments=2
    )  # fmt: skip
    region = Placed("found", 0x10000, found.nbytes, PARAMETER, int(found.ctypes.data))
    arguments = (0x10000).to_bytes(8, "little") + bytes([0x02, 0x85, 0, 0, 0, 0, 0, 0])
    machine.run(Launch(made, 1, LANES, 0, arguments, [region]))
    assert found.tolist() == [expected] * LANES


def test_an_end_has_a_second_predicate() -> None:
    found = np.zeros(LANES, np.uint32)
    texts = ["LOP3.LUT P0,RZ,R0,0x1,RZ,0xc0,!PT", "LOP3.LUT P1,RZ,R0,0x2,RZ,0xc0,!PT", "@P0 EXIT P1", "MOV R20,0x1"]
    run([*texts, "IMAD.WIDE R2,R0,0x4,R2", "STG.E desc[UR4][R2.64],R20"], found)
    assert found.tolist() == [int(lane % 4 != 3) for lane in range(LANES)]


def test_a_call_outside_the_kernel_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="calls a function outside its code"):
        evaluate(["LEPC R20,0x40", "CALL.ABS.NOINC R14"], [0])
