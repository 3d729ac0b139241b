"""The instruction that the engine executes: its fields, and the C++ text that declares them.

The engine's structs are written from these classes, so that both sides always agree.
"""

from __future__ import annotations

import ctypes
from typing import Any

#: Operations of the engine. Several opcodes may share one operation.
OPERATIONS: tuple[str, ...] = (
    # moves and selections
    "MOV", "SEL", "FSEL", "PRMT", "P2R", "R2P", "CLEAR", "S2R", "R2UR", "LDC",
    # integers
    "IADD3", "IADD3X", "IADD3WIDE", "VIADD", "IMAD", "IMADX", "IMADHI", "IMADWIDE", "IABS", "LOP3", "SHIFT_LEFT",
    "SHIFT_RIGHT", "LEA", "LEAHI", "MINMAX", "MINMAX3", "ADDMINMAX", "FLO", "POPC", "BREV", "BMSK", "SGXT",
    # predicates
    "ISETP", "FSETP", "DSETP", "PLOP3", "FCHK", "ELECT", "VOTE",
    # floating point
    "FADD", "FMUL", "FFMA", "FMNMX", "MUFU", "MUFU64H", "HALF_PAIR", "HADD2_F32", "BF16_ADD", "BF16_MUL",
    "BF16_FMA", "DADD", "DMUL", "DFMA",
    # conversions
    "I2F", "I2F_FROM64", "I2F_TO64", "F2I", "F2I64", "F2F_BF16", "F2F_F16", "F2F_32_FROM64",
    "F2F_64_FROM32", "PACK_BF16", "PACK_F16",
    # lanes
    "SHFL",
    # control
    "NOP", "YIELD", "BRA", "BRA_ALL", "BRA_DIV", "BRA_CONV", "BRA_ANY", "BRX", "CALL", "RET", "EXIT", "BSSY", "BSYNC",
    "BREAK", "WARPSYNC", "BAR", "OUTSIDE",
    # memory
    "LDG", "STG", "LD", "ST", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "ATOMG", "ATOM_CAS", "LDGSTS", "LDGDEPBAR",
    "DEPBAR", "BULK_LOAD", "BULK_STORE", "MBARRIER_INIT", "MBARRIER_ARRIVE", "MBARRIER_TRY", "MEMBAR", "FENCE",
    "INVALIDATE", "CLUSTER_ARRIVE",
    "CLUSTER_WAIT",
)  # fmt: skip
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}

#: Kinds of an operand.
KINDS: tuple[str, ...] = ("NONE", "REGISTER", "UNIFORM", "IMMEDIATE", "CONSTANT")
NONE, REGISTER, UNIFORM, IMMEDIATE, CONSTANT = range(len(KINDS))
#: Flags of an operand: -x, |x|, ~x. A half of a register: its low or its high 16 bits.
NEGATED, ABSOLUTE, INVERTED, LOW_HALF, HIGH_HALF = 1, 2, 4, 8, 16
FLAGS = {name: globals()[name] for name in ("NEGATED", "ABSOLUTE", "INVERTED", "LOW_HALF", "HIGH_HALF")}
#: The register, uniform register and predicate that always read 0, 0 and true, and that discard what is written.
ZERO, ZERO_UNIFORM, TRUE = 255, 63, 7
#: The upper half of generic addresses of local memory.
LOCAL_WINDOW = 0x7D00
#: Pipes whose occupation is counted; see `decode.PIPES`.
PIPES: tuple[str, ...] = ("CONTROL", "ALU", "FMA", "FMA_HEAVY", "XU", "CONVERT", "MEMORY", "UNIFORM_PIPE", "FP64")

_C_TYPES: dict[Any, str] = {
    ctypes.c_uint8: "unsigned char",
    ctypes.c_int16: "short",
    ctypes.c_uint16: "unsigned short",
    ctypes.c_int32: "int",
    ctypes.c_uint32: "unsigned",
    ctypes.c_uint64: "unsigned long long",
    ctypes.c_double: "double",
    ctypes.c_void_p: "void*",
}


