"""The commands' arguments and their help."""

from __future__ import annotations

import argparse

from cunorm import __version__
from cunorm.core.devices import KNOWN

_RAW = argparse.RawDescriptionHelpFormatter
_DEVICES = ", ".join(name.replace(" ", "") for name in KNOWN)


def _add_problem(command: argparse.ArgumentParser) -> None:
    """The arguments that name a problem."""
    command.add_argument("op", metavar="OP", nargs="?", help="the name of a function: group_norm_backward")
    command.add_argument("--shape", metavar="N,C,HxW,GROUP", help="LayerNorm ROWS,LENGTH; BatchNorm N,C,HxW")
    command.add_argument("--dtype", help="of x: float16, bfloat16, float32 (the default), float64")
    command.add_argument("--layout", metavar="NCHW|NHWC", help="the order in memory")
    command.add_argument("--outputs", metavar="NAMES", help="those of a gradient that are wanted: dx,dgamma,dbeta")


def _add_lists(command: argparse.ArgumentParser) -> None:
    """The arguments that name many problems."""
    command.add_argument(
        "--workload", metavar="NAME", help="a named list of problems: sd15-unet, llm, resnet50-bn, quick"
    )
    command.add_argument(
        "--from-trace", metavar="FILE", help="the problems that CUNORM_TRACE or cunorm.trace() took down"
    )


def _doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        formatter_class=_RAW,
    )
    doctor.set_defaults(run="cunorm.cli.doctor:run")
    doctor.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    doctor.add_argument(
        "--kernels", action="store_true", help="registers, spills, stack of every kernel, by architecture"
    )
    doctor.add_argument(
        "--tiles",
        choices=("choice", "spread", "all"),
        help="with --kernels: how many; the first time a choice takes minutes, a spread an hour, all of them hours",
    )


