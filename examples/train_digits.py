"""Train a small convolutional network with normalisation layers on real handwritten digits.

The data are the digits that scikit-learn contains: 1,797 real 8x8 images, 1,437 for training and 360 for testing. The
layers are GroupNorm, or with ``--norm`` InstanceNorm, LayerNorm, RMSNorm or BatchNorm. ``cunorm`` computes all their
forwards and gradients. Every 20 steps the results are compared with the float64 oracle. Everything else (convolutions,
pooling, the loss, Adam) is plain array code for NumPy and CuPy arrays.

Run it with ``python examples/train_digits.py``; ``--help`` lists the options. At the end it prints the test accuracy
and writes a plot of the loss. With ``--processes 2`` two processes train together, each on half of every batch.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import cunorm
from cunorm.core.errors import about_file
from cunorm.core.files import PLOT_SUFFIXES, file_to_write

if __package__:
    from .digits_checks import CheckedLibrary, GradientMismatch
    from .digits_network import Network
    from .digits_norms import NORMS
    from .digits_parallel import ENGINES, FUNCTIONS, Group, SyncBatchNorm, joined, start, usable_engine
else:  # run as a script
    from digits_checks import CheckedLibrary, GradientMismatch
    from digits_network import Network
    from digits_norms import NORMS
    from digits_parallel import ENGINES, FUNCTIONS, Group, SyncBatchNorm, joined, start, usable_engine

TRAINING_IMAGES = 1437
BATCH = 64
LEARNING_RATE = 3e-3
CHECK_EVERY = 20  # steps between two comparisons with the oracle
REQUIRED_ACCURACY = 0.95


@dataclass
class Result:
    """The result of a training run."""

    norm: str  # title of the norm
    library: CheckedLibrary
    losses: list[float] = field(default_factory=list)  # per step
    accuracies: list[float] = field(default_factory=list)  # on the test images, per epoch
    seconds: float = 0.0


def split_digits() -> tuple[Any, Any, Any, Any]:
    """Return training images and labels, then test images and labels. The split is always the same."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.images[order][:, None] / 16.0, digits.target[order]
    train, test = images[:TRAINING_IMAGES], images[TRAINING_IMAGES:]
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, labels[:TRAINING_IMAGES], (test - mean) / deviation, labels[TRAINING_IMAGES:]


def run(  # noqa: PLR0913  # a keyword for each choice
    norm: str = "group",
    functions: Any = cunorm,
    *,
    xp: Any = np,
    dtype: str = "float32",
    epochs: int = 6,
    seed: int = 0,
    images: int | None = None,
    check_every: int = CHECK_EVERY,
    group: Group | None = None,
) -> Result:
    """Train on the digits with one kind of norm, on arrays of `xp`.

    Parameters
    ----------
    norm : str
        A key of `NORMS`.
    functions : module
        The module with the functions of the norms: ``cunorm``, or a replacement for it.
    xp : module
        ``numpy`` or ``cupy``.
    dtype : str
        Dtype of images, activations and parameters.
    epochs, seed : int
        Number of passes over the training images; seed of the initial weights and of the order of the images.
    images : int, optional
        Maximum number of training images, and of test images. None: all.
    check_every : int
        Steps between two comparisons with the oracle; the first step is always compared.
    group : Group, optional
        The processes that train together, all of which call this function. BatchNorm then calls functions of
        ``cunorm.distributed``, which `functions` must have.

    Raises
    ------
    GradientMismatch
        If a norm's results disagree with the oracle.
    """
    train, labels, test, test_labels = (part[:images] for part in split_digits())
    on_device = [xp.asarray(train, dtype), xp.asarray(labels), xp.asarray(test, dtype), xp.asarray(test_labels)]
    group = group or Group()
    library, kind = CheckedLibrary(functions), NORMS[norm]
    if norm == "batch" and group.size > 1:
        kind = functools.partial(SyncBatchNorm, group)
    network = Network(xp, functools.partial(kind, xp, library, xp.dtype(dtype)), xp.dtype(dtype), seed)
    rng = np.random.default_rng(seed)
    result = Result(NORMS[norm].title, library)
    steps = epochs * math.ceil(len(labels) / BATCH)
    start = time.perf_counter()
    with tqdm(total=steps, unit="step", disable=True if group.rank else None) as bar:
        for epoch in range(1, epochs + 1):
            order = xp.asarray(rng.permutation(len(labels)))
            for first in range(0, len(labels), BATCH):
                rows = order[first : first + BATCH]
                step = len(result.losses)
                library.checking = step % check_every == 0
                part = group.part(rows)
                loss = network.loss_and_gradients(on_device[0][part], on_device[1][part], len(rows))
                group.sum_gradients(network.parameters)
                result.losses.extend(group.total(loss))
                rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
                for parameter in network.parameters:
                    parameter.step(xp, rate, step + 1)
                bar.update()
            tested = [group.part(array) for array in on_device[2:]]
            (right,) = group.total(round(network.accuracy(*tested) * len(tested[1])))
            result.accuracies.append(right / len(test))
            bar.set_description(f"epoch {epoch}/{epochs}, test accuracy {result.accuracies[-1]:.1%}")
    result.seconds = time.perf_counter() - start
    return result


