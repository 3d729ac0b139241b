"""The command line: ``cunorm doctor | show | tune | bench | merge | demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence

from .parser import parser

INSTALL_DEMO, INSTALL_TUNE = "pip install 'cunorm[demo]'", "pip install 'cunorm[tune]'"


def _doctor(as_json: bool) -> int:
    from .doctor import document, examine, report

    found = examine()
    facts = document(found)
    print(json.dumps(facts, indent=1) if as_json else report(found))
    return 0 if facts["ok"] else 1


def _kernels(as_json: bool, tiles: str) -> int:
    from cunorm.gate import gate, kernel_report
    from cunorm.jit import nvrtc

    found = nvrtc.ends()
    versions = [one.version for one in found]
    if not found:
        commands = "\n  ".join(str(kernel_report.missing(versions)).split(" && "))
        print(f"cunorm doctor --kernels needs NVRTC {nvrtc.supported()}; type:\n  {commands}", file=sys.stderr)
        return 1
    results = gate.run(gate.builds(found, tiles=tiles), progress=True)
    facts = kernel_report.document(results, versions, tiles)
    print(json.dumps(facts, indent=1) if as_json else kernel_report.report(results, versions, tiles))
    return 0 if facts["ok"] else 1


def _demo(arguments: list[str]) -> int:
    from cunorm.core.errors import CompileError

    from .doctor import DEMO

    missing = [distribution for module, distribution in DEMO.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"cunorm demo needs {', '.join(missing)}; type: {INSTALL_DEMO}", file=sys.stderr)
        return 1
    example = importlib.import_module("cunorm.examples.train_digits")
    command = sys.argv
    sys.argv = ["cunorm demo", *arguments]  # the name in the example's own messages
    try:
        return int(example.main(arguments))
    except CompileError as error:
        print(f"{error}\nsee `cunorm doctor`", file=sys.stderr)
        return 1
    finally:
        sys.argv = command


def _tune(asked: argparse.Namespace) -> int:
    from .doctor import TUNE

    missing = [distribution for module, distribution in TUNE.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"cunorm tune needs {', '.join(missing)}; type: {INSTALL_TUNE}", file=sys.stderr)
        return 1
    return int(importlib.import_module("cunorm.tuning.command").run(asked))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; None: those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for at in range(len(given) - 2, -1, -1):  # a shape that begins with a minus is no option, and gets its own error
        if given[at] == "--shape" and re.match(r"-\d", given[at + 1]):
            given[at : at + 2] = [f"--shape={given[at + 1]}"]
    try:
        # What follows `demo` is the example's, options too: argparse would take them for its own.
        if given[:1] == ["demo"] and given[1:2] not in (["-h"], ["--help"]):
            return _demo(given[2:] if given[1:2] == ["--"] else given[1:])
        made = parser()
        asked = made.parse_args(given)
        if asked.command == "show":
            from . import show

            return show.run(asked)
        if asked.command == "tune":
            return _tune(asked)
        if asked.command == "bench":
            return int(importlib.import_module("cunorm.tuning.bench.command").run(asked))
        if asked.command == "merge":
            from . import tables

            return tables.merge(asked)
        if asked.tiles is not None and not asked.kernels:
            made.error("--tiles goes with --kernels")
        return _kernels(asked.json, asked.tiles or "choice") if asked.kernels else _doctor(asked.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
        return 141
