"""Decode disassembled instructions of sm_90 into records of the engine.

`FORMS` lists each opcode: its operation, its operands, and every modifier that may follow it. An opcode, a modifier or
an operand that is not listed raises `UnknownInstruction`: nothing is ignored by default.

The meanings of the opcodes come from NVIDIA's "CUDA binary utilities", table "Hopper instruction set", from the PTX
instructions that they implement, and from comparing results of kernels with exact ones.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator import records
from benchmarks.simulator.cubin import WIDTH, Cubin, Line
from benchmarks.simulator.records import Instruction, Operand


class UnknownInstruction(ValueError):
    """An instruction that the decoder does not know, with the kernel and the line of the disassembly."""


# ---- the table ------------------------------------------------------------------------------------------------------

#: Where a modifier is stored: (index in ``mode``, value), or None if it changes no result.
Modifiers = Mapping[str, "tuple[int, int] | None"]
COMPARISONS = ("LT", "LE", "GT", "GE", "EQ", "NE", "LTU", "LEU", "GTU", "GEU", "EQU", "NEU", "NUM", "NAN")
_COMPARE: Modifiers = {
    **{name: (0, number) for number, name in enumerate(COMPARISONS)},
    **{name: (1, number) for number, name in enumerate(("AND", "OR", "XOR"))},
}
#: Rounding: mode 0 is to nearest even, 1 down, 2 up, 3 towards zero.
_ROUND: Modifiers = {"RN": (0, 0), "RM": (0, 1), "RP": (0, 2), "RZ": (0, 3)}
_FLOAT: Modifiers = {**_ROUND, "FTZ": (1, 1), "SAT": (2, 1)}
#: Access sizes of memory instructions are stored in ``bytes``. `STRONG` accesses skip the L1 cache: mode 0.
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_GLOBAL: Modifiers = {
    "E": None, "CONSTANT": None, "GPU": (0, 1), "STRONG": (0, 1), "SYS": (0, 1), "SM": None, "CTA": None,
    "S8": (1, 1), "S16": (1, 1), "EF": None, "EL": None, "LU": None, "EU": None, "NA": None,
}  # fmt: skip
_SHARED: Modifiers = {"S8": (1, 1), "S16": (1, 1)}
#: Matrices of 8 rows and 8 columns of 2 bytes: mode 0 transposes, mode 1 is their number.
_MATRICES: Modifiers = {"16": None, "M88": (0, 0), "MT88": (0, 1), "2": (1, 2), "4": (1, 4)}
_SHIFT: Modifiers = {"U32": (0, 0), "S32": (0, 1), "U64": (0, 2), "S64": (0, 3), "HI": (1, 1), "W": (2, 1)}


@dataclass(frozen=True)
class Form:
    """How an opcode is decoded.

    Attributes
    ----------
    operation : str
        One of `records.OPERATIONS`.
    operands : str
        A word per operand, parsed in order. An operand whose word ends in ``?`` may be absent.

        - to: destination register; sets: destination predicate;
        - int, float, double, half: source of that type; pair: register with two bfloat16, or two numbers; register:
          source in brackets; pred: source predicate;
        - address: in global, shared or local memory; shared: second address, in shared memory; constant: address in a
          constant bank, whose number goes to mode 0;
        - target: instruction to go to; join: convergence barrier, in mode 3; special: special register, in mode 0;
          mode0, mode1: number, in that ``mode``;
        - label: target that the engine does not need; zero: register that reads zero; true: predicate that reads true;
          number0: the number zero; SB0: that scoreboard; predicates: all predicates.
    pipe : str
        One of `records.PIPES`.
    modifiers : mapping
        Every modifier that may follow.
    sizes : bool
        Whether an access size may follow.
    """

    operation: str
    operands: str
    pipe: str
    modifiers: Modifiers = field(default_factory=dict)
    sizes: bool = False


_LOGIC = {"LUT": None}
_COLLECTIVE = {"BFLY": (0, 0), "IDX": (0, 1), "UP": (0, 2), "DOWN": (0, 3)}
_FUNCTIONS: Modifiers = {name: (0, n) for n, name in enumerate(("RCP", "RSQ", "EX2", "LG2", "SQRT"))}
_SCOPES: Modifiers = {"CTA": (0, 0), "GPU": (0, 1), "SYS": (0, 1)}
_VOTES: Modifiers = {"ALL": (0, 0), "ANY": (0, 1)}
_FROM_INT: Modifiers = {"U32": (1, 1), "S32": (1, 0), "F32": None, **_ROUND}
_TO_INT: Modifiers = {"FTZ": None, "U32": (1, 1), "S32": (1, 0), "TRUNC": None, "NTZ": None, "F32": None}

#: Opcodes whose names are followed by modifiers only. Opcodes for the uniform datapath are added below.
FORMS: dict[str, Form] = {
    # moves and selections
    "MOV": Form("MOV", "to int", "ALU"),
    "SEL": Form("SEL", "to int int pred", "ALU"),
    "FSEL": Form("FSEL", "to float float pred", "ALU"),
    "PRMT": Form("PRMT", "to int int int", "ALU"),
    "P2R": Form("P2R", "to int int", "ALU"),
    "R2P": Form("R2P", "predicates int int", "ALU"),
    "CS2R": Form("CLEAR", "to zero", "ALU", {"32": (0, 1)}),
    "S2R": Form("S2R", "to special", "MEMORY"),
    "S2UR": Form("S2R", "to special", "MEMORY"),
    "R2UR": Form("R2UR", "sets? to int", "ALU", {"OR": (0, 1)}),
    "LDC": Form("LDC", "to constant", "MEMORY", _SHARED, sizes=True),
    # integers
    "IADD3": Form("IADD3", "to sets? sets? int int int", "ALU"),
    "IADD3.X": Form("IADD3X", "to sets? sets? int int int pred pred?", "ALU"),
    "IADD3.64": Form("IADD3WIDE", "to int int int", "ALU"),
    "VIADD": Form("VIADD", "to int int", "ALU"),
    "IMAD": Form("IMAD", "to int int int", "FMA_HEAVY", {"MOV": None, "U32": None, "IADD": None, "SHL": None}),
    "IMAD.X": Form("IMADX", "to sets? int int int pred", "FMA_HEAVY"),
    "IMAD.HI": Form("IMADHI", "to sets? int int int pred?", "FMA_HEAVY", {"U32": (0, 1), "X": None}),
    "IMAD.WIDE": Form("IMADWIDE", "to sets? int int int pred?", "FMA_HEAVY", {"U32": (0, 1), "X": None}),
    "IABS": Form("IABS", "to int", "ALU"),
    "LOP3": Form("LOP3", "sets? to int int int mode0 pred", "ALU", _LOGIC),
    "SHF.L": Form("SHIFT_LEFT", "to int int int", "ALU", _SHIFT),
    "SHF.R": Form("SHIFT_RIGHT", "to int int int", "ALU", _SHIFT),
    "LEA": Form("LEA", "to sets? int int mode0", "ALU"),
    "LEA.HI": Form("LEAHI", "to sets? int int int mode0", "ALU"),
    "LEA.HI.X": Form("LEAHI", "to sets? int int int mode0 pred", "ALU"),
    "LEA.HI.SX32": Form("LEAHI", "to sets? int int mode0", "ALU"),
    "LEA.HI.X.SX32": Form("LEAHI", "to sets? int int mode0 pred", "ALU"),
    "VIMNMX": Form("MINMAX", "to int int pred", "ALU", {"U32": (0, 1), "S32": (0, 0)}),
    "IMNMX": Form("MINMAX", "to int int pred", "ALU", {"U32": (0, 1), "S32": (0, 0)}),
    "VIMNMX3": Form("MINMAX3", "to int int int pred", "ALU", {"U32": (0, 1), "S32": (0, 0)}),
    "VIADDMNMX": Form("ADDMINMAX", "to int int int pred", "ALU", {"U32": (0, 1), "S32": (0, 0)}),
    "FLO": Form("FLO", "to int", "XU", {"U32": (0, 1), "S32": (0, 0), "SH": (1, 1)}),
    "POPC": Form("POPC", "to int", "XU"),
    "BREV": Form("BREV", "to int", "XU"),
    "BMSK": Form("BMSK", "to int int", "ALU"),
    "SGXT": Form("SGXT", "to int int", "ALU", {"U32": (0, 1), "S32": (0, 0)}),
    # predicates
    "ISETP": Form("ISETP", "sets sets int int pred pred?", "ALU", {**_COMPARE, "U32": (2, 1), "EX": (3, 1)}),
    "FSETP": Form("FSETP", "sets sets float float pred", "ALU", {**_COMPARE, "FTZ": (2, 1)}),
    "DSETP": Form("DSETP", "sets sets double double pred", "FP64", _COMPARE),
    "PLOP3": Form("PLOP3", "sets sets pred pred pred mode0 mode1", "ALU", _LOGIC),
    "FCHK": Form("FCHK", "sets float float", "XU"),
    "ELECT": Form("ELECT", "sets zero true", "ALU"),
    "VOTE": Form("VOTE", "to? sets pred", "ALU", _VOTES),
    "VOTEU": Form("VOTE", "to? sets pred", "UNIFORM_PIPE", _VOTES),
    # floating point
    "FADD": Form("FADD", "to float float", "FMA", _FLOAT),
    "FMUL": Form("FMUL", "to float float", "FMA", _FLOAT),
    "FFMA": Form("FFMA", "to float float float", "FMA", _FLOAT),
    "FMNMX": Form("FMNMX", "to float float pred", "ALU", {"FTZ": (1, 1), "NAN": (2, 1)}),
    "MUFU": Form("MUFU", "to float", "XU", _FUNCTIONS),
    "MUFU.RCP64H": Form("MUFU64H", "to int", "XU"),
    "MUFU.RSQ64H": Form("MUFU64H", "to int", "XU"),
    "HFMA2": Form("HALF_PAIR", "to zero zero half half", "FMA_HEAVY", {"MMA": None}),
    "HADD2": Form("HALF_PAIR", "to zero half half", "FMA_HEAVY"),
    "HADD2.F32": Form("HADD2_F32", "to zero int", "FMA_HEAVY"),
    "HADD2.BF16_V2": Form("BF16_ADD", "to pair pair", "FMA_HEAVY"),
    "HMUL2.BF16_V2": Form("BF16_MUL", "to pair pair", "FMA_HEAVY"),
    "HFMA2.BF16_V2": Form("BF16_FMA", "to pair pair pair", "FMA_HEAVY"),
    "HFMA2.MMA.BF16_V2": Form("BF16_FMA", "to pair pair pair", "FMA_HEAVY"),
    "DADD": Form("DADD", "to double double", "FP64", _ROUND),
    "DMUL": Form("DMUL", "to double double", "FP64", _ROUND),
    "DFMA": Form("DFMA", "to double double double", "FP64", _ROUND),
    # conversions
    "I2F": Form("I2F", "to int", "CONVERT", {**_FROM_INT, "U16": (1, 2)}),
    "I2FP": Form("I2F", "to int", "ALU", _FROM_INT),
    "I2F.U64": Form("I2F_FROM64", "to int", "CONVERT", {**_ROUND, "F32": None}),
    "I2F.S64": Form("I2F_FROM64", "to int", "CONVERT", {**_ROUND, "F32": None}),
    "I2F.F64": Form("I2F_TO64", "to int", "CONVERT", {"U32": (1, 1), "S32": (1, 0), "S64": (2, 1), "U64": (2, 2)}),
    "F2I": Form("F2I", "to float", "CONVERT", _TO_INT),
    "F2I.U64": Form("F2I64", "to float", "CONVERT", {"TRUNC": None, "FTZ": None}),
    "F2I.S64": Form("F2I64", "to float", "CONVERT", {"TRUNC": None, "FTZ": None}),
    "F2F.BF16.F32": Form("F2F_BF16", "to float", "CONVERT"),
    "F2F.F16.F32": Form("F2F_F16", "to float", "CONVERT"),
    "F2F.F32.F64": Form("F2F_32_FROM64", "to double", "CONVERT"),
    "F2F.F64.F32": Form("F2F_64_FROM32", "to float", "CONVERT"),
    "F2FP.BF16.F32.PACK_AB": Form("PACK_BF16", "to float float", "ALU"),
    "F2FP.F16.F32.PACK_AB": Form("PACK_F16", "to float float", "ALU"),
    # lanes
    "SHFL": Form("SHFL", "sets to int int int", "MEMORY", _COLLECTIVE),
    # control
    "NOP": Form("NOP", "", "CONTROL"),
    "ERRBAR": Form("NOP", "", "CONTROL"),
    "CGAERRBAR": Form("NOP", "", "CONTROL"),
    "ENDCOLLECTIVE": Form("NOP", "", "CONTROL"),
    "YIELD": Form("YIELD", "", "CONTROL"),
    "BRA": Form("BRA", "pred? target", "CONTROL"),
    "BRA.U": Form("BRA_ALL", "pred? target", "CONTROL"),
    "BRA.DIV": Form("BRA_DIV", "int target", "CONTROL"),
    "BRA.CONV": Form("BRA_CONV", "int target", "CONTROL"),
    "BRA.U.ANY": Form("BRA_ANY", "target", "CONTROL"),
    "BRX": Form("BRX", "int mode0", "CONTROL"),
    "BRXU": Form("BRX", "int mode0", "CONTROL"),
    "CALL.REL.NOINC": Form("CALL", "target", "CONTROL"),
    "RET.REL.NODEC": Form("RET", "int target", "CONTROL"),
    "LEPC": Form("OUTSIDE", "to label", "CONTROL"),
    "CALL.ABS.NOINC": Form("OUTSIDE", "int", "CONTROL"),
    "EXIT": Form("EXIT", "pred?", "CONTROL"),
    "BSSY": Form("BSSY", "join label", "CONTROL"),
    "BSYNC": Form("BSYNC", "join", "CONTROL"),
    "BREAK": Form("BREAK", "join pred?", "CONTROL"),
    "WARPSYNC": Form("WARPSYNC", "int", "CONTROL", {"EXCLUSIVE": None}),
    "WARPSYNC.ALL": Form("WARPSYNC", "", "CONTROL"),
    "WARPSYNC.COLLECTIVE": Form("WARPSYNC", "int label", "CONTROL"),
    "BAR.SYNC": Form("BAR", "number0", "CONTROL", {"DEFER_BLOCKING": None}),
    "UCGABAR_ARV": Form("CLUSTER_ARRIVE", "", "CONTROL"),
    "UCGABAR_WAIT": Form("CLUSTER_WAIT", "", "CONTROL"),
    # memory
    "LDG": Form("LDG", "to address", "MEMORY", _GLOBAL, sizes=True),
    "STG": Form("STG", "address int", "MEMORY", _GLOBAL, sizes=True),
    "LD": Form("LD", "to address", "MEMORY", _GLOBAL, sizes=True),
    "ST": Form("ST", "address int", "MEMORY", _GLOBAL, sizes=True),
    "LDS": Form("LDS", "to address", "MEMORY", _SHARED, sizes=True),
    "STS": Form("STS", "address int", "MEMORY", sizes=True),
    "LDSM": Form("LDSM", "to address", "MEMORY", _MATRICES),
    "STSM": Form("STSM", "address int", "MEMORY", _MATRICES),
    "LDL": Form("LDL", "to address", "MEMORY", {"LU": None, "S8": (1, 1), "S16": (1, 1)}, sizes=True),
    "STL": Form("STL", "address int", "MEMORY", sizes=True),
    "ATOMG.E.ADD": Form("ATOMG", "sets to address int", "MEMORY", {"STRONG": None, "GPU": None}),
    "ATOMG.E.ADD.F32": Form(
        "ATOMG", "sets to address int", "MEMORY", {"FTZ": None, "RN": None, "STRONG": None, "GPU": None}
    ),
    "ATOMG.E.CAS": Form("ATOM_CAS", "sets to address int int", "MEMORY", {"STRONG": None, "GPU": None}),
    "LDGSTS": Form("LDGSTS", "shared address", "MEMORY", {"E": None, "BYPASS": (0, 1), "LTC128B": None}, sizes=True),
    "LDGDEPBAR": Form("LDGDEPBAR", "", "MEMORY"),
    "DEPBAR.LE": Form("DEPBAR", "SB0 mode0", "CONTROL"),
    "UBLKCP.S.G": Form("BULK_LOAD", "register register register", "MEMORY"),
    "UBLKCP.G.S": Form("BULK_STORE", "register register register", "MEMORY"),
    "UTMACMDFLUSH": Form("LDGDEPBAR", "", "MEMORY"),
    "SYNCS.EXCH.64": Form("MBARRIER_INIT", "zero address int", "MEMORY"),
    "SYNCS.ARRIVE.TRANS64": Form("MBARRIER_ARRIVE", "zero address int", "MEMORY", {"A1T0": None}),
    "SYNCS.PHASECHK.TRANS64.TRYWAIT": Form("MBARRIER_TRY", "sets address int", "MEMORY"),
    "MEMBAR.ALL": Form("MEMBAR", "", "MEMORY", _SCOPES),
    "MEMBAR.SC": Form("MEMBAR", "", "MEMORY", _SCOPES),
    "FENCE.VIEW.ASYNC": Form("FENCE", "", "MEMORY", {"S": None, "G": None}),
    "CCTL.IVALL": Form("INVALIDATE", "", "MEMORY"),
}  # fmt: skip
#: Opcodes that the uniform datapath has too, with a U before their names: they execute once for a warp.
_UNIFORM = (
    "MOV", "SEL", "PRMT", "LDC", "IADD3", "IADD3.X", "IADD3.64", "IMAD", "IMAD.X", "IMAD.HI", "IMAD.WIDE", "LOP3",
    "SHF.L", "SHF.R", "LEA", "LEA.HI", "LEA.HI.X", "LEA.HI.SX32", "LEA.HI.X.SX32", "ISETP", "PLOP3", "FLO", "POPC",
    "BREV", "BMSK", "SGXT",
)  # fmt: skip
FORMS |= {f"U{name}": Form(**{**vars(FORMS[name]), "pipe": "UNIFORM_PIPE"}) for name in _UNIFORM}
#: Operations that execute once for a warp although they have no destination in the uniform datapath.
_ONCE = {"BULK_LOAD", "BULK_STORE", "MBARRIER_INIT"}
#: Facts of an opcode beyond its modifiers: values of ``mode``.
_PRESET: dict[str, dict[int, int]] = {
    "LEA.HI.X": {2: 1}, "LEA.HI.SX32": {1: 1}, "LEA.HI.X.SX32": {1: 1, 2: 1},
    "MUFU.RSQ64H": {0: 1}, "I2F.U64": {1: 1}, "F2I.U64": {1: 1}, "WARPSYNC.ALL": {0: 1}, "ATOMG.E.ADD.F32": {2: 1},
    "LDSM": {1: 1}, "STSM": {1: 1},
}  # fmt: skip
#: Special registers, by the numbers of the engine.
SPECIAL = (
    "SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId",
    "SR_SWINHI", "SR_LTMASK", "SRZ",
)  # fmt: skip


#: Classes of instructions for reports, by their operations.
CLASSES: dict[str, tuple[str, ...]] = {
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "DADD", "DMUL", "DFMA", "BF16_ADD", "BF16_MUL", "BF16_FMA"),
    "special": ("MUFU", "MUFU64H", "FCHK"),
    "convert": (
        "I2F", "I2F_FROM64", "I2F_TO64", "F2I", "F2I64", "F2F_BF16", "F2F_F16", "F2F_32_FROM64", "F2F_64_FROM32",
        "PACK_BF16", "PACK_F16", "HADD2_F32",
    ),
    "integer": (
        "IADD3", "IADD3X", "IADD3WIDE", "VIADD", "IMAD", "IMADX", "IMADHI", "IMADWIDE", "IABS", "LOP3", "SHIFT_LEFT",
        "SHIFT_RIGHT", "LEA", "LEAHI", "MINMAX", "MINMAX3", "ADDMINMAX", "FLO", "POPC", "BREV", "BMSK", "SGXT", "PRMT",
    ),
    "move": ("MOV", "HALF_PAIR", "CLEAR", "S2R", "R2UR", "P2R", "R2P"),
    "select": ("SEL", "FSEL"),
    "predicate": ("ISETP", "FSETP", "DSETP", "PLOP3", "ELECT", "VOTE"),
    "shuffle": ("SHFL",),
    "constant": ("LDC",),
    "global": ("LDG", "STG", "LD", "ST", "ATOMG", "ATOM_CAS", "LDGSTS", "BULK_LOAD", "BULK_STORE"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "MBARRIER_INIT", "MBARRIER_ARRIVE", "MBARRIER_TRY"),
    "local": ("LDL", "STL"),
    "barrier": (
        "BAR", "WARPSYNC", "CLUSTER_ARRIVE", "CLUSTER_WAIT", "MEMBAR", "FENCE", "INVALIDATE", "LDGDEPBAR", "DEPBAR",
    ),
    "branch": (
        "NOP", "OUTSIDE", "YIELD", "BRA", "BRA_ALL", "BRA_DIV", "BRA_CONV", "BRA_ANY", "BRX", "CALL", "RET", "EXIT",
        "BSSY", "BSYNC", "BREAK",
    ),
}  # fmt: skip
_CLASS_OF = {operation: name for name, operations in CLASSES.items() for operation in operations}


@functools.lru_cache(maxsize=4096)
def operation_class(opcode: str) -> str:
    """The class of an opcode, one of `CLASSES`; "uniform" for the uniform datapath; moves on other pipes are moves."""
    name, modifiers = _form(opcode)
    if FORMS[name].pipe == "UNIFORM_PIPE":
        return "uniform"
    return "move" if name == "IMAD" and "MOV" in modifiers else _CLASS_OF[FORMS[name].operation]


# ---- operands -------------------------------------------------------------------------------------------------------

_REGISTER = re.compile(r"(U?)R(Z|\d+)((?:\.(?:reuse|64|U32|H0_H0|H1_H1|H0|H1))*)")
_PREDICATE = re.compile(r"(!?)(U?)P(T|\d)")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]")
_NUMBER = re.compile(r"[-+]?(?:\d|INF|QNAN)")
_INFINITE = {"+INF": 0x7F800000, "INF": 0x7F800000, "-INF": 0xFF800000, "+QNAN": 0x7FFFFFFF, "-QNAN": 0xFFFFFFFF}
_HALVES = {"H0_H0": records.LOW_HALF, "H1_H1": records.HIGH_HALF, "H0": records.LOW_HALF, "H1": records.HIGH_HALF}
_MASK = 0xFFFFFFFF


def _register(kind: str, number: str) -> int:
    if number == "Z":
        return records.ZERO_UNIFORM if kind else records.ZERO
    return int(number)


def _signed(text: str) -> tuple[str, int]:
    """An operand without its signs, and its flags: -x, ~x, |x|. A minus before a number belongs to the number."""
    flags = 0
    if text.startswith("-") and not re.match(r"-(0x|\d|INF|QNAN)", text):
        text, flags = text[1:], records.NEGATED
    if text.startswith("~"):
        text, flags = text[1:], flags | records.INVERTED
    if text.startswith("|"):
        text, flags = text.replace("|", ""), flags | records.ABSOLUTE
    return text, flags


def _integer(text: str) -> tuple[int, int]:
    value = int(text, 0)
    return value & _MASK, value >> 32 & _MASK


def _float(text: str) -> tuple[int, int]:
    if text in _INFINITE:
        return _INFINITE[text], 0
    if text.startswith(("0x", "-0x")):
        return _integer(text)
    return struct.unpack("<I", struct.pack("<f", float(text)))[0], 0


def _double(text: str) -> tuple[int, int]:
    """A double immediate: its low 32 bits are 0 in the encoding."""
    if text in _INFINITE:
        return 0, {"+INF": 0x7FF00000, "INF": 0x7FF00000, "-INF": 0xFFF00000}.get(text, 0x7FFFFFFF)
    bits = struct.unpack("<Q", struct.pack("<d", float(text)))[0]
    return bits & _MASK, bits >> 32


def _half(text: str) -> tuple[int, int]:
    return struct.unpack("<H", struct.pack("<e", float(text)))[0], 0


def _pair(text: str) -> tuple[int, int]:
    """Two numbers in bfloat16, the higher half first."""
    high, low = (_float(one)[0] >> 16 for one in text.split())
    return high << 16 | low, 0


#: How an immediate of each type is parsed; also, the words of sources.
_IMMEDIATE: dict[str, Callable[[str], tuple[int, int]]] = {
    "int": _integer,
    "float": _float,
    "double": _double,
    "half": _half,
    "pair": _pair,
}


@functools.lru_cache(maxsize=65536)
def _source(text: str, word: str) -> Operand:
    bare, flags = _signed(text)
    found = _REGISTER.fullmatch(bare)
    if found is not None:
        for suffix in found[3].split(".")[1:]:
            flags |= _HALVES.get(suffix, 0)
        kind = records.UNIFORM if found[1] else records.REGISTER
        return Operand(kind, flags, _register(found[1], found[2]))
    constant = _CONSTANT.fullmatch(bare)
    if constant is not None:
        return Operand(records.CONSTANT, flags, int(constant[1], 16), int(constant[2], 16))
    low, high = _IMMEDIATE[word](bare)
    return Operand(records.IMMEDIATE, flags, 0, low, high)


def _address(text: str, of: records.Address) -> None:
    """Parse ``desc[UR4][R2.64+UR5+0x10]``; the descriptor says only that the address is global."""
    of.base = of.uniform = -1
    inner = re.fullmatch(r"(?:desc\[UR\d+\])?\[(.*)\]", text)
    if inner is None:
        raise ValueError(text)
    for part in inner[1].split("+"):
        register = _REGISTER.fullmatch(part)
        if register is None:
            of.offset += int(part, 0)
        elif register[1]:
            of.uniform = _register(*register.groups()[:2])
            of.wide_uniform = int(register[3] == ".64")
        else:
            of.base, of.wide = _register(*register.groups()[:2]), int(register[3] == ".64")


def _constant_address(text: str, into: Instruction) -> None:
    """Parse ``c[0x2][R7+0xc]`` or ``c[0x0][0x28]``: the bank goes to mode 0."""
    found = re.fullmatch(r"c\[(0x[0-9a-f]+)\]\[(.*)\]", text)
    if found is None:
        raise ValueError(text)
    into.mode[0] = int(found[1], 16)
    _address(f"[{found[2]}]", into.address)


#: Operands that add nothing to the record.
_FIXED = {
    "zero": re.compile(r"-?U?RZ(\.H0_H0)?|SRZ"),
    "true": re.compile(r"U?PT"),
    "number0": re.compile(r"0x0"),
    "SB0": re.compile(r"SB0"),
    "predicates": re.compile(r"PR"),
    "label": re.compile(r"0x[0-9a-f]+|[$\w.]+"),
}


# ---- an instruction -------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What has been parsed of an instruction."""

    into: Instruction
    symbols: Mapping[str, int]
    sources: int = 0
    given: int = 0
    outs: int = 0


