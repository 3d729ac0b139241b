"""The command line: ``cunorm doctor``, ``cunorm show``, ``cunorm demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
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
            "executor. Exit code 0 if at least one executor works, else 1.\n\n"
            "With --kernels it compiles kernels instead, for every architecture with the oldest and the newest NVRTC\n"
            "that are installed, and prints what they use; no GPU needed. Exit code 1 if one spills, has a stack or\n"
            "cannot be launched. The first time takes minutes; results are kept in the cache folder."
        ),
        epilog="example:\n  cunorm doctor --json > doctor.json\n  cunorm doctor --kernels",
        formatter_class=raw,
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    doctor.add_argument(
        "--kernels", action="store_true", help="registers, spills, stack of every kernel, by architecture"
    )
    doctor.add_argument(
        "--tiles",
        choices=("choice", "spread", "all"),
        help="with --kernels: how many; the first time a choice takes minutes, a spread an hour, all of them hours",
    )
    show = commands.add_parser(
        "show",
        help="what runs for a problem and why; with --traffic, the bytes that it moves",
        description=(
            "Prints the strategy, tile and launches of a problem, with gamma and beta of x's dtype. With --traffic it\n"
            "runs the kernels on the CPU executor and counts: bytes against the fewest that the problem has to move,\n"
            "sectors, reuse, bank conflicts. Counted, never timed; needs no GPU, and some seconds."
        ),
        epilog=(
            "example:\n"
            "  cunorm show group_norm_backward --shape 8,320,64x64,32 --dtype bfloat16 --strategy all --traffic"
        ),
        formatter_class=raw,
    )
    show.add_argument("op", metavar="OP", help="the name of a function: group_norm_backward")
    show.add_argument(
        "--shape", required=True, metavar="N,C,HxW,GROUP", help="LayerNorm ROWS,LENGTH; BatchNorm N,C,HxW"
    )
    show.add_argument("--dtype", default="float32", help="of x: float16, bfloat16, float32, float64")
    show.add_argument("--layout", metavar="NCHW|NHWC", help="the order in memory")
    show.add_argument("--outputs", metavar="NAMES", help="those of a gradient that are wanted: dx,dgamma,dbeta")
    show.add_argument("--device", help="whose tiles and limits: A100, RTX4090, H100, H200, B200, RTX5090")
    show.add_argument("--strategy", metavar="NAME", help="another than the chosen one, with its best tile; or all")
    show.add_argument("--tile", metavar="FIELD=VALUE,...", help="with --strategy: this tile of it")
    show.add_argument("--traffic", action="store_true", help="count what it moves")
    show.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
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


def _kernels(as_json: bool, tiles: str) -> int:
    from . import gate, kernel_table, nvrtc

    found = nvrtc.ends()
    versions = [one.version for one in found]
    if not found:
        commands = "\n  ".join(str(kernel_table.missing(versions)).split(" && "))
        print(f"cunorm doctor --kernels needs NVRTC {nvrtc.supported()}; type:\n  {commands}", file=sys.stderr)
        return 1
    results = gate.run(gate.builds(found, tiles=tiles), progress=True)
    facts = kernel_table.document(results, versions, tiles)
    print(json.dumps(facts, indent=1) if as_json else kernel_table.report(results, versions, tiles))
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
    for at in range(len(given) - 2, -1, -1):  # a shape that begins with a minus is no option, and gets its own error
        if given[at] == "--shape" and re.match(r"-\d", given[at + 1]):
            given[at : at + 2] = [f"--shape={given[at + 1]}"]
    try:
        # What follows `demo` is the example's, options too: argparse would take them for its own.
        if given[:1] == ["demo"] and given[1:2] not in (["-h"], ["--help"]):
            return _demo(given[2:] if given[1:2] == ["--"] else given[1:])
        parser = _parser()
        asked = parser.parse_args(given)
        if asked.command == "show":
            from . import show

            return show.run(asked)
        if asked.tiles is not None and not asked.kernels:
            parser.error("--tiles goes with --kernels")
        return _kernels(asked.json, asked.tiles or "choice") if asked.kernels else _doctor(asked.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
