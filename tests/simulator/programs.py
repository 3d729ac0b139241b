"""Programs of the simulator that are written by hand, an instruction per line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.simulator import machine
from benchmarks.simulator.cubin import WIDTH, Cubin, Line
from benchmarks.simulator.machine import Kernel, Launch, Placed
from cunorm.executors.cpu.guarded_arrays import PARAMETER

PARAMETERS = 0x210
#: stall 1, no scoreboards.
CONTROL = 1 | 7 << 5 | 7 << 8
LANES = 32


def line(text: str, number: int = 0, control: int = CONTROL) -> Line:
    """An instruction from a text such as ``"@P0 IADD3 R1,R2,R3,RZ"``."""
    guard = ""
    if text.startswith("@"):
        guard, _, text = text.partition(" ")
    opcode, _, operands = text.partition(" ")
    return Line(number * WIDTH, guard, opcode, operands, control)


def kernel(texts: Sequence[str], *, arguments: int = 2, shared_bytes: int = 0, local_bytes: int = 0) -> Kernel:
    """A kernel of these instructions, with that many arguments of 8 bytes."""
    lines = tuple(line(text, number) for number, text in enumerate(texts))
    bank = bytes(PARAMETERS + 8 * arguments)
    code = Cubin("by_hand", "sm_90", b"", lines, 64, shared_bytes, local_bytes, PARAMETERS, {0: bank}, {"by_hand": 0})
    return Kernel(code)


def launch(made: Kernel, arrays: Sequence[np.ndarray], grid: int = 1, threads: int = LANES, **options: int) -> Launch:
    """A launch on arrays, whose addresses are its arguments. Each array begins at a multiple of 4096 bytes."""
    memory, at = [], 0x10000
    for k, array in enumerate(arrays):
        memory.append(Placed(f"array{k}", at, array.nbytes, PARAMETER, int(array.ctypes.data)))
        at += -(-array.nbytes // 4096) * 4096
    shared = options.pop("shared_bytes", 0)
    return Launch(made, grid, threads, shared, [region.address for region in memory], memory, **options)


def evaluate(code: Sequence[str], *inputs: Sequence[int], results: int = 1) -> list[list[int]]:
    """Execute instructions on the lanes of one warp.

    Parameters
    ----------
    code : sequence of str
        Instructions. They find the inputs in R10, R11, R12 and so on, and leave results in R20, R21 and so on.
    *inputs : sequence of int
        32-bit values, one per lane; fewer are repeated.
    results : int
        Number of results.

    Returns
    -------
    list of list of int
        The results, each with a value per lane.
    """
    given = np.array([np.resize(np.array(one, np.uint64), LANES) for one in inputs]).astype(np.uint32)
    found = np.zeros((results, LANES), np.uint32)
    texts = ["S2R R0,SR_TID.X", "LDC.64 R2,c[0x0][0x210]", "LDC.64 R4,c[0x0][0x218]"]
    texts += ["IMAD.WIDE.U32 R2,R0,0x4,R2", "IMAD.WIDE.U32 R4,R0,0x4,R4"]
    texts += [f"LDG.E R{10 + k},desc[UR4][R2.64+{hex(4 * LANES * k)}]" for k in range(len(inputs))]
    texts += code
    texts += [f"STG.E desc[UR4][R4.64+{hex(4 * LANES * k)}],R{20 + k}" for k in range(results)]
    machine.run(launch(kernel([*texts, "EXIT"]), [given, found]))
    return [[int(value) for value in row] for row in found]


def predicates(*names: str) -> list[str]:
    """Instructions that leave 1 or 0 in R20, R21 and so on for these predicates."""
    return ["MOV R9,0x1", *(f"SEL R{20 + k},R9,RZ,{name}" for k, name in enumerate(names))]