class Operand(ctypes.Structure):
    """A source.

    An immediate has its value in `low` and `high`. A constant has its bank in `index` and its offset in `low`.
    """

    _fields_ = [
        ("kind", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("index", ctypes.c_uint16),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
    ]


class Predicate(ctypes.Structure):
    """A predicate register, as a guard, a source or a destination. An absent source reads false."""

    _fields_ = [
        ("index", ctypes.c_uint8),
        ("negated", ctypes.c_uint8),
        ("uniform", ctypes.c_uint8),
        ("present", ctypes.c_uint8),
    ]


class Address(ctypes.Structure):
    """The address R + UR + offset. ``base`` and ``uniform`` are -1 if absent; ``wide``: R is a 64-bit pair."""

    _fields_ = [
        ("base", ctypes.c_int16),
        ("uniform", ctypes.c_int16),
        ("wide", ctypes.c_uint16),
        ("wide_uniform", ctypes.c_uint16),
        ("offset", ctypes.c_int32),
    ]


class Instruction(ctypes.Structure):
    """One decoded instruction.

    ``mode`` holds modifiers; their meaning depends on the operation (see decode.py). ``target`` is the index of an
    instruction. ``stall`` is in cycles. ``write_barrier`` and ``read_barrier`` are the scoreboards, 7 for none, that
    the instruction releases when its result is written and when its sources are read. ``wait`` is the mask of the
    scoreboards that it waits for.
    """

    _fields_ = [
        ("op", ctypes.c_uint16),
        ("bytes", ctypes.c_uint16),
        ("once", ctypes.c_uint8),
        ("pipe", ctypes.c_uint8),
        ("destination_kind", ctypes.c_uint8),
        ("destination", ctypes.c_uint8),
        ("guard", Predicate),
        ("out", Predicate * 2),
        ("in", Predicate * 3),
        ("source", Operand * 4),
        ("address", Address),
        ("shared", Address),
        ("mode", ctypes.c_int32 * 4),
        ("target", ctypes.c_int32),
        ("stall", ctypes.c_uint8),
        ("write_barrier", ctypes.c_uint8),
        ("read_barrier", ctypes.c_uint8),
        ("wait", ctypes.c_uint8),
    ]


class Region(ctypes.Structure):
    """An array in the memory of the simulated GPU: its address there, its size in bytes, and where its bytes lie.

    ``uses``: for the clock, a word per 64 bytes and two more: four times the traffic at the last use, plus a bit for
    each of the two sectors that is dirty. See `clock.Cache`.
    """

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("bytes", ctypes.c_void_p),
        ("uses", ctypes.c_void_p),
    ]


class Counter(ctypes.Structure):
    """What one instruction did: warps that executed it, their active lanes, 32-byte sectors, shared wavefronts.

    `waited`: cycles that warps waited before they executed it, if the launch is timed.
    """

    _fields_ = [(name, ctypes.c_uint64) for name in ("warps", "lanes", "sectors", "wavefronts", "waited")]


class Job(ctypes.Structure):
    """A launch, or a range of its blocks.

    Attributes
    ----------
    program, instructions
        The instructions and their number.
    constants, constant_bytes
        The constant banks and their sizes.
    regions, regions_count
        The arrays of global memory.
    counters
        A `Counter` per instruction, to which the launch adds.
    grid, threads
        Blocks and threads in three directions.
    cluster
        Blocks per cluster.
    first, blocks
        The first block that runs, and the number of blocks that run, in whole clusters.
    resident
        Clusters that are alive at a time.
    shared_bytes, local_bytes
        Shared memory per block, static and dynamic; local memory per thread.
    registers
        Registers per thread.
    fault
        Instruction, block and warp of a fault; -1 where it has none.
    message, message_bytes
        Where the engine writes the text of a fault.
    """

    _fields_ = [
        ("program", ctypes.POINTER(Instruction)),
        ("instructions", ctypes.c_int32),
        ("regions_count", ctypes.c_int32),
        ("constants", ctypes.c_void_p * 8),
        ("constant_bytes", ctypes.c_uint32 * 8),
        ("regions", ctypes.POINTER(Region)),
        ("counters", ctypes.POINTER(Counter)),
        ("grid", ctypes.c_int32 * 3),
        ("threads", ctypes.c_int32 * 3),
        ("cluster", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("fault", ctypes.c_int32 * 3),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_int32),
    ]


