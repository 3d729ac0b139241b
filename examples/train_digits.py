"""Train a small convolutional network with GroupNorm layers on real handwritten digits.

The data are scikit-learn's bundled digits: 1,797 real 8x8 images, 1,437 to train on and 360 to test on. Every GroupNorm
forward and every GroupNorm gradient goes through ``cunorm``, and every so often they are compared with the float64
oracle. The rest (convolutions, pooling, the loss, Adam) is plain array code that runs on NumPy and on CuPy arrays.

Run it with ``python examples/train_digits.py``; ``--help`` lists the options. It ends with the test accuracy and a plot
of the loss.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import cunorm
from cunorm import reference

if __package__:
    from .digits_network import Array, GroupNorm, Network
else:  # run as a script
    from digits_network import Array, GroupNorm, Network

TRAINING_IMAGES = 1437
BATCH = 64
LEARNING_RATE = 3e-3
CHECK_EVERY = 20  # steps between two comparisons with the oracle
REQUIRED_ACCURACY = 0.95

NormFunction = Callable[..., tuple[Array, Array, Array]]


class GradientMismatch(RuntimeError):
    """A result of a GroupNorm layer is further from the float64 oracle than rounding explains."""

    def __init__(self, layer: str, tensor: str, error: float, bound: float) -> None:
        super().__init__(f"{layer}: {tensor} is off by {error:.3g}, expected at most {bound:.3g}")
        self.layer, self.tensor, self.error, self.bound = layer, tensor, error, bound


@dataclass
class CheckedNorms:
    """The two functions of GroupNorm, a count of the calls to them, and their comparison with the oracle."""

    forward_function: NormFunction
    backward_function: NormFunction
    forward_calls: int = 0
    backward_calls: int = 0
    checking: bool = False
    checks: int = 0
    worst: float = 0.0  # largest error seen, as a fraction of its bound

    def forward(self, *arguments: Any, **options: Any) -> tuple[Array, Array, Array]:
        self.forward_calls += 1
        return self.forward_function(*arguments, **options)

    def backward(self, *arguments: Any, **options: Any) -> tuple[Array, Array, Array]:
        self.backward_calls += 1
        return self.backward_function(*arguments, **options)

    def observe(self, layer: GroupNorm, dy: Array, results: dict[str, Array]) -> None:
        """While checking, compare what a layer computed with the oracle; raise GradientMismatch if it is wrong.

        The bound on each number is 16 units of rounding of the layer's dtype times the sum of the sizes of the terms
        that make it up. A result takes a few roundings per term, and sums over many terms run as trees or as some
        dozens of partial sums, whose errors mostly cancel: a few units in all. A wrong formula is off by a sizeable
        part of the terms, 100,000 times more. The last addend forgives subnormals that a GPU flushes to zero.
        """
        if not self.checking:
            return
        x, gamma, beta = to_numpy(layer.x), to_numpy(layer.gamma.value), to_numpy(layer.beta.value)
        upstream, groups = to_numpy(dy), layer.groups
        ours = {name: to_numpy(array) for name, array in results.items()}
        expected = dict(zip(("y", "mean", "rstd"), reference.group_norm(x, groups, gamma, beta), strict=True))
        gradients = reference.group_norm_backward(upstream, x, ours["mean"], ours["rstd"], gamma, num_groups=groups)
        expected |= zip(("dx", "dgamma", "dbeta"), gradients, strict=True)

        samples = x.shape[0]
        grouped = (samples, groups, -1)
        rstd = expected["rstd"][:, :, None]
        largest = np.abs(x.reshape(grouped)).max(axis=-1, keepdims=True)
        xhat = np.abs(reference.group_norm(x, groups)[0])
        scale, shift = np.abs(gamma)[:, None, None], np.abs(beta)[:, None, None]
        dxhat = (scale * np.abs(upstream)).reshape(grouped)
        flat = xhat.reshape(grouped)
        terms = {
            "y": scale * (xhat + np.broadcast_to(largest * rstd, flat.shape).reshape(x.shape)) + shift,
            "mean": largest[:, :, 0],
            "rstd": expected["rstd"],
            "dx": rstd * (dxhat + dxhat.mean(-1, keepdims=True) + flat * (dxhat * flat).mean(-1, keepdims=True)),
            "dgamma": (np.abs(upstream) * xhat).sum(axis=(0, 2, 3)),
            "dbeta": np.abs(upstream).sum(axis=(0, 2, 3)),
        }
        limits = np.finfo(x.dtype)
        for name, truth in expected.items():
            error = np.abs(ours[name].astype(np.float64).reshape(truth.shape) - truth)
            bound = 16 * float(limits.eps) * terms[name].reshape(truth.shape) + 1e4 * float(limits.tiny)
            ratio = error / bound
            at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)  # argmax finds a NaN first
            if not ratio[at] <= 1:
                raise GradientMismatch(layer.name, name, float(error[at]), float(bound[at]))
            self.worst = max(self.worst, float(ratio[at]))
            self.checks += 1


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array of the same values."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


@dataclass
class Result:
    """What a training run leaves behind."""

    norms: CheckedNorms
    losses: list[float] = field(default_factory=list)  # per step
    accuracies: list[float] = field(default_factory=list)  # on the test images, per epoch
    seconds: float = 0.0


def split_digits() -> tuple[Any, Any, Any, Any]:
    """Training images and labels, test images and labels; always the same split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.images[order][:, None] / 16.0, digits.target[order]
    train, test = images[:TRAINING_IMAGES], images[TRAINING_IMAGES:]
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, labels[:TRAINING_IMAGES], (test - mean) / deviation, labels[TRAINING_IMAGES:]


