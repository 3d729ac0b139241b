"""Run checks on one mutant in a separate process: `python -m tests.mutation.worker FOLDER ENTRIES CHECK...`.

ENTRIES are the kernels that are compiled from FOLDER, separated by commas, or * for all. Kernels that never run the
mutated code are compiled from the original sources, which usually have been built before.

A check is ``case:INDEX``, an index into battery.CASES, or ``kernel:FILE``, a test kernel with a check in
kernel_checks.py. ``ptx:CHECK`` is the same check on the PTX of each NVRTC. The standard output names each check when it
starts, and then the outcome of the mutant. A timer of processor time ends a kernel that never ends. Neither the load of
the machine nor the compiler, which is another process, counts towards this time.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

SECONDS = 10  # of processor time, for one check in one order
PTX_ARCHITECTURE = "sm_90"  # the oldest one that has all instructions of the inline PTX


def run(check: str, kernels: Path) -> bytes:
    """Run one check and return the bytes that must be equal in every order of threads."""
    what, _, which = check.partition(":")
    if what == "ptx":
        from tests.ptx.route import PAIRS, through_ptx

        results = b""
        for pair in PAIRS:
            if pair[0] == PTX_ARCHITECTURE:
                with through_ptx(*pair):
                    results += run(which, kernels)
        return results
    if what == "case":
        from tests.battery import cases as battery

        results = battery.CASES[int(which)].run()
        return b"".join(b"" if a is None else a.tobytes() for a in results)
    from tests.kernels import kernel_checks

    getattr(kernel_checks, f"check_{which.removesuffix('.cu')}")((kernels / which).read_text(encoding="utf-8"))
    return b""


def use(folder: Path, entries: str) -> None:
    """Read the sources of those kernels from the folder."""
    from cunorm.jit import sources
    from cunorm.runtime import plans

    original, changed, kernel_text = sources.folder(), folder / "kernels_cu", sources.kernel_text
    mutated = set(entries.split(","))

    def text(one: plans.Launch, *rest: Any) -> str:
        place = changed if one.entry in mutated or entries == "*" else original
        sources.folder = lambda: place  # type: ignore[assignment]
        for cached in (sources._expand, sources._code, sources._head_of):
            cached.cache_clear()
        try:
            return kernel_text(one, *rest)
        finally:
            sources.folder = lambda: changed  # type: ignore[assignment]

    sources.kernel_text = text
    sources.folder = lambda: changed  # type: ignore[assignment]


def main(folder: Path, entries: str, checks: list[str]) -> None:
    from cunorm import CompileError, KernelFault
    from tests.battery.case import ORDERS
    from tests.ptx.parse import UnknownPtx

    use(folder, entries)
    # The plain build comes first, because the checked build takes several times as long to compile.
    last = os.environ["CUNORM_CPU_BUILD"]
    for build, check in itertools.product(dict.fromkeys(("plain", last)), checks):
        print(f"at {check}", flush=True)
        os.environ["CUNORM_CPU_BUILD"] = build
        results = set()
        for order in ORDERS:
            os.environ["CUNORM_CPU_ORDER"] = order
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                results.add(run(check, folder / "kernels"))
            except CompileError as error:
                if "does not compile" not in str(error):  # a full disk, for example, proves nothing about the mutant
                    raise
                print("stillborn", " ".join(str(error).split()))
                return
            except UnknownPtx as error:
                print("killed refused:", error)
                return
            except KernelFault as error:
                print("killed fault:", str(error).splitlines()[0])
                return
            except AssertionError as error:
                print("killed wrong:", (str(error) or "a result").splitlines()[0])
                return
        if len(results) > 1:
            print("killed orders: results depend on the order of threads")
            return
    print("survived")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
