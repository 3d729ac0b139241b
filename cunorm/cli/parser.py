"""The arguments of the commands, with their help texts."""

from __future__ import annotations

import argparse

from cunorm import __version__
from cunorm.core.devices import KNOWN

_RAW = argparse.RawDescriptionHelpFormatter
_DEVICES = ", ".join(name.replace(" ", "") for name in KNOWN)


def a_path(text: str) -> str:
    """The value of an option that is a path: an empty one is probably a variable of the shell that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("empty, expected a path")
    return text


def add_problem(command: argparse.ArgumentParser, of_workload: str = "") -> None:
    """Add the arguments that describe one problem. `of_workload` is another default dtype, for the help text."""
    command.add_argument("op", metavar="OP", nargs="?", help="name of a function, for instance group_norm_backward")
    command.add_argument(
        "--shape",
        metavar="N,C,HxW,GROUP",
        help="sizes; LayerNorm and RMSNorm expect ROWS,LENGTH; InstanceNorm, BatchNorm N,C,HxW",
    )
    names = "float16, bfloat16, float32 or float64"
    command.add_argument("--dtype", help=f"dtype of x: {names}; default float32{of_workload}")
    command.add_argument("--layout", metavar="NCHW|NHWC", help="memory order of x")
    command.add_argument("--outputs", metavar="NAMES", help="results of a gradient to compute: dx,dgamma,dbeta")
    command.add_argument(
        "--with",
        dest="extras",
        metavar="NAME",
        help="a tensor that LayerNorm or RMSNorm adds: residual; a gradient: dh",
    )
    command.add_argument("--activation", metavar="NAME", help="an activation that is fused with GroupNorm: silu")
    command.add_argument("--y-dtype", metavar="DTYPE", help="dtype of a forward's y if it is not x's: float32")


def add_lists(command: argparse.ArgumentParser) -> None:
    """Add the arguments that name a list of problems."""
    command.add_argument(
        "--workload", metavar="NAME", help="a named list of problems, for instance sd15-unet, llm, resnet50-bn, quick"
    )
    command.add_argument(
        "--from-trace", metavar="FILE", type=a_path, help="the problems that CUNORM_TRACE or cunorm.trace() recorded"
    )


def _doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="report what is installed and what works, with a command for each problem",
        description=(
            "Checks packages, GPUs, compilers, cache folders and settings, then runs one tiny gradient on each\n"
            "executor. Exit code 0 if at least one executor works, else 1.\n\n"
            "With --kernels it compiles the kernels instead, for every architecture, with the oldest and the newest\n"
            "installed NVRTC, and prints the resources that they use. This needs no GPU. Exit code 1 if a kernel\n"
            "spills, uses a stack or cannot be launched. The first run takes minutes; its results are kept in the\n"
            "cache folder."
        ),
        epilog="example:\n  cunorm doctor --json > doctor.json\n  cunorm doctor --kernels",
        formatter_class=_RAW,
    )
    doctor.set_defaults(run="cunorm.cli.doctor:run")
    doctor.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    doctor.add_argument(
        "--kernels", action="store_true", help="print registers, spills and stack of every kernel, by architecture"
    )
    doctor.add_argument(
        "--tiles",
        choices=("choice", "spread", "all"),
        help="tiles per kernel, with --kernels; the first run takes minutes (choice), an hour (spread) or hours (all)",
    )


def _show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="print the plan of a problem; with --traffic, the bytes that it moves; without OP, the tiling tables",
        description=(
            "Prints the strategy, tile and launches of a problem, with gamma and beta of x's dtype. With --traffic it\n"
            "runs the kernels on the CPU executor and counts bytes, sectors, reuse and bank conflicts; bytes are\n"
            "compared with the fewest that the problem has to move. It counts and never measures time. It needs no\n"
            "GPU, and takes some seconds.\n\n"
            "Without OP and --shape it lists the entries of the device's tiling tables. Stale, simulated and modelled\n"
            "entries are marked."
        ),
        epilog=(
            "example:\n"
            "  cunorm show group_norm_backward --shape 8,320,64x64,32 --dtype bfloat16 --strategy all --traffic\n"
            "  cunorm show --device A100"
        ),
        formatter_class=_RAW,
    )
    show.set_defaults(run="cunorm.cli.show:run")
    add_problem(show)
    show.add_argument("--device", help=f"the device whose tiles and limits are used: {_DEVICES}")
    show.add_argument("--table", metavar="FILE", type=a_path, help="a tiling table that is searched before all others")
    show.add_argument("--strategy", metavar="NAME", help="use this strategy, with its best tile; all: every strategy")
    show.add_argument("--tile", metavar="FIELD=VALUE,...", help="use this tile of the strategy named by --strategy")
    show.add_argument("--traffic", action="store_true", help="count the bytes that the plan moves")
    show.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the best tiles of a problem, a workload or a trace, and store them in a tiling table",
        description=(
            "Tries the legal tiles of a problem and stores the best in a tiling table, which later calls read. On a\n"
            "GPU every tile is compiled, verified against the float64 oracle, and timed; the default tile is kept\n"
            "unless another tile is 2 % faster. Without a GPU the cost model chooses a tile and the CPU executor\n"
            "verifies it. The entry then records that it was not measured, and it never replaces a measured entry.\n"
            "With --evaluator simulate, tiles run on the simulator of a checkout, which takes seconds to minutes per\n"
            "tile: few tiles are tried: the default, the table's, and the cost model's best. A simulated entry\n"
            "replaces a modelled one, never a measured one.\n\n"
            "Exit code 0: every problem was tuned; 1: a problem was not tuned, or a tile computed a wrong result;\n"
            "2: wrong argument or table; 3: no GPU to measure on, or no simulator; 130: interrupted, results so far\n"
            "are kept."
        ),
        epilog=(
            "example:\n"
            "  cunorm tune group_norm_backward --shape 2,320,64x64,32 --dtype bfloat16 --table tiles.json\n"
            "  cunorm tune layer_norm --shape 4096,768 --evaluator simulate --device H100 --table tiles.json\n"
            "  cunorm tune --workload sd15-unet --dtype float16 --seconds 60 --report report\n"
            "  CUNORM_TRACE=run.trace python train.py && cunorm tune --from-trace run.trace\n"
            "  cunorm tune --stale    (after an update of cunorm)"
        ),
        formatter_class=_RAW,
    )
    tune.set_defaults(run="cunorm.tuning.command:run")
    add_problem(tune)
    add_lists(tune)
    tune.add_argument(
        "--stale",
        action="store_true",
        help="the problems whose kernels have changed since they were tuned, of --table or of the device's tables",
    )
    tune.add_argument(
        "--device", help=f"the GPU to tune for; a GPU that is absent can be modelled or simulated: {_DEVICES}"
    )
    tune.add_argument(
        "--evaluator",
        choices=("auto", "measure", "simulate", "model"),
        default="auto",
        help="auto (default): measure if there is a GPU, else model; simulate: the simulator, for H100 and H200",
    )
    tune.add_argument("--trials", type=int, metavar="N", help="tiles to try per problem; default: by its tile space")
    tune.add_argument("--seconds", type=float, metavar="S", help="seconds per problem; a running trial is finished")
    tune.add_argument(
        "--workers",
        type=int,
        metavar="K",
        help="GPUs that measure at once, default 1; with --evaluator simulate: processes, default one per core",
    )
    tune.add_argument("--storage", metavar="URL", help="an Optuna storage, or a journal file, that several hosts share")
    tune.add_argument(
        "--table",
        metavar="FILE",
        type=a_path,
        help="the tiling table to write; default: CUNORM_TILING_TABLE, else a table in the cache folder",
    )
    tune.add_argument("--resume", action="store_true", help="continue an interrupted run of this table")
    tune.add_argument("--report", metavar="DIR", type=a_path, help="write a page with figures into this folder")
    tune.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the sampler; default 0")
    tune.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="time cunorm beside PyTorch, Liger, QuACK, FlashInfer and Apex, on the same arrays in one run",
        description=(
            "Runs cunorm, with its default tile and with the tile of the table, and every installed peer, on the\n"
            "same arrays in one run, in interleaved order, with a cold L2 cache. It prints the time of the kernels,\n"
            "the time of a call from Python, and the bandwidth for the fewest bytes of the problem as a share of a\n"
            "copy's bandwidth. A peer that is missing, has no such operator, fails or computes a wrong result is\n"
            "listed with the reason.\n\n"
            "Without --shape, --workload or --from-trace it runs the workload quick.\n\n"
            "Exit code 0: success; 1: cunorm failed or computed a wrong result, or the GPU was lost; 2: wrong\n"
            "argument; 3: no GPU to measure on; 130: interrupted, results so far are written."
        ),
        epilog=(
            "example:\n"
            "  cunorm bench --workload sd15-unet --peers torch,liger --json bench.json --plot bench.png\n"
            "  cunorm bench layer_norm_backward --shape 16384,4096 --dtype bfloat16"
        ),
        formatter_class=_RAW,
    )
    bench.set_defaults(run="cunorm.tuning.bench.command:run")
    add_problem(bench, ", of a workload bfloat16")
    bench.add_argument("--op", dest="ops", metavar="OP,...", help="run only these functions of a workload or a trace")
    add_lists(bench)
    bench.add_argument(
        "--peers",
        metavar="NAME,...",
        help="peers to run: torch,torch.compile,liger,quack,flashinfer,apex; default all; '' for none",
    )
    bench.add_argument("--rounds", type=int, metavar="N", help="samples per contender; default 21, with --rehearse 1")
    bench.add_argument("--json", metavar="FILE", help="write the results, with device and software versions, as JSON")
    bench.add_argument("--plot", metavar="FILE", help="draw the results: .png, .svg or .pdf")
    bench.add_argument(
        "--rehearse",
        action="store_true",
        help="run on the CPU executor and check which contenders run and are correct; measure no times",
    )
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of inputs and order; default 0")
    bench.add_argument("--quiet", action="store_true", help="show no progress bar")


def _merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="merge several tiling tables of one device",
        description=(
            "Keeps the better entry of each problem: a measured entry before a simulated one, a simulated one before\n"
            "a modelled one, a current entry before a stale one (whose kernels have changed since), then the faster\n"
            "one. Tables of different devices are refused."
        ),
        epilog="example:\n  cunorm merge mine.json yours.json -o both.json",
        formatter_class=_RAW,
    )
    merge.set_defaults(run="cunorm.cli.tables:merge")
    merge.add_argument("tables", metavar="TABLE", type=a_path, nargs="+")
    merge.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=a_path,
        required=True,
        help="the table to write; another tiling table is replaced, no other file",
    )


def _demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits, with norms computed by cunorm",
        description=(
            "Trains a small convolutional network on scikit-learn's handwritten digits. All arguments are passed to\n"
            "the example; `cunorm demo -- --help` lists them."
        ),
        epilog="example:\n  cunorm demo --epochs 3 --plot loss.png",
        formatter_class=_RAW,
    )
    demo.add_argument("arguments", nargs="*", help="passed to examples/train_digits.py")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    made = argparse.ArgumentParser(
        prog="cunorm",
        description="Normalisation gradients and forwards for NVIDIA GPUs.",
        epilog="example:\n  cunorm doctor",
        formatter_class=_RAW,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_doctor, _show, _tune, _bench, _merge, _demo):
        add(commands)
    for command in commands.choices.values():
        command.allow_abbrev = False  # a script with an abbreviation would break when an option is added
        command.set_defaults(of_command=command)
    return made