def run(
    group_norm: NormFunction,
    group_norm_backward: NormFunction,
    *,
    xp: Any = np,
    dtype: str = "float32",
    epochs: int = 6,
    seed: int = 0,
    images: int | None = None,
    check_every: int = CHECK_EVERY,
) -> Result:
    """Train on the digits with these two functions, on arrays of `xp`.

    Parameters
    ----------
    group_norm, group_norm_backward : callable
        ``cunorm.group_norm`` and ``cunorm.group_norm_backward``, or something to try in their place.
    xp : module
        ``numpy`` or ``cupy``.
    dtype : str
        Of images, activations, parameters.
    epochs, seed : int
        Passes over the training images; seed of the initial weights and of the order of the images.
    images : int, optional
        Use only so many of the training images and of the test images.
    check_every : int
        Steps between two comparisons with the oracle; the first step is always compared.

    Raises
    ------
    GradientMismatch
        If a GroupNorm layer's results disagree with the oracle.
    """
    train, labels, test, test_labels = (part[:images] for part in split_digits())
    on_device = [xp.asarray(train, dtype), xp.asarray(labels), xp.asarray(test, dtype), xp.asarray(test_labels)]
    norms = CheckedNorms(group_norm, group_norm_backward)
    network = Network(xp, norms, xp.dtype(dtype), seed)
    rng = np.random.default_rng(seed)
    result = Result(norms)
    steps = epochs * math.ceil(len(labels) / BATCH)
    start = time.perf_counter()
    with tqdm(total=steps, unit="step", disable=None) as bar:
        for epoch in range(1, epochs + 1):
            order = xp.asarray(rng.permutation(len(labels)))
            for first in range(0, len(labels), BATCH):
                rows = order[first : first + BATCH]
                step = len(result.losses)
                norms.checking = step % check_every == 0
                result.losses.append(network.loss_and_gradients(on_device[0][rows], on_device[1][rows]))
                rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
                for parameter in network.parameters:
                    parameter.step(xp, rate, step + 1)
                bar.update()
            result.accuracies.append(network.accuracy(*on_device[2:]))
            bar.set_description(f"epoch {epoch}/{epochs}, test accuracy {result.accuracies[-1]:.1%}")
    result.seconds = time.perf_counter() - start
    return result


def plot(result: Result, path: Path, executor: str) -> None:
    """Write the loss per step and the test accuracy per epoch as a PNG."""
    from matplotlib.figure import Figure

    losses, accuracies = np.array(result.losses), 100 * np.array(result.accuracies)
    per_epoch = len(losses) / len(accuracies)
    epochs = np.arange(1, len(losses) + 1) / per_epoch
    width = min(len(losses), max(1, round(per_epoch / 2)))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    figure.suptitle(f"Handwritten digits, GroupNorm by cunorm ({executor})")
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
    """The array module, and the name of the executor that its arrays run on; LookupError without the GPU asked for."""
    if wanted == "cpu":
        return np, "cpu executor: exact, not fast"
    try:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except Exception as problem:  # no CuPy, no driver, no device: each has its own exception
        if wanted == "gpu":
            raise LookupError(f"no GPU to use ({problem}); `cunorm doctor` says what is missing") from problem
        return find_device("cpu")
    return cupy, name


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 when the network reached the accuracy and every check passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if CuPy finds one"
    )
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training images")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the images")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of every array")
    parser.add_argument("--plot", type=Path, default=Path("digits_loss.png"), metavar="FILE.png", help="loss curve")
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error(f"--epochs: {options.epochs}, expected at least 1")
    if not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot: no folder {options.plot.absolute().parent}")
    try:
        xp, executor = find_device(options.device)
    except LookupError as problem:
        parser.error(f"--device: {problem}")
    functions = cunorm.group_norm, cunorm.group_norm_backward
    try:
        result = run(*functions, xp=xp, dtype=options.dtype, epochs=options.epochs, seed=options.seed)
    except GradientMismatch as mismatch:
        print(f"gradient check failed: {mismatch}", file=sys.stderr)
        return 1
    plot(result, options.plot, executor)
    norms, accuracy = result.norms, result.accuracies[-1]
    calls = norms.forward_calls + norms.backward_calls
    print(f"test accuracy    {accuracy:.2%} after {options.epochs} epochs (required: {REQUIRED_ACCURACY:.0%})")
    print(f"time             {result.seconds:.1f} s")
    print(f"cunorm launches  {calls} ({norms.forward_calls} group_norm, {norms.backward_calls} group_norm_backward)")
    print(f"executor         {executor}")
    print(f"gradient checks  {norms.checks} tensors agree with the oracle; worst error {norms.worst:.0%} of its bound")
    print(f"plot             {options.plot}")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
