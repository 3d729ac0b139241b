"""The command line: ``cunorm doctor | show | tune | bench | merge | demo``."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence

from cunorm.core.errors import about_file

from .doctor import EXTRAS
from .parser import parser


def _lacks(command: str) -> bool:
    """Whether a command's packages are missing. If so, print their names and the command that installs them."""
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


def _parsed(given: list[str]) -> argparse.Namespace:
    """The parsed arguments. A wrong one ends the program, with the usage of its command."""
    made = parser()
    asked, unknown = made.parse_known_args(given)
    of_command: argparse.ArgumentParser = asked.of_command
    if unknown:
        numbers = "shape" in asked and asked.shape is not None and all(word.isdecimal() for word in unknown)
        hint = f"; --shape is one word with commas: {asked.shape},{','.join(unknown)}" if numbers else ""
        of_command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if asked.command == "doctor" and asked.tiles is not None and not asked.kernels:
        of_command.error("--tiles: requires --kernels")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; None for the arguments of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # A shape that begins with a minus is passed as --shape=..., so that argparse does not read it as an option. The
    # check of the shape reports its error.
    for at in range(len(given) - 2, -1, -1):
        if given[at] == "--shape" and re.match(r"-\d", given[at + 1]):
            given[at : at + 2] = [f"--shape={given[at + 1]}"]
    try:
        try:
            return _run(given)
        finally:
            if sys.stdout is not None:  # it is None if the caller has closed it
                sys.stdout.flush()  # here, not when the interpreter ends: a failure has an exit code and a sentence
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe, for instance `| head`
        _discard_output()
        return 141
    except OSError as error:  # for instance a full disk
        is_output = error.filename is None and error.errno == errno.ENOSPC
        if is_output:
            _discard_output()
        print(f"cunorm: {about_file(error, 'standard output' if is_output else None)}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Discard the buffered output, which cannot be written: the interpreter would try it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(given: list[str]) -> int:
    """Run a command; return the exit code."""
    # All arguments after `demo`, options included, belong to the example. argparse would interpret the options.
    if given[:1] == ["demo"] and given[1:2] not in (["-h"], ["--help"]):
        return _demo(given[2:] if given[1:2] == ["--"] else given[1:])
    asked = _parsed(given)
    if _lacks(asked.command):
        return 1
    module, _, function = asked.run.partition(":")  # imported here: a command does not need the other commands
    return int(getattr(importlib.import_module(module), function)(asked))