class Facts(ctypes.Structure):
    """What the clock knows of a GPU. Times are cycles of the multiprocessors' clock, rates are bytes per cycle.

    Attributes
    ----------
    multiprocessors : int
    groups : array of int
        Multiprocessors of each graphics processing cluster; the blocks of a thread-block cluster share one. 0 ends it.
    resident : int
        Blocks of the launch that are resident on a multiprocessor.
    dram_bytes, l2_bytes, port_bytes
        Rates of the DRAM, of the L2 cache, and between the L2 cache and one multiprocessor.
    l1_latency, l2_latency, dram_latency
        From the issue of a load until its result can be used, if nothing else is in the way.
    l1_lines
        Lines of 128 bytes in the L1 cache of a multiprocessor.
    l2_capacity
        Bytes. Written data stays in the L2 cache until more than `dirty_capacity` bytes are dirty.
    dirty_capacity
    launch_latency, block_latency
        From the start of a launch, and from the end of a block, until the first instruction of the next one.
    shared_latency, remote_latency, shuffle_latency, constant_latency, special_latency, atomic_latency
    barrier_latency, cluster_latency, fence_latency
    """

    _fields_ = [
        ("multiprocessors", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("groups", ctypes.c_int32 * 12),
        *(
            (name, ctypes.c_double)
            for name in (
                "dram_bytes", "l2_bytes", "port_bytes", "l1_latency", "l2_latency", "dram_latency", "l1_lines",
                "l2_capacity", "dirty_capacity", "launch_latency", "block_latency", "shared_latency", "remote_latency",
                "shuffle_latency", "constant_latency", "special_latency", "atomic_latency", "barrier_latency",
                "cluster_latency", "fence_latency",
            )
        ),
    ]  # fmt: skip


#: Why a warp did not issue: its own stall count, a result that it needed, a barrier, an occupied pipe, another warp.
REASONS: tuple[str, ...] = ("FIXED", "MEMORY", "SHORT", "BARRIER", "PIPE", "TURN")


class Times(ctypes.Structure):
    """What the clock found of a launch.

    Attributes
    ----------
    cycles : float
        From the start of the launch to the end of its last block.
    issued : int
        Instructions of warps.
    dram_read, dram_written, l2_hit : int
        Bytes.
    dram_busy : float
        Cycles in which the DRAM transfers.
    block_cycles : float
        Mean life of a block.
    pipe_busy : array of float
        Cycles in which each pipe is occupied, summed over the partitions.
    waited : array of float
        Cycles that warps waited, by `REASONS`, summed over the warps.
    traffic, dirty : int, float
        Bytes that have entered the L2 cache, and dirty bytes in it: before the launch, then after it.
    """

    _fields_ = [
        ("cycles", ctypes.c_double),
        ("issued", ctypes.c_uint64),
        ("dram_read", ctypes.c_uint64),
        ("dram_written", ctypes.c_uint64),
        ("l2_hit", ctypes.c_uint64),
        ("dram_busy", ctypes.c_double),
        ("block_cycles", ctypes.c_double),
        ("pipe_busy", ctypes.c_double * len(PIPES)),
        ("waited", ctypes.c_double * len(REASONS)),
        ("traffic", ctypes.c_uint64),
        ("dirty", ctypes.c_double),
    ]


def _member(name: str, kind: Any) -> str:
    plain = {"in": "given"}.get(name, name)  # a name that is no keyword of C++
    if issubclass(kind, ctypes.Array):
        return f"{_type(kind._type_)} {plain}[{kind._length_}];"
    return f"{_type(kind)} {plain};"


def _type(kind: Any) -> str:
    if issubclass(kind, ctypes._Pointer):
        return f"{_type(kind._type_)}*"
    return str(kind.__name__) if issubclass(kind, ctypes.Structure) else _C_TYPES[kind]


def _struct(kind: type[ctypes.Structure]) -> str:
    members = "\n    ".join(_member(field[0], field[1]) for field in kind._fields_)
    size = ctypes.sizeof(kind)
    return f"struct {kind.__name__} {{\n    {members}\n}};\nstatic_assert(sizeof({kind.__name__}) == {size});"


def _enum(names: tuple[str, ...], prefix: str) -> str:
    return f"enum {{ {', '.join(f'{prefix}{name} = {number}' for number, name in enumerate(names))} }};"


def declarations() -> str:
    """The C++ text of the enumerations and structs."""
    constants = {
        **FLAGS,
        "ZERO": ZERO,
        "ZERO_UNIFORM": ZERO_UNIFORM,
        "TRUE_PREDICATE": TRUE,
        "LOCAL_WINDOW": LOCAL_WINDOW,
    }
    lines = [_enum(OPERATIONS, "OP_"), _enum(KINDS, "KIND_"), _enum(PIPES, "PIPE_"), _enum(REASONS, "WAITED_")]
    lines += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines += [_struct(kind) for kind in (Operand, Predicate, Address, Instruction, Region, Counter, Job, Facts, Times)]
    return "\n".join(lines) + "\n"