def _destination(state: _State, text: str) -> None:
    found = _REGISTER.fullmatch(text)
    if found is None:
        raise ValueError(text)
    state.into.destination_kind = records.UNIFORM if found[1] else records.REGISTER
    state.into.destination = _register(found[1], found[2])


def _predicate(text: str, into: records.Predicate) -> None:
    found = _PREDICATE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    into.index = records.TRUE if found[3] == "T" else int(found[3])
    into.negated, into.uniform, into.present = int(bool(found[1])), int(bool(found[2])), 1


def _target(state: _State, text: str) -> None:
    address = state.symbols[text] if text in state.symbols else int(text, 0)
    state.into.target = address // WIDTH


def _source_next(state: _State, text: str, word: str) -> None:
    state.into.source[state.sources] = _source(text, word)
    state.sources += 1


def _sets(state: _State, text: str) -> None:
    _predicate(text, state.into.out[state.outs])
    state.outs += 1


def _given(state: _State, text: str) -> None:
    _predicate(text, getattr(state.into, "in")[state.given])
    state.given += 1


def _mode(index: int, value: Callable[[str], int]) -> Callable[[_State, str], None]:
    def parse(state: _State, text: str) -> None:
        state.into.mode[index] = value(text)

    return parse


_PARSERS: dict[str, Callable[[_State, str], None]] = {
    "to": _destination,
    "sets": _sets,
    "pred": _given,
    "register": lambda state, text: _source_next(state, text.strip("[]"), "int"),
    "address": lambda state, text: _address(text, state.into.address),
    "shared": lambda state, text: _address(text, state.into.shared),
    "constant": lambda state, text: _constant_address(text, state.into),
    "target": _target,
    "join": _mode(3, lambda text: int(text.removeprefix("B"))),
    "special": _mode(0, SPECIAL.index),
    "mode0": _mode(0, lambda text: int(text, 0)),
    "mode1": _mode(1, lambda text: int(text, 0)),
}


