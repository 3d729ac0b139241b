"""Run one small case of every kernel on the GPU, for compute-sanitizer.

Example: ``compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.battery.one_per_kernel``

Each strategy of each op runs one case per set of kernels and layout, with generic and with specialised kernels;
``--only`` selects some of them, for example after a change. CuPy's memory pool is off, so that each array is an
allocation of its own: memcheck sees an access that leaves it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator

import cupy

from cunorm.jit.sources import TEXTS
from tests.battery import cases as battery
from tests.battery.case import Case, forget


def chosen() -> Iterator[Case]:
    """The first case of each op, strategy, way to load, layout and set of kernels."""
    met = set()
    for case in battery.CASES:
        key = case.op, case.strategy, case.tile.get("load"), case.last, case.kernels
        if key not in met:
            met.add(key)
            yield case


def main(argv: list[str] | None = None) -> int:
    """Run the cases and return the exit code: 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the cases and run nothing")
    parser.add_argument("--only", metavar="REGEX", default="", help="only cases whose name matches, as --list shows it")
    asked = parser.parse_args(argv)
    try:
        only = re.compile(asked.only)
    except re.error as error:
        parser.error(f"--only: {asked.only!r} is no regular expression: {error}")
    found = [case for case in chosen() if only.search(str(case))]
    if not found:
        parser.error(f"--only: {asked.only!r} matches no case; --list names them")
    if asked.list:
        print("\n".join(map(str, found)))
        return 0
    cupy.cuda.set_allocator(None)
    wrong = 0
    for text in TEXTS:
        os.environ["CUNORM_SPECIALISE"] = "never" if text == "generic" else "always"
        forget()
        for case in found:
            print(f"{text}, {case}", flush=True)  # before it runs: a report of the sanitizer comes behind its case
            try:
                case.run("gpu")
            except AssertionError as error:
                wrong += 1
                print(f"wrong: {error}", flush=True)
    print(f"{len(found)} cases with each text; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
