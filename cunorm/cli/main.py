"""The command line: ``cunorm doctor | show | tune | bench | merge | demo``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence

from .doctor import EXTRAS
from .parser import parser


def _lacks(command: str) -> bool:
    """Whether packages are missing that a command needs; it is said which, and what to type."""
    needed = EXTRAS.get(command, {})
    missing = [distribution for module, distribution in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"cunorm {command} needs {', '.join(missing)}; type: pip install 'cunorm[{command}]'", file=sys.stderr)
    return bool(missing)


def _demo(arguments: list[str]) -> int:
    from cunorm.core.errors import CompileError

    if _lacks("demo"):
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
        if asked.command == "doctor" and asked.tiles is not None and not asked.kernels:
            made.error("--tiles goes with --kernels")
        if _lacks(asked.command):
            return 1
        module, _, function = asked.run.partition(":")  # imported now: most commands need little of the others
        return int(getattr(importlib.import_module(module), function)(asked))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
        return 141
