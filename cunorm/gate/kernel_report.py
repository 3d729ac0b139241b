"""The report of `cunorm doctor --kernels`: the compile gate's results per kernel and dtype, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cunorm.core.devices import PARTS, WARP
from cunorm.core.strategy import ceil_div
from cunorm.jit.nvrtc import ARCHITECTURES, INSTALL, OPTIONS, SUPPORTED

from .gate import TILES, BuildResult, device_of


@dataclass(frozen=True)
class Row:
    """One kernel with one dtype, architecture and NVRTC, over the tiles that were compiled.

    Attributes
    ----------
    kernel, dtype, architecture, nvrtc : str
    ops : tuple of str
        The ops that launch the kernel, each with its strategy.
    tiles : int
        Number of compiled texts of the kernel.
    registers, threads : tuple of (int, int)
        Minimum and maximum of registers per thread, and of threads per block.
    spill_bytes, stack_bytes, shared_bytes : int
        Maximum over the tiles: bytes per thread of spills and stack, bytes per block of static shared memory.
    resident : float
        Minimum over the tiles of `resident`.
    """

    kernel: str
    dtype: str
    architecture: str
    nvrtc: str
    ops: tuple[str, ...]
    tiles: int
    registers: tuple[int, int]
    threads: tuple[int, int]
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    resident: float


def resident(registers: int, threads: int, architecture: str) -> float:
    """Return the share of a multiprocessor's threads that can be resident, as limited by registers and block size.

    Parameters
    ----------
    registers : int
        Registers per thread.
    threads : int
        Threads per block.
    architecture : str
        One of `cunorm.jit.nvrtc.ARCHITECTURES`.
    """
    device = device_of(architecture)
    blocks = device.fitting_blocks(threads, registers, parts=PARTS)
    return blocks * ceil_div(threads, WARP) * WARP / device.threads_per_multiprocessor


def rows(results: Iterable[BuildResult]) -> list[Row]:
    """Group the results by kernel, dtype, architecture and NVRTC, in order of first occurrence."""
    found: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for result in results:
        build = result.build
        for usage in result.usages:
            key = (usage.entry, build.case.dtype, build.architecture, build.nvrtc.version)
            kept = found.setdefault(key, {"uses": {}, "ops": {}})
            kept["uses"][build.text] = (usage, build.threads)
            kept["ops"][f"{build.case.op} {build.case.strategy}"] = None
    made = []
    for key, kept in found.items():
        uses = [usage for usage, _ in kept["uses"].values()]
        sizes = [threads for _, threads in kept["uses"].values()]
        registers = [usage.registers for usage in uses]
        made.append(
            Row(
                *key,
                ops=tuple(kept["ops"]),
                tiles=len(uses),
                registers=(min(registers), max(registers)),
                threads=(min(sizes), max(sizes)),
                spill_bytes=max(usage.spill_bytes for usage in uses),
                stack_bytes=max(usage.stack_bytes for usage in uses),
                shared_bytes=max(usage.shared_bytes for usage in uses),
                resident=min(resident(usage.registers, threads, key[2]) for usage, threads in kept["uses"].values()),
            )
        )
    return made


def missing(versions: Sequence[str]) -> str | None:
    """Return the commands that install the oldest and the newest supported version if they are missing, or None."""
    oldest, before = SUPPORTED
    has_oldest = any(tuple(map(int, version.split(".")[:2])) == oldest for version in versions)
    has_newest = any(int(version.partition(".")[0]) == before[0] - 1 for version in versions)
    lacking = [wheel for wheel, there in zip(INSTALL, (has_oldest, has_newest), strict=True) if not there]
    if not lacking:
        return None
    # Install into a separate folder: CuPy for CUDA 12 would load an NVRTC 13 from its own site-packages.
    commands = [f"pip install --no-deps --target nvrtc_{number} '{wheel}'" for number, wheel in enumerate(lacking, 1)]
    path = ":".join(f"nvrtc_{number}" for number, _ in enumerate(lacking, 1))
    return " && ".join([*commands, f"PYTHONPATH={path} cunorm doctor --kernels"])


def document(results: Sequence[BuildResult], versions: Sequence[str], tiles: str) -> dict[str, Any]:
    """Return the report as a JSON document."""
    faults = list(dict.fromkeys(fault for result in results for fault in result.faults()))
    return {
        "schema": "cunorm-kernels/1",
        "ok": bool(results) and not faults,
        "nvrtc": list(versions),
        "options": list(OPTIONS),
        "tiles": tiles,
        "missing": missing(versions),
        "faults": faults,
        "kernels": [asdict(row) for row in rows(results)],
    }


# ---- the report as text ---------------------------------------------------------------------------------------------


def _range(values: Iterable[tuple[int, int]]) -> str:
    both = [value for pair in values for value in pair]
    return "" if not both else f"{min(both)}" if min(both) == max(both) else f"{min(both)}-{max(both)}"


def _columns(dtype: str, builds: str, threads: str, cells: Iterable[str], rest: Sequence[str]) -> str:
    registers = "".join(f"{cell:>8s}" for cell in cells)
    return f" {dtype:8s}{builds:>6s}{threads:>8s}{registers}{rest[0]:>6s}{rest[1]:>6s}{rest[2]:>5s}"


def _line(dtype: str, here: Sequence[Row], versions: Sequence[str]) -> str:
    cells = []
    for architecture in ARCHITECTURES:
        for version in versions:
            met = [row.registers for row in here if (row.architecture, row.nvrtc) == (architecture, version)]
            cells.append(_range(met) or ".")
    local = str(max(row.spill_bytes for row in here)), str(max(row.stack_bytes for row in here))
    rest = (*local, f"{min(row.resident for row in here):.0%}")
    return _columns(dtype, str(sum(row.tiles for row in here)), _range(row.threads for row in here), cells, rest)


def report(results: Sequence[BuildResult], versions: Sequence[str], tiles: str) -> str:
    """Return the report as text of 120 columns."""
    found = rows(results)
    numbers = [".".join(version.split(".")[:2]) for version in versions]
    above = [name for architecture in ARCHITECTURES for name in [architecture, *[""] * (len(versions) - 1)]]
    lines = [
        f"Registers per thread, minimum-maximum over the tiles, by architecture and NVRTC ({', '.join(versions)}).",
        TILES[tiles],
        "builds: compiled texts, over all pairs of architecture and NVRTC; spill, stack: maximum of bytes per thread;",
        "occ: minimum share of a multiprocessor's threads that can be resident, limited by registers and block size.",
        "",
        _columns("", "", "", above, ("", "", "")).rstrip(),
        _columns("", "builds", "threads", numbers * len(ARCHITECTURES), ("spill", "stack", "occ")),
    ]
    kernels = dict.fromkeys(row.kernel for row in found)
    for kernel in kernels:
        of_kernel = [row for row in found if row.kernel == kernel]
        ops = dict.fromkeys(op for row in of_kernel for op in row.ops)
        told = "" if len(ops) == 1 else f"   (ops: {', '.join(dict.fromkeys(op.split()[0] for op in ops))})"
        static = max(row.shared_bytes for row in of_kernel)
        lines.append(kernel + told + (f"   {static} bytes of static shared memory" if static else ""))
        for dtype in dict.fromkeys(row.dtype for row in of_kernel):
            lines.append(_line(dtype, [row for row in of_kernel if row.dtype == dtype], versions))
    faults = list(dict.fromkeys(fault for result in results for fault in result.faults()))
    lines.append("")
    for fault in faults:
        first, *log = fault.splitlines()
        lines += [*textwrap.wrap(f"fault: {first}", 120, subsequent_indent="  ", break_on_hyphens=False), *log]
    if (advice := missing(versions)) is not None:
        lines.append("The oldest or the newest supported NVRTC is missing; type:")
        lines += [f"  {command}" for command in advice.split(" && ")]
    count = len({(result.build.text, result.build.architecture, result.build.nvrtc) for result in results})
    sentence = (
        f"{len(faults)} fault{'s' if len(faults) > 1 else ''}" if faults else "no spill, no stack, all launchable"
    )
    lines.append(f"{len(kernels)} kernels, {count} builds: {sentence}.")
    return "\n".join(lines)
