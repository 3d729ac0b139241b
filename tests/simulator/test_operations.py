"""Each operation of the engine, on programs of a few instructions, compared with Python's integers and NumPy."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import machine
from tests.simulator.programs import LANES, evaluate, predicates

MASK = 2**32 - 1
EDGES = (0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF)
words = st.lists(st.sampled_from(EDGES) | st.integers(0, MASK), min_size=LANES, max_size=LANES)
few = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    """Compile the engine before hypothesis repeats a failing test."""
    machine.engine()


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def real(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


# ---- integers -------------------------------------------------------------------------------------------------------


@few
@given(words, words, words)
def test_sums_and_carries(a: list[int], b: list[int], c: list[int]) -> None:
    """IADD3 sets a predicate per carry; IADD3.X adds a carry, and takes a negated operand as its complement."""
    code = ["IADD3 R20,P0,P1,R10,-R11,R12", "IADD3.X R21,R10,~R11,R12,P0,P1"]
    code += ["MOV R9,0x1", "SEL R22,R9,RZ,P0", "SEL R23,R9,RZ,P1"]
    total, extended, first, second = evaluate(code, a, b, c, results=4)
    for x, y, z, got, up, one, two in zip(a, b, c, total, extended, first, second, strict=True):
        exact = x + (~y & MASK) + 1 + z
        assert got == exact & MASK
        assert (one, two) == (exact >> 32 >= 1, exact >> 32 >= 2)
        assert up == x + (~y & MASK) + z + one + two & MASK


@few
@given(words, words, words, words)
def test_sums_of_64_bits(a: list[int], b: list[int], c: list[int], d: list[int]) -> None:
    code = ["IADD3.64 R20,R10,-R12,RZ", "IADD3.64 R22,R10,R12,-0x3"]
    low, high, less, above = evaluate(code, a, b, c, d, results=4)
    for lane in range(LANES):
        first, second = b[lane] << 32 | a[lane], d[lane] << 32 | c[lane]
        assert low[lane] | high[lane] << 32 == first - second & 2**64 - 1
        assert less[lane] | above[lane] << 32 == first + second - 3 & 2**64 - 1


@few
@given(words, words, words, words)
def test_products(a: list[int], b: list[int], low: list[int], high: list[int]) -> None:
    code = ["IMAD R20,R10,R11,R12", "IMAD.HI.U32 R21,R10,R11,R12", "IMAD.WIDE R22,R10,R11,R12"]
    code += ["IMAD.WIDE.U32 R24,P0,R10,R11,R12", "MOV R9,0x1", "SEL R26,R9,RZ,P0"]
    found = evaluate(code, a, b, low, high, results=7)
    for lane, (x, y, z, w) in enumerate(zip(a, b, low, high, strict=True)):
        addend = w << 32 | z
        assert found[0][lane] == x * y + z & MASK
        assert found[1][lane] == (x * y + addend) >> 32 & MASK
        wide = signed(x) * signed(y) + addend & 2**64 - 1
        assert found[2][lane] | found[3][lane] << 32 == wide
        assert found[4][lane] | found[5][lane] << 32 == x * y + addend & 2**64 - 1
        assert found[6][lane] == (x * y + addend >= 2**64)


@few
@given(words, words, st.integers(0, 40))
def test_shifts(low: list[int], high: list[int], by: int) -> None:
    code = [f"SHF.L.U32 R20,R10,{by:#x},RZ", f"SHF.L.U64.HI R21,R10,{by:#x},R11", f"SHF.R.U64 R22,R10,{by:#x},R11"]
    code += [f"SHF.R.S32.HI R23,RZ,{by:#x},R11", f"SHF.R.U32.HI R24,RZ,{by:#x},R11", f"SHF.R.S64 R25,R10,{by:#x},R11"]
    code += [f"SHF.L.U32.HI R26,R10,{by:#x},R11", f"SHF.L.W.U32.HI R27,R10,{by:#x},R11"]
    found = evaluate(code, low, high, results=8)
    for lane, (x, y) in enumerate(zip(low, high, strict=True)):
        both = y << 32 | x
        negative = both - 2**64 if both >= 2**63 else both
        expected = [x << by, both << by >> 32, both >> by, signed(y) >> by, y >> by, negative >> by]
        expected += [both << min(by, 32) >> 32, both << by % 32 >> 32]
        assert [one[lane] for one in found] == [value & MASK for value in expected]


@few
@given(words, words, words, st.integers(0, 31))
def test_shifted_sums(a: list[int], b: list[int], c: list[int], by: int) -> None:
    """LEA and LEA.HI.X make a 64-bit address from an index."""
    code = [f"LEA R20,P0,R10,R11,{by:#x}", f"LEA.HI.X R21,R10,R12,RZ,{by:#x},P0"]
    code += [f"LEA.HI.X.SX32 R22,R10,R12,{by:#x},P0", f"LEA.HI R23,R10,R11,R12,{by:#x}", f"LEA R24,-R10,R11,{by:#x}"]
    code += [f"LEA.HI R25,R10,-R11,R12,{by:#x}", f"LEA R26,R10,-R11,{by:#x}"]
    found = evaluate(code, a, b, c, results=7)
    for lane, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        shifted = x << by & MASK
        carry = shifted + y >> 32
        assert found[0][lane] == shifted + y & MASK
        assert found[1][lane] == (x << by >> 32) + z + carry & MASK
        assert found[2][lane] == (signed(x) << by >> 32) + z + carry & MASK
        assert found[3][lane] == ((z << 32 | x) << by >> 32 & MASK) + y & MASK
        assert found[4][lane] == y - shifted & MASK
        assert found[5][lane] == ((z << 32 | x) << by >> 32 & MASK) - y & MASK
        assert found[6][lane] == shifted - y & MASK


@few
@given(words, words, words, st.integers(0, 255))
def test_logic(a: list[int], b: list[int], c: list[int], table: int) -> None:
    found = evaluate([f"LOP3.LUT R20,R10,R11,R12,{table:#x},!PT"], a, b, c)
    for lane, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        expected = sum((table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k for k in range(32))
        assert found[0][lane] == expected


@few
@given(words, words, words)
def test_bytes_are_permuted(a: list[int], choice: list[int], b: list[int]) -> None:
    found = evaluate(["PRMT R20,R10,R11,R12"], a, choice, b)
    for lane, (x, how, y) in enumerate(zip(a, choice, b, strict=True)):
        both = (y << 32 | x).to_bytes(8, "little")
        taken = [how >> 4 * k & 15 for k in range(4)]
        expected = bytes(both[k & 7] if k < 8 else 255 * (both[k & 7] >> 7) for k in taken)
        assert found[0][lane] == int.from_bytes(expected, "little")


@few
@given(words, words, words)
def test_minima(a: list[int], b: list[int], c: list[int]) -> None:
    code = ["VIMNMX R20,R10,R11,PT", "VIMNMX.U32 R21,R10,R11,!PT", "VIMNMX3 R22,R10,R11,R12,!PT"]
    code += ["VIADDMNMX R23,R10,-R11,R12,PT", "IABS R24,R10"]
    found = evaluate(code, a, b, c, results=5)
    for lane, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        difference = signed(x - y & MASK)
        expected = [min(signed(x), signed(y)), max(x, y), max(signed(x), signed(y), signed(z))]
        expected += [min(difference, signed(z)), abs(signed(x))]
        assert [one[lane] for one in found] == [value & MASK for value in expected]


@few
@given(words, st.integers(0, 31), st.integers(0, 32))
def test_bits_are_counted_and_masked(a: list[int], at: int, ones: int) -> None:
    code = ["FLO.U32 R20,R10", "FLO R21,R10", "POPC R22,R10", "BREV R23,R10"]
    code += [f"MOV R9,{at:#x}", f"BMSK R24,R9,{ones:#x}", f"SGXT R25,R10,{ones:#x}", f"SGXT.U32 R26,R10,{ones:#x}"]
    found = evaluate(code, a, results=7)
    for lane, x in enumerate(a):
        turned = ~x & MASK if x >> 31 else x
        part = x & (1 << ones) - 1
        expected = [x.bit_length() - 1, turned.bit_length() - 1, x.bit_count(), int(f"{x:032b}"[::-1], 2)]
        expected += [(1 << ones) - 1 << at, part - (1 << ones) if ones and part >> ones - 1 else part, part]
        assert [one[lane] for one in found] == [value & MASK for value in expected]


# ---- predicates -----------------------------------------------------------------------------------------------------


@few
@given(words, words, words, words)
def test_integers_are_compared(a: list[int], b: list[int], c: list[int], d: list[int]) -> None:
    """A comparison of 64 bits is one of the lower words, and one of the upper words with .EX."""
    compare = {"LT": lambda x, y: x < y, "LE": lambda x, y: x <= y, "GT": lambda x, y: x > y}
    compare |= {"GE": lambda x, y: x >= y, "EQ": lambda x, y: x == y, "NE": lambda x, y: x != y}
    for name, holds in compare.items():
        code = [f"ISETP.{name}.AND P0,P1,R10,R11,PT", f"ISETP.{name}.U32.OR P2,PT,R10,R11,!PT"]
        code += [f"ISETP.{name}.U32.AND P3,PT,R10,R12,PT", f"ISETP.{name}.AND.EX P4,PT,R11,R13,PT,P3"]
        found = evaluate([*code, *predicates("P0", "P1", "P2", "P4")], a, b, c, d, results=4)
        for lane, (x, y, z, w) in enumerate(zip(a, b, c, d, strict=True)):
            assert found[0][lane] == holds(signed(x), signed(y)) != found[1][lane]
            assert found[2][lane] == holds(x, y)
            assert found[3][lane] == holds(signed(y) << 32 | x, signed(w) << 32 | z), name


NUMBERS = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38)
PAIRS = [(x, y) for x in NUMBERS for y in NUMBERS]


@pytest.mark.parametrize("flush", [False, True])
def test_floats_are_compared(flush: bool) -> None:
    """An unordered comparison is true if an operand is NaN, an ordered one is false."""
    compare = {"LT": lambda x, y: x < y, "LE": lambda x, y: x <= y, "GT": lambda x, y: x > y}
    compare |= {"GE": lambda x, y: x >= y, "EQ": lambda x, y: x == y, "NE": lambda x, y: x != y and x == x and y == y}
    known = dict(compare)
    known |= {f"{name}U": lambda x, y, of=of: of(x, y) or x != x or y != y for name, of in compare.items()}
    known |= {"NUM": lambda x, y: x == x and y == y, "NAN": lambda x, y: x != x or y != y}
    for name, holds in known.items():
        for start in range(0, len(PAIRS), LANES):
            part = PAIRS[start : start + LANES]
            code = [f"FSETP.{name}{'.FTZ' if flush else ''}.AND P0,PT,R10,R11,PT", *predicates("P0")]
            found = evaluate(code, [bits(x) for x, _ in part], [bits(y) for _, y in part])[0]
            for (x, y), got in zip(part, found, strict=False):
                u, v = (0.0 if flush and abs(one) < 2**-126 else float(np.float32(one)) for one in (x, y))
                assert got == bool(holds(u, v)), (name, x, y)


def test_predicates_are_combined_and_packed() -> None:
    a, b = list(range(LANES)), [lane // 2 for lane in range(LANES)]
    code = ["LOP3.LUT P0,RZ,R10,0x1,RZ,0xc0,!PT", "LOP3.LUT P1,RZ,R11,0x1,RZ,0xc0,!PT"]
    code += ["PLOP3.LUT P2,P3,P0,!P1,PT,0x80,0x6a", "MOV R8,0x5a", "P2R R20,R8,0xf"]
    (found,) = evaluate(code, a, b)
    for x, y, got in zip(a, b, found, strict=True):
        p, q = x & 1, y & 1
        which = p << 2 | (1 - q) << 1 | 1
        expected = p | q << 1 | (0x80 >> which & 1) << 2 | (0x6A >> which & 1) << 3
        assert got == 0x50 | expected


def test_a_register_sets_the_predicates_of_a_mask() -> None:
    a, b = [37 * lane & 0x7F for lane in range(LANES)], [lane % 2 for lane in range(LANES)]
    code = ["LOP3.LUT P0,RZ,R11,0x1,RZ,0xc0,!PT"]  # all other predicates are true
    code += [f"ISETP.EQ.U32.AND P{k},PT,RZ,RZ,PT" for k in range(1, 7)]
    code += ["LOP3.LUT P6,RZ,R11,0x1,RZ,0xc0,!PT", "@P6 R2P PR,R10,0x55", "P2R R20,RZ,0x7f"]
    (found,) = evaluate(code, a, b)
    for x, odd, got in zip(a, b, found, strict=True):
        before = 0x3E | odd | odd << 6
        assert got == ((x & 0x55) | (before & ~0x55) if odd else before)


# ---- floating point -------------------------------------------------------------------------------------------------

floats = st.lists(st.floats(width=32, allow_subnormal=True), min_size=LANES, max_size=LANES)


def same(got: int, expected: float) -> bool:
    """Whether a word is this float; every NaN is the same, and is the one that the hardware returns."""
    return got == 0x7FFFFFFF if math.isnan(expected) else got == bits(expected)


@few
@given(floats, floats, floats)
def test_floats(a: list[float], b: list[float], c: list[float]) -> None:
    given_ = [[bits(x) for x in one] for one in (a, b, c)]
    code = ["FADD R20,R10,-R11", "FMUL R21,R10,|R11|", "FADD.FTZ R22,R10,R11", "FADD.SAT R23,R10,R11"]
    code += ["FMNMX R24,R10,R11,PT", "FSEL R25,R10,-R11,PT"]
    found = evaluate(code, *given_, results=6)
    with np.errstate(all="ignore"):
        for lane, (x, y) in enumerate(zip(np.float32(a), np.float32(b), strict=True)):
            flat = [np.float32(math.copysign(0, v)) if abs(v) < 2**-126 else v for v in (x, y)]
            flushed = flat[0] + flat[1]
            flushed = np.float32(math.copysign(0, flushed)) if abs(flushed) < 2**-126 else flushed
            assert same(found[0][lane], x - y)
            assert same(found[1][lane], x * abs(y))
            assert same(found[2][lane], flushed)
            total = x + y
            assert same(found[3][lane], 0.0 if math.isnan(total) or total <= 0 else min(total, np.float32(1)))
            if not math.isnan(x) and not math.isnan(y) and x != y:
                assert found[4][lane] == bits(min(x, y))
            assert found[5][lane] == bits(x)


def test_results_are_flushed() -> None:
    code = ["FADD.FTZ R20,R10,R11", "FADD R21,R10,R11", "FMUL.FTZ R22,R10,R12", "FFMA.FTZ R23,R10,R12,R13"]
    a, b, c = 1.5 * 2.0**-126, -(2.0**-126), 0.25
    assert [one[0] for one in evaluate(code, [bits(a)], [bits(b)], [bits(c)], [bits(-0.0)], results=4)] == [
        0,
        bits(2.0**-127),
        0,
        0,
    ]


@few
@given(st.lists(st.floats(0.5, 2, width=32), min_size=LANES, max_size=LANES), st.integers(0, 2**23))
def test_a_product_is_rounded_in_each_direction(a: list[float], seed: int) -> None:
    b = [float(np.float32(1 + seed * 2**-23)) for _ in a]
    names = {"": 0, ".RM": -1, ".RP": 1, ".RZ": -1}
    code = [f"FFMA{name} R{20 + k},R10,R11,R12" for k, name in enumerate(names)]
    found = evaluate(code, [bits(x) for x in a], [bits(y) for y in b], [bits(-1.0)], results=4)
    for lane, (x, y) in enumerate(zip(a, b, strict=True)):
        exact = Fraction(x) * Fraction(y) - 1
        near = real(found[0][lane])
        below, above = sorted(
            (near, float(np.nextafter(np.float32(near), np.float32(math.copysign(math.inf, exact - Fraction(near))))))
        )
        if exact == Fraction(near):
            below = above = near
        assert Fraction(below) <= exact <= Fraction(above)
        assert real(found[1][lane]) == below
        assert real(found[2][lane]) == above
        assert real(found[3][lane]) == (below if exact > 0 else above)


@few
@given(st.lists(st.floats(allow_nan=False), min_size=3 * LANES, max_size=3 * LANES))
def test_doubles(values: list[float]) -> None:
    a, b, c = (np.array(values[k::3]) for k in range(3))
    halves = [one.view(np.uint64) for one in (a, b, c)]
    inputs = [part for one in halves for part in (one & MASK, one >> np.uint64(32))]
    code = [
        "DADD R20,R10,-R12",
        "DMUL R22,R10,R12",
        "DSETP.LT.AND P0,PT,R10,|R12|,PT",
        "MOV R9,0x1",
        "SEL R24,R9,RZ,P0",
    ]
    code += ["F2F.F32.F64 R25,R10"]
    found = evaluate(code, *inputs, results=6)
    with np.errstate(all="ignore"):
        for lane in range(LANES):
            for k, exact in ((0, a[lane] - b[lane]), (2, a[lane] * b[lane])):
                got = found[k][lane] | found[k + 1][lane] << 32
                want = 0x7FFFFFFFFFFFFFFF if np.isnan(exact) else int(np.float64(exact).view(np.uint64))
                assert got == want
            assert found[4][lane] == (a[lane] < abs(b[lane]))
            assert same(found[5][lane], float(np.float32(a[lane])))


def nearest(value: int) -> float:
    """An integer rounded once to a float; NumPy rounds twice, first to a double."""
    near = np.float32(value)
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return float(min(around, key=lambda one: (abs(int(one) - value), int(one.view(np.uint32)) % 2)))


@few
@given(words, words)
def test_conversions(low: list[int], high: list[int]) -> None:
    code = [
        "I2F.U32.RP R20,R10",
        "I2FP.F32.S32 R21,R10",
        "I2F.U64.RP R22,R10",
        "I2F.S64 R23,R10",
        "I2F.F64.S64 R24,R10",
        "I2F.U16 R26,R10",
    ]
    found = evaluate(code, low, high, results=7)
    for lane, (x, y) in enumerate(zip(low, high, strict=True)):
        both = y << 32 | x
        negative = both - 2**64 if both >= 2**63 else both
        for k, exact in ((0, x), (2, both)):
            got = real(found[k][lane])
            assert got >= exact and (exact == 0 or int(np.nextafter(np.float32(got), np.float32(0))) < exact)
        assert real(found[1][lane]) == float(np.float32(signed(x)))
        assert real(found[6][lane]) == float(x % 2**16)
        assert real(found[3][lane]) == nearest(negative)
        assert found[4][lane] | found[5][lane] << 32 == int(np.float64(negative).view(np.uint64))


def test_conversions_to_integers_saturate() -> None:
    values = [
        0.0,
        0.99,
        -0.99,
        1.5,
        -2.5,
        2.0**31,
        -(2.0**31),
        3e9,
        1e10,
        2.0**63,
        1e20,
        -1e20,
        math.inf,
        -math.inf,
        math.nan,
    ]
    code = ["F2I.FTZ.U32.TRUNC.NTZ R20,R10", "F2I.TRUNC R21,R10", "F2I.U64.TRUNC R22,R10"]
    found = evaluate(code, [bits(x) for x in values], results=4)
    for lane, x in enumerate(values):
        whole = 0 if math.isnan(x) else x if math.isinf(x) else math.trunc(x)
        assert found[0][lane] == (max(0, min(whole, MASK)) if not math.isnan(x) else 0), x
        assert signed(found[1][lane]) == max(-(2**31), min(whole, 2**31 - 1)), x
        wide = max(0, min(whole, 2**64 - 1)) if not math.isnan(x) else 0
        assert found[2][lane] | found[3][lane] << 32 == wide, x


@few
@given(floats, floats)
def test_packs_of_16_bits(a: list[float], b: list[float]) -> None:
    import ml_dtypes

    given_ = [[bits(x) for x in one] for one in (a, b)]
    code = ["F2FP.BF16.F32.PACK_AB R20,R10,R11", "F2FP.F16.F32.PACK_AB R21,R10,R11", "F2F.BF16.F32 R22,R10"]
    code += ["HADD2.F32 R23,-RZ,R21.H1_H1", "HADD2.F32 R24,-RZ,R21.H0_H0"]
    found = evaluate(code, *given_, results=5)
    with np.errstate(all="ignore"):
        for lane, (x, y) in enumerate(zip(np.float32(a), np.float32(b), strict=True)):
            if math.isnan(x) or math.isnan(y):
                continue
            wide = [int(v.astype(ml_dtypes.bfloat16).view(np.uint16)) for v in (x, y)]
            half = [np.float16(v) for v in (x, y)]
            assert found[0][lane] == wide[0] << 16 | wide[1] and found[2][lane] == wide[0]
            assert found[1][lane] == int(half[0].view(np.uint16)) << 16 | int(half[1].view(np.uint16))
            assert same(found[3][lane], float(half[0])) and same(found[4][lane], float(half[1]))


def test_approximations() -> None:
    values = [0.5, 1.0, 2.0, 3.0, 1e-39, 0.0, -0.0, 100.0, math.inf]
    code = [f"MUFU.{name} R{20 + k},R10" for k, name in enumerate(("RCP", "RSQ", "EX2", "LG2", "SQRT"))]
    found = evaluate([*code, "MUFU.RCP64H R25,R11"], [bits(x) for x in values], [0x40080000], results=6)
    for lane, x in enumerate(values):
        flat = math.copysign(0, x) if abs(x) < 2**-126 else x  # the unit flushes subnormal numbers
        with np.errstate(all="ignore"):
            expected = [1 / np.float64(flat), 1 / np.sqrt(flat), np.exp2(flat), np.log2(flat), np.sqrt(flat)]
            for k, exact in enumerate(expected):
                want = np.float32(exact)
                assert found[k][lane] == bits(0.0 if 0 < abs(want) < 2**-126 else want), (k, x)
    assert found[5][0] == int(np.float64(1 / 3).view(np.uint64)) >> 32


def test_the_check_of_a_division_finds_exponents_near_the_limits() -> None:
    code = ["FCHK P0,R10,R11", *predicates("P0")]
    normal, slow = (1.0, 3.0), [(1e-38, 2.0), (1.0, 1e38), (3e38, 1e-5), (1.0, math.inf), (math.nan, 1.0), (1.0, 0.0)]
    assert evaluate(code, [bits(normal[0])], [bits(normal[1])])[0] == [0] * LANES
    (found,) = evaluate(code, [bits(x) for x, _ in slow], [bits(y) for _, y in slow])
    assert found[: len(slow)] == [1] * len(slow)