def _operand(state: _State, word: str, text: str) -> None:
    """Parse one operand into the record."""
    if word in _IMMEDIATE:
        _source_next(state, text, word)
    elif word in _PARSERS:
        _PARSERS[word](state, text)
    elif _FIXED[word].fullmatch(text) is None:
        raise ValueError(f"operand {text}")


def _fits(word: str, text: str) -> bool:
    """Whether an operand can be what an optional word asks for."""
    if word in ("sets", "pred"):
        return _PREDICATE.fullmatch(text) is not None
    return _REGISTER.fullmatch(text) is not None


def _operands(state: _State, form: Form, texts: Sequence[str]) -> None:
    left = list(texts)
    for word in form.operands.split():
        name = word.removesuffix("?")
        if word != name and (not left or not _fits(name, left[0])):
            continue
        if not left:
            raise ValueError(f"operand {name} is missing")
        text = left.pop(0)
        if name == "pair" and left and _NUMBER.match(text):
            text = f"{text} {left.pop(0)}"
        _operand(state, name, text)
    if left:
        raise ValueError(f"operands {', '.join(left)} are left over")


@functools.lru_cache(maxsize=65536)
def _form(opcode: str) -> tuple[str, list[str]]:
    """The longest listed name that an opcode begins with, and the modifiers that follow it.

    A modifier that is part of a name may follow others: ``ISETP.GE.AND.EX`` is no longer name, but ``LEA.HI.X`` is.
    """
    parts = opcode.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in FORMS:
            return name, parts[count:]
    raise ValueError(f"opcode {parts[0]}")