def _show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="what runs for a problem and why; with --traffic, the bytes that it moves; alone, the tiling tables",
        description=(
            "Prints the strategy, tile and launches of a problem, with gamma and beta of x's dtype. With --traffic it\n"
            "runs the kernels on the CPU executor and counts: bytes against the fewest that the problem has to move,\n"
            "sectors, reuse, bank conflicts. Counted, never timed; needs no GPU, and some seconds.\n\n"
            "Without a shape it lists the entries of the device's tiling tables; stale and modelled ones are marked."
        ),
        epilog=(
            "example:\n"
            "  cunorm show group_norm_backward --shape 8,320,64x64,32 --dtype bfloat16 --strategy all --traffic\n"
            "  cunorm show --device A100"
        ),
        formatter_class=_RAW,
    )
    show.set_defaults(run="cunorm.cli.show:run")
    _add_problem(show)
    show.add_argument("--device", help=f"whose tiles and limits: {_DEVICES}")
    show.add_argument("--table", metavar="FILE", help="this tiling table before all others")
    show.add_argument("--strategy", metavar="NAME", help="another than the chosen one, with its best tile; or all")
    show.add_argument("--tile", metavar="FIELD=VALUE,...", help="with --strategy: this tile of it")
    show.add_argument("--traffic", action="store_true", help="count what it moves")
    show.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the best tile of a problem, a workload or a trace, and keep it in a tiling table",
        description=(
            "Tries the legal tiles of a problem and keeps the best in a tiling table, which calls look into. On a GPU\n"
            "every tile is compiled, verified against the float64 oracle, and timed; the default stays unless another\n"
            "is 2 % faster. Without a GPU the cost model chooses, and the CPU executor verifies its choice: such an\n"
            "entry says that it was not measured, and never replaces a measured one.\n\n"
            "Exit code 0: everything was tuned; 1: a problem was not, or a tile gave a wrong result; 2: a wrong\n"
            "argument or table; 3: no GPU to measure on; 130: interrupted, and what was learnt is kept."
        ),
        epilog=(
            "example:\n"
            "  cunorm tune group_norm_backward --shape 2,320,64x64,32 --dtype bfloat16 --table tiles.json\n"
            "  cunorm tune --workload sd15-unet --dtype float16 --seconds 60 --report report\n"
            "  CUNORM_TRACE=run.trace python train.py && cunorm tune --from-trace run.trace"
        ),
        formatter_class=_RAW,
    )
    tune.set_defaults(run="cunorm.tuning.command:run")
    _add_problem(tune)
    _add_lists(tune)
    tune.add_argument("--device", help=f"the GPU to tune for; one that is not here can be modelled: {_DEVICES}")
    tune.add_argument(
        "--evaluator", choices=("auto", "measure", "model"), default="auto", help="auto: measure where there is a GPU"
    )
    tune.add_argument("--trials", type=int, metavar="N", help="tiles to try of each problem; default: by its space")
    tune.add_argument("--seconds", type=float, metavar="S", help="for each problem; what is begun is ended")
    tune.add_argument("--workers", type=int, default=1, metavar="K", help="GPUs that measure at once; default 1")
    tune.add_argument(
        "--storage", metavar="URL", help="an Optuna storage, or a journal file, for several hosts to share"
    )
    tune.add_argument("--table", metavar="FILE", help="default: CUNORM_TILING_TABLE, else one in the cache folder")
    tune.add_argument("--resume", action="store_true", help="go on with what an interrupted run of this table left")
    tune.add_argument("--report", metavar="DIR", help="write a page with figures there")
    tune.add_argument("--seed", type=int, default=0, metavar="N", help="of what the sampler draws; default 0")
    tune.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="cunorm beside PyTorch, Liger, QuACK and Apex: the same arrays, one run",
        description=(
            "Runs cunorm, with its default tile and with the table's, and every peer that can be imported, on the\n"
            "same arrays in one run, in interleaved order, with a cold L2. It tells the time of the kernels and,\n"
            "apart from it, of a call from Python, and at which share of a copy's bandwidth the fewest bytes were\n"
            "moved. A peer that is missing, has no such operator, fails or is wrong is listed with its sentence.\n\n"
            "Without --shape, --workload or --from-trace it takes the workload quick, in bfloat16.\n\n"
            "Exit code 0; 1: cunorm failed or was wrong, or the GPU was lost; 2: a wrong argument; 3: no GPU to\n"
            "measure on; 130: interrupted, and what was measured is written."
        ),
        epilog=(
            "example:\n"
            "  cunorm bench --workload sd15-unet --peers torch,liger --json bench.json --plot bench.png\n"
            "  cunorm bench layer_norm_backward --shape 16384,4096 --dtype bfloat16"
        ),
        formatter_class=_RAW,
    )
    bench.set_defaults(run="cunorm.tuning.bench.command:run")
    _add_problem(bench)
    bench.add_argument("--op", dest="ops", metavar="OP,...", help="of a workload or a trace: these functions alone")
    _add_lists(bench)
    bench.add_argument(
        "--peers", metavar="NAME,...", help="torch,torch.compile,liger,quack,apex; default all; '' for none"
    )
    bench.add_argument(
        "--rounds", type=int, metavar="N", help="samples of each contender; default 21, in a rehearsal 1"
    )
    bench.add_argument("--json", metavar="FILE", help="write the results there, with the facts of device and software")
    bench.add_argument("--plot", metavar="FILE", help="draw them: .png, .svg or .pdf")
    bench.add_argument(
        "--rehearse", action="store_true", help="on the CPU executor: who runs and who is right, without any times"
    )
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs and the order; default 0")
    bench.add_argument("--quiet", action="store_true", help="no progress bar")


def _merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="several tiling tables of one device as one",
        description=(
            "Of each problem the better entry is kept: measured before modelled, one whose kernels are those of this\n"
            "version before a stale one, then the faster. Tables of different devices are not merged."
        ),
        epilog="example:\n  cunorm merge mine.json yours.json -o both.json",
        formatter_class=_RAW,
    )
    merge.set_defaults(run="cunorm.cli.tables:merge")
    merge.add_argument("tables", metavar="TABLE", nargs="+")
    merge.add_argument("-o", "--output", metavar="FILE", required=True, help="is replaced as a whole")


def _demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network on real digits, every norm through cunorm",
        description=(
            "Trains a small convolutional network on scikit-learn's handwritten digits. Arguments go to the example;\n"
            "`cunorm demo -- --help` lists them."
        ),
        epilog="example:\n  cunorm demo --epochs 3 --plot loss.png",
        formatter_class=_RAW,
    )
    demo.add_argument("arguments", nargs="*", help="handed to examples/train_digits.py")


def parser() -> argparse.ArgumentParser:
    """The parser of the program."""
    made = argparse.ArgumentParser(
        prog="cunorm",
        description="Normalisation gradients and forwards for NVIDIA GPUs.",
        epilog="example:\n  cunorm doctor",
        formatter_class=_RAW,
    )
    made.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_doctor, _show, _tune, _bench, _merge, _demo):
        add(commands)
    return made
