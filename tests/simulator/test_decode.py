"""The decoder: nothing that it does not know passes."""

from __future__ import annotations

import pytest

from benchmarks.simulator import decode, records
from benchmarks.simulator.decode import FORMS, UnknownInstruction, decoded
from tests.simulator.programs import kernel, line


def test_an_unknown_opcode_is_refused_with_its_line() -> None:
    made = kernel(["MOV R0,0x1", "FROB.X R1,R2", "EXIT"])
    with pytest.raises(
        UnknownInstruction, match=r"by_hand: /\*0010\*/ FROB\.X R1,R2: unknown opcode FROB; add it to FORMS"
    ):
        _ = made.instructions


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("FADD.RX R0,R1,R2", "modifier RX"),
        ("IADD3.SAT R0,R1,R2,R3", "modifier SAT"),
        ("LDG.E.256 R0,desc[UR4][R2.64]", "modifier 256"),
        ("ATOMG.E.MAX.STRONG.GPU PT,R0,desc[UR4][R2.64],R3", "opcode ATOMG"),
        ("BAR.SYNC.DEFER_BLOCKING 0x1", "operand 0x1"),
        ("CS2R R2,SR_CLOCKLO", "operand SR_CLOCKLO"),
        ("HFMA2.MMA R0,R1,R2,1,1", "operand R1"),
        ("S2R R0,SR_VIRTID", "tuple.index(x): x not in tuple"),
        ("FADD R0,R1", "operand float is missing"),
        ("FADD R0,R1,R2,R3", "operands R3 are left over"),
        ("IADD3 R0,R1,R2,P0", "invalid literal"),
        ("LDG.E R0,[R2.64+UR4+P0]", "invalid literal"),
        ("IADD3 R0,R1.B1,R2,R3", "invalid literal"),
        ("SHFL.BFLY P0,R1,R2,R3", "operand int is missing"),
    ],
)
def test_an_unknown_part_is_refused(text: str, what: str) -> None:
    with pytest.raises(ValueError, match="^" + what.replace("(", r"\(").replace(")", r"\)")):
        decoded(line(text), {})


def test_every_modifier_of_the_table_is_told_apart() -> None:
    """A modifier that changes a result changes the record."""
    for name, form in FORMS.items():
        stored = [place for place in form.modifiers.values() if place is not None and place[1] != 0]
        for index, value in stored:
            assert 0 <= index < 4 and value > 0, name


def test_fields_of_an_instruction() -> None:
    found = decoded(line("@!P3 ISETP.GE.U32.OR P1,P2,|R7|,c[0x0][0x218],!P4", control=0x7F1), {})
    assert records.OPERATIONS[found.op] == "ISETP"
    assert (found.guard.index, found.guard.negated, found.guard.uniform) == (3, 1, 0)
    assert [one.index for one in found.out] == [1, 2]
    assert (found.source[0].kind, found.source[0].index, found.source[0].flags) == (1, 7, records.ABSOLUTE)
    assert (found.source[1].kind, found.source[1].index, found.source[1].low) == (records.CONSTANT, 0, 0x218)
    given = getattr(found, "in")
    assert (given[0].index, given[0].negated, given[1].present) == (4, 1, 0)
    assert list(found.mode) == [decode.COMPARISONS.index("GE"), 1, 1, 0]
    assert (found.stall, found.write_barrier, found.read_barrier, found.wait) == (1, 7, 7, 0)


def test_an_address() -> None:
    found = decoded(line("STG.E.64 desc[UR4][R10.64+UR6+-0x8],R12"), {})
    where = found.address
    assert (where.base, where.wide, where.uniform, where.offset, found.bytes) == (10, 1, 6, -8, 8)
    found = decoded(line("LDS.U8 R1,[UR5+0x10]"), {})
    assert (found.address.base, found.address.uniform, found.address.offset, found.bytes) == (-1, 5, 16, 1)


def test_the_control_word() -> None:
    """Jia et al. 2018: 4 bits of stall, 1 of yield, 3 and 3 of scoreboards, 6 of the mask that is waited for."""
    found = decoded(line("FADD R0,R1,R2", control=5 | 1 << 4 | 2 << 5 | 3 << 8 | 0b101001 << 11), {})
    assert (found.stall, found.write_barrier, found.read_barrier, found.wait) == (5, 2, 3, 0b101001)


def test_every_operation_has_a_form_and_a_class() -> None:
    assert {form.operation for form in FORMS.values()} == {*records.OPERATIONS}
    assert sorted(one for operations in decode.CLASSES.values() for one in operations) == sorted(records.OPERATIONS)
    assert decode.operation_class("UIADD3.X") == "uniform"
    assert decode.operation_class("IMAD.MOV.U32") == "move" != decode.operation_class("IMAD.IADD")