def plot(result: Result, path: Path, executor: str) -> None:
    """Write the loss per step and the test accuracy per epoch in one of the formats of `PLOT_SUFFIXES`."""
    from matplotlib.figure import Figure

    losses, accuracies = np.array(result.losses), 100 * np.array(result.accuracies)
    per_epoch = len(losses) / len(accuracies)
    epochs = np.arange(1, len(losses) + 1) / per_epoch
    width = min(len(losses), max(1, round(per_epoch / 2)))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    figure.suptitle(f"Handwritten digits, {result.norm} by cunorm ({executor})")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(epochs, losses, color="0.75", linewidth=0.8, label="every step")
    centres = epochs[: len(smooth)] + (width - 1) / 2 / per_epoch
    upper.plot(centres, smooth, color="tab:blue", linewidth=2, label=f"mean of {width} steps")
    upper.set(title="Training loss", ylabel="cross-entropy (nats, log scale)", yscale="log")
    upper.legend(frameon=False)
    lower.plot(np.arange(1, len(accuracies) + 1), accuracies, color="tab:green", marker="o", markersize=4)
    lower.axhline(100 * REQUIRED_ACCURACY, color="0.5", linestyle="--", linewidth=1)
    lower.set(
        title=f"Accuracy on the test images: {accuracies[-1]:.1f} % at the end", xlabel="epoch", ylabel="right, %"
    )
    lower.text(len(accuracies), 100 * REQUIRED_ACCURACY - 0.3, "required", color="0.4", ha="right", va="top")
    lower.set_xlim(0, len(accuracies) + 0.3)
    lower.set_ylim(min(90, accuracies.min() - 2), 100.5)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def find_device(wanted: str) -> tuple[Any, str]:
    """Return the array module and the name of its executor; raise LookupError if a GPU is requested and not found."""
    if wanted == "cpu":
        return np, "cpu executor: exact, not fast"
    try:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except Exception as problem:  # no CuPy, no driver and no device raise different exceptions
        if wanted == "gpu":
            raise LookupError(f"no GPU to use ({problem}); `cunorm doctor` reports the missing part") from problem
        return find_device("cpu")
    return cupy, name


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--norm", choices=tuple(NORMS), default="group", help="the norm of all three layers")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if CuPy finds one"
    )
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training images")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the images")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="dtype of all arrays")
    parser.add_argument("--plot", default="digits_loss.png", metavar="FILE", help="loss plot: .png, .svg or .pdf")
    parser.add_argument("--processes", type=int, default=1, help="processes that train together, on the CPU")
    parser.add_argument(
        "--engine", choices=tuple(ENGINES), help="how they exchange data; default: one that is installed"
    )
    # The arguments that tell a process of several how to join the others.
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check numbers, and the name of the plot, which gets a suffix and becomes a path. A wrong value ends the run."""
    for name, least in (("epochs", 1), ("processes", 1), ("seed", 0)):
        value = getattr(options, name)
        if not least <= value < 2**32:
            parser.error(f"--{name}: {value}, expected at least {least}, and less than 2^32")
    try:
        bare = options.plot and not Path(options.plot).is_dir() and not Path(options.plot).suffix
        options.plot = file_to_write("--plot", options.plot + PLOT_SUFFIXES[0] if bare else options.plot, PLOT_SUFFIXES)
    except ValueError as error:
        parser.error(str(error))


def train(options: argparse.Namespace, xp: Any, executor: str, group: Group) -> int:
    """Train and, on the first process, print the results and write the plot; return the exit code."""
    functions = cunorm if group.size == 1 else FUNCTIONS
    try:
        result = run(
            options.norm,
            functions,
            xp=xp,
            dtype=options.dtype,
            epochs=options.epochs,
            seed=options.seed,
            group=group,
        )
    except GradientMismatch as mismatch:
        print(f"gradient check failed: {mismatch}", file=sys.stderr)
        return 1
    accuracy = result.accuracies[-1]
    if group.rank == 0:
        report(result, options, executor)
        try:
            plot(result, options.plot, executor)
        except OSError as error:
            print(f"--plot: {about_file(error, options.plot)}", file=sys.stderr)
            return 1
        print(f"plot             {options.plot}")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


def report(result: Result, options: argparse.Namespace, executor: str) -> None:
    """Print the results of a training run."""
    library, accuracy = result.library, result.accuracies[-1]
    by_name = ", ".join(f"{count}\N{NO-BREAK SPACE}{name}" for name, count in library.calls.items())
    lines = textwrap.fill(f"{library.calls.total()} ({by_name})", 100, subsequent_indent=" " * 17)
    calls = lines.replace("\N{NO-BREAK SPACE}", " ")
    checks = f"{library.checks} tensors agree with the oracle; worst error {library.worst:.0%} of its bound"
    print(f"test accuracy    {accuracy:.2%} after {options.epochs} epochs (required: {REQUIRED_ACCURACY:.0%})")
    print(f"time             {result.seconds:.1f} s")
    print(f"cunorm launches  {calls}")
    print(f"executor         {executor}")
    print(f"gradient checks  {checks}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 if the network reaches the required accuracy and every check passes, else 1."""
    parser = parser_of_options()
    options = parser.parse_args(argv)
    check(options, parser)
    several = options.processes > 1
    if several and options.device == "gpu":
        parser.error("--device: gpu, expected cpu with several --processes")
    try:
        xp, executor = find_device("cpu" if several else options.device)
    except LookupError as problem:
        parser.error(f"--device: {problem}")
    if not several:
        return train(options, xp, executor, Group())
    try:
        engine = usable_engine(options.engine)
        if options.meet is None:
            return start(engine, options.processes, sys.argv[1:] if argv is None else argv)
    except LookupError as problem:
        parser.error(f"--engine: {problem}")
    with joined(engine, options.meet, options.rank, options.processes) as group:
        return train(options, xp, f"{executor}; {group.size} processes of {engine}", group)


if __name__ == "__main__":
    sys.exit(main())