def _modifiers(into: Instruction, form: Form, modifiers: Sequence[str]) -> None:
    into.bytes = 4
    for one in modifiers:
        if form.sizes and one in _SIZES:
            into.bytes = _SIZES[one]
            if one not in form.modifiers:
                continue
        if one not in form.modifiers:
            raise ValueError(f"modifier {one}")
        stored = form.modifiers[one]
        if stored is not None:
            into.mode[stored[0]] = stored[1]


def _control(into: Instruction, control: int) -> None:
    into.stall = control & 15
    into.write_barrier, into.read_barrier = control >> 5 & 7, control >> 8 & 7
    into.wait = control >> 11 & 63


def decoded(line: Line, symbols: Mapping[str, int]) -> Instruction:
    """Decode one instruction.

    Raises
    ------
    ValueError
        If the opcode, a modifier or an operand is unknown; the text names it.
    """
    name, modifiers = _form(line.opcode)
    form = FORMS[name]
    into = Instruction(op=records.NUMBER[form.operation], pipe=records.PIPES.index(form.pipe), target=-1)
    into.destination, into.once = records.ZERO, int(name[0] == "U" or name == "VOTEU" or form.operation in _ONCE)
    into.address.base = into.address.uniform = into.shared.base = into.shared.uniform = -1
    into.guard.index, into.out[0].index, into.out[1].index = (records.TRUE,) * 3
    for index, value in _PRESET.get(name.removeprefix("U"), {}).items():
        into.mode[index] = value
    if line.guard:
        _predicate(line.guard.removeprefix("@"), into.guard)
    _modifiers(into, form, modifiers)
    _operands(_State(into, symbols), form, split(line.operands))
    if form.operation == "ATOM_CAS":
        into.address.wide = 1  # nvdisasm leaves out that the register is a pair
    _control(into, line.control)
    return into


def split(operands: str) -> list[str]:
    """Split operands at the commas outside brackets."""
    return [one.strip() for one in re.split(r",(?![^\[]*\])", operands)] if operands else []


def program(cubin: Cubin) -> ctypes.Array[Instruction]:
    """Decode all instructions of a kernel.

    Raises
    ------
    UnknownInstruction
        At the first instruction that is not known.
    """
    found = (Instruction * len(cubin.lines))()
    for number, line in enumerate(cubin.lines):
        try:
            found[number] = decoded(line, cubin.symbols)
        except (ValueError, KeyError, IndexError) as error:
            raise UnknownInstruction(
                f"{cubin.entry}: {line}: unknown {error}; add it to FORMS in {__name__}, and to the engine"
            ) from error
    return found
