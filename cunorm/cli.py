"""The command line: ``cunorm doctor``, ``cunorm demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence

from . import __version__

__all__ = ["main"]

INSTALL_DEMO = "pip install 'cunorm[demo]'"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="cunorm",
        description="Normalisation gradients and forwards for NVIDIA GPUs.",
        epilog="example:\n  cunorm doctor",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what works, what to type about the rest",
        description=(
            "Looks at packages, GPUs, compilers, cache folders and settings, then runs one tiny gradient on each\n"
            "executor. Exit code 0 if at least one executor works, else 1."
        ),
        epilog="example:\n  cunorm doctor --json > doctor.json",
        formatter_class=raw,
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    demo = commands.add_parser(
        "demo",
        help="train a small network on real digits, every norm through cunorm",
        description=(
            "Trains a small convolutional network on scikit-learn's handwritten digits. Arguments go to the example;\n"
            "`cunorm demo -- --help` lists them."
        ),
        epilog="example:\n  cunorm demo --epochs 3 --plot loss.png",
        formatter_class=raw,
    )
    demo.add_argument("arguments", nargs="*", help="handed to examples/train_digits.py")
    return parser


def _doctor(as_json: bool) -> int:
    from .doctor import examine
    from .findings import document, report

    found = examine()
    facts = document(found)
    print(json.dumps(facts, indent=1) if as_json else report(found))
    return 0 if facts["ok"] else 1


def _demo(arguments: list[str]) -> int:
    from .doctor import DEMO
    from .errors import CompileError

    missing = [distribution for module, distribution in DEMO.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"cunorm demo needs {', '.join(missing)}; type: {INSTALL_DEMO}", file=sys.stderr)
        return 1
    example = importlib.import_module(".examples.train_digits", __package__)
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
    try:
        # What follows `demo` is the example's, options too: argparse would take them for its own.
        if given[:1] == ["demo"] and given[1:2] not in (["-h"], ["--help"]):
            return _demo(given[2:] if given[1:2] == ["--"] else given[1:])
        return _doctor(_parser().parse_args(given).json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
