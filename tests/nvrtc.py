"""NVRTC without a GPU: compiles a kernel text for an architecture and reads registers and spills from ptxas's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What CuPy's RawKernel passes, in its order; without them the machine code would not be the one that users run.
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Usage:
    """What ptxas reports of one kernel."""

    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def compile_for(text: str, architecture: str) -> list[Usage]:
    """Compile for one architecture; AssertionError with the log if NVRTC refuses."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={architecture}"))
    except nvrtc.NVRTCError as error:
        raise AssertionError(f"{architecture}: {error}\n{nvrtc.getProgramLog(program)}") from error
    log = nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    found = []
    for part in re.split(r"Compiling entry function", log)[1:]:
        entry = re.search(r"'(\w+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        assert entry and registers and frame, log
        spills = int(frame[2]) + int(frame[3])
        found.append(Usage(entry[1], int(registers[1]), spills, int(frame[1])))
    return found


def ptx_of(text: str, architecture: str = "compute_90") -> str:
    """The PTX of a text; ptxas leaves its vector accesses as they are."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    nvrtc.compileProgram(program, (*OPTIONS[:-1], f"-arch={architecture}"))
    ptx = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    return ptx if isinstance(ptx, str) else ptx.decode()
