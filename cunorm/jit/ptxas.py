"""What ptxas's report and the PTX say of kernels: registers, spills, wide accesses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cunorm.core.errors import CompileError

__all__ = ["Usage", "usages_in"]

_COPY = r"cp\.async\.(?:cg\.shared\.global \[[^;]*, 16;|bulk\.shared::cluster\.global\b)"
_LOAD = re.compile(rf"\bld\.global(?:\.\w+)*\.(?:v4\.[ufb]32|v2\.[ufb]64)\b|\b{_COPY}")
_STORE = re.compile(r"\bst\.global(?:\.\w+)*\.(?:v4\.[ufb]32|v2\.[ufb]64)\b")
_WORDS = ", ".join([r"(%r\d+)"] * 4)
_APART = re.compile(
    rf"\bld\.global(?:\.\w+)*\.v4\.[ub]32\s+\{{{_WORDS}\}}[^;]*;\s+mov\.b32\s+\{{[^}}]*\}}, (?:\1|\2|\3|\4);"
)


@dataclass(frozen=True)
class Usage:
    """What one kernel uses.

    Attributes
    ----------
    entry : str
    registers : int
        32-bit registers of a thread.
    spill_bytes : int
        Of a thread, stores and loads together.
    stack_bytes : int
        Of a thread's frame in local memory.
    shared_bytes : int
        Static shared memory of a block.
    barriers : int
        Named barriers of a block.
    loads_16, stores_16 : int
        Accesses to global memory of 16 bytes in the PTX, asynchronous and bulk copies too; ptxas leaves them so.
    taken_apart : int
        Of those loads, the ones whose words are cut into 16-bit elements right where they are loaded: then a thread
        waits for each of its loads before it starts the next, and its data takes twice the registers.
    """

    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int
    loads_16: int
    stores_16: int
    taken_apart: int = 0


def usages_in(ptx: str, log: str) -> list[Usage]:
    """What the kernels of a program use, from its PTX and its log with ptxas's report.

    Raises
    ------
    CompileError
        If the log does not say it in the known form.
    """
    bodies = {part.partition("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}
    found = []
    for part in log.split("Compiling entry function")[1:]:
        entry = re.search(r"'(\w+)'", part)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers(.*)", part)
        if entry is None or frame is None or used is None:
            raise CompileError(f"ptxas's report has an unknown form:\n{log}")
        shared, barriers = re.search(r"(\d+) bytes smem", used[2]), re.search(r"used (\d+) barriers", used[2])
        found.append(
            Usage(
                entry=entry[1],
                registers=int(used[1]),
                spill_bytes=int(frame[2]) + int(frame[3]),
                stack_bytes=int(frame[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                barriers=int(barriers[1]) if barriers else 0,
                loads_16=len(_LOAD.findall(bodies.get(entry[1], ""))),
                stores_16=len(_STORE.findall(bodies.get(entry[1], ""))),
                taken_apart=len(_APART.findall(bodies.get(entry[1], ""))),
            )
        )
    if not found:
        raise CompileError(f"ptxas reported no kernel:\n{log}")
    return found
