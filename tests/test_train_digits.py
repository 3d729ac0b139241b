"""The training example: its own mathematics, its norms, training, the checks of gradients, and its command line."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.cli import main as cli
from tests.support.covering import every

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
network = importlib.import_module("digits_network")
norms = importlib.import_module("digits_norms")
checks = importlib.import_module("digits_checks")
train_digits = importlib.import_module("train_digits")

EACH = pytest.mark.parametrize("norm", ["group", "instance", "layer", "rms", "batch"])
#: One norm by default; the other norms are long tests.
ONE = pytest.mark.parametrize(
    "norm", ["batch", *(pytest.param(norm, marks=pytest.mark.long) for norm in ("group", "instance", "layer", "rms"))]
)
SAMPLE = ("y", "mean", "rstd"), ("dx", "dgamma", "dbeta")
#: For each norm, its functions and their results. batch_norm_gather_stats updates the running statistics in place.
RESULTS: dict[str, dict[str, tuple[str, ...]]] = {
    "group": dict(zip(("group_norm", "group_norm_backward"), SAMPLE, strict=True)),
    "instance": dict(zip(("instance_norm", "instance_norm_backward"), SAMPLE, strict=True)),
    "layer": dict(zip(("layer_norm", "layer_norm_backward"), SAMPLE, strict=True)),
    "rms": {"rms_norm": ("y", "rstd"), "rms_norm_backward": ("dx", "dgamma")},
    "batch": {
        "batch_norm_stats": ("local_mean", "local_invstd"),
        "batch_norm_gather_stats": ("mean", "invstd", "running_mean", "running_var"),
        "batch_norm_elemt": ("y",),
        "batch_norm_backward_reduce": ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta"),
        "batch_norm_backward_elemt": ("dx",),
    },
}
#: Largest share of the loss that is left after 12 steps, if not 0.5. A network without mean and beta starts slower.
LEFT = {"rms": 0.65}
#: (norm, tensor, factor by which the tensor is multiplied): a small error, a zero result, and for one norm others.
SPOILED = [
    (norm, tensor, factor)
    for norm, functions in RESULTS.items()
    for names in functions.values()
    for tensor in names
    for factor in (1.0001, 0.0, *([0.5, -1.0, np.nan] if norm == "group" else []))
]


def gather_in_place(*arguments: Any, running_mean: Any, running_var: Any, **options: Any) -> Any:
    """The oracle's function, changed to update the running statistics in place, as cunorm's function does."""
    *merged, running_mean[:], running_var[:] = reference.batch_norm_gather_stats(
        *arguments, running_mean=running_mean, running_var=running_var, **options
    )
    return tuple(merged)


ORACLE = SimpleNamespace(**{**vars(reference), "batch_norm_gather_stats": gather_in_place})


def tensors(norm: str) -> int:
    """The number of tensors that a check of one layer compares."""
    return sum(len(names) for names in RESULTS[norm].values())


def with_function(name: str, function: Callable[..., Any]) -> Any:
    """cunorm with one function replaced."""
    return SimpleNamespace(**{**vars(cunorm), name: function})


def layer_of(norm: str, functions: Any = cunorm, dtype: str = "float64", sample: Any = (8, 3, 5)) -> Any:
    """A norm whose gamma and beta are not the initial ones and zeros."""
    layer = norms.NORMS[norm](np, checks.CheckedLibrary(functions), np.dtype(dtype), 1, sample)
    for parameter in layer.parameters:
        parameter.value += 0.3 * np.random.default_rng(9).normal(size=parameter.value.shape)
    return layer


class FewDigits:
    """`split_digits` with at most that many images and labels per part."""

    def __init__(self, images: int) -> None:
        self.parts = tuple(part[:images] for part in train_digits.split_digits())

    def __call__(self) -> Any:
        return self.parts


# The network's own mathematics, in float64, with the oracle's functions for its norms.


def difference(function: Callable[[], float], array: Any, index: tuple[int, ...], step: float = 1e-6) -> float:
    """Central finite difference of `function` in one element of `array`."""
    kept = array[index]
    array[index] = kept + step
    above = function()
    array[index] = kept - step
    below = function()
    array[index] = kept
    return (above - below) / (2 * step)


def test_the_convolution_agrees_with_the_definition() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(27, 6))
    y = network.Conv3x3(np, weight).forward(x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    filters = weight.T.reshape(6, 3, 3, 3)
    for n, k, i, j in np.ndindex(y.shape):
        assert y[n, k, i, j] == pytest.approx((padded[n, :, i : i + 3, j : j + 3] * filters[k]).sum(), abs=1e-12)


@pytest.mark.parametrize("name", ["conv", "relu", "pool", "dense", *RESULTS])
def test_layers_agree_with_finite_differences(name: str) -> None:
    rng = np.random.default_rng(1)
    layer = {
        **{norm: lambda: layer_of(name, ORACLE, sample=(4, 4, 6)) for norm in RESULTS},
        "conv": lambda: network.Conv3x3(np, rng.normal(size=(36, 5))),
        "relu": network.Relu,
        "pool": network.MeanPool2x2,
        "dense": lambda: network.Dense(np, rng.normal(size=(96, 5))),
    }[name]()
    x = rng.normal(size=(2, 4, 4, 6))
    dy = rng.normal(size=layer.forward(x).shape)
    dx = layer.backward(dy)
    checked = [(x, dx)] + [(parameter.value, parameter.grad) for parameter in layer.parameters]
    for array, gradient in checked:
        assert gradient.shape == array.shape
        for index in np.ndindex(array.shape):
            expected = difference(lambda: float((dy * layer.forward(x)).sum()), array, index)
            assert gradient[index] == pytest.approx(expected, rel=1e-6, abs=1e-7)


@EACH
def test_the_network_agrees_with_finite_differences(norm: str) -> None:
    model = network.Network(np, lambda _, sample: layer_of(norm, ORACLE, sample=sample), np.dtype("float64"), seed=0)
    rng = np.random.default_rng(2)
    images, labels = rng.normal(size=(3, 1, 8, 8)), np.array([7, 0, 3])
    for parameter in model.parameters:  # ones and zeros would hide mistakes
        parameter.value += 0.3 * rng.normal(size=parameter.value.shape)
    model.loss_and_gradients(images, labels)
    gradients = [parameter.grad for parameter in model.parameters]
    for parameter, gradient in zip(model.parameters, gradients, strict=True):
        for flat in rng.choice(gradient.size, size=6, replace=False):
            index = tuple(int(i) for i in np.unravel_index(flat, gradient.shape))
            expected = difference(lambda: model.loss_and_gradients(images, labels), parameter.value, index)
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8)


class WithoutBlas:
    """NumPy whose matmul fails, as CuPy's does without cuBLAS. It records the names of used functions."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        if name == "matmul":
            return self.refuse
        return getattr(np, name)

    def refuse(self, *_: Any) -> Any:
        raise ImportError("libcublas.so.12: cannot open shared object file")


@EACH
def test_training_runs_without_a_matrix_library(norm: str) -> None:
    options = {"functions": ORACLE, "dtype": "float64", "epochs": 1, "images": 64}
    namespace = WithoutBlas()
    plain, spared = train_digits.run(norm, **options), train_digits.run(norm, xp=namespace, **options)
    np.testing.assert_allclose(plain.losses, spared.losses, rtol=1e-9)
    assert "matmul" in namespace.used
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: its functions cannot be looked up")
    missing = [name for name in sorted(namespace.used) if not hasattr(cupy, name)]
    assert missing == []


# Training with cunorm, and the checks of its results.


@pytest.mark.parametrize("norm", every(5, ["group", "instance", "rms", "batch", "layer"]))
def test_training_learns_and_agrees_with_the_oracle(norm: str) -> None:
    result = train_digits.run(norm, epochs=3, images=256, check_every=5)
    losses = result.losses
    assert len(losses) == 3 * 4
    assert np.mean(losses[-4:]) < LEFT.get(norm, 0.5) * np.mean(losses[:4])
    assert result.accuracies[-1] > 0.6
    assert result.library.checks == tensors(norm) * 3 * 3  # three layers; steps 0, 5 and 10
    assert 0 < result.library.worst < 1
    evaluates = {"batch": "batch_norm_elemt"}.get(norm, f"{norm}_norm")
    # The network has 3 norms. There are 12 steps, and 4 batches of test images after each of 3 epochs.
    assert result.library.calls == {name: 3 * 12 + 3 * 3 * 4 * (name == evaluates) for name in RESULTS[norm]}


@ONE
def test_training_in_float64_agrees_with_the_oracle(norm: str) -> None:
    result = train_digits.run(norm, dtype="float64", epochs=1, images=64)
    assert result.library.checks == tensors(norm) * 3
    assert result.library.worst < 1  # a fraction of a bound that is in units of float64 rounding


@ONE
def test_the_same_seed_gives_the_same_run(norm: str) -> None:
    first, again, other = (train_digits.run(norm, epochs=1, images=128, seed=seed).losses for seed in (3, 3, 4))
    assert first == again
    assert first != other


def spoiled(norm: str, tensor: str, factor: float, where: Callable[[Any], bool] = lambda x: True) -> Any:
    """cunorm, with `tensor` multiplied by `factor` in calls whose first argument satisfies `where`."""
    function = next(function for function, names in RESULTS[norm].items() if tensor in names)
    right = getattr(cunorm, function)

    def spoil(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        every = results if isinstance(results, tuple) else (results,)
        running = (options[name] for name in ("running_mean", "running_var") if name in options)
        named = dict(zip(RESULTS[norm][function], (*every, *running), strict=True))
        if where(arguments[0]):
            named[tensor] *= named[tensor].dtype.type(factor)
        return results

    return with_function(function, spoil)


@pytest.mark.parametrize(("norm", "tensor", "factor"), every(6, SPOILED))
def test_a_wrong_tensor_is_a_mismatch(norm: str, tensor: str, factor: float) -> None:
    """The cases include a dx of zeros, and a dgamma that is scaled by 0.5."""
    with pytest.raises(train_digits.GradientMismatch) as caught:
        train_digits.run(norm, spoiled(norm, tensor, factor), epochs=1, images=64)
    mismatch = caught.value
    assert mismatch.tensor == tensor
    if tensor in ("dx", "dgamma", "dbeta"):
        assert mismatch.layer.startswith(f"{norms.NORMS[norm].title} 3")  # the first layer of the backward pass
    assert not mismatch.error <= mismatch.bound
    text = str(mismatch)
    assert all(part in text for part in (mismatch.layer, tensor, f"{mismatch.error:.3g}", f"{mismatch.bound:.3g}"))


@ONE
def test_a_mistake_in_one_layer_names_that_layer(norm: str) -> None:
    functions = spoiled(norm, "dgamma", 0.5, lambda dy: dy.shape[1] == 16)
    with pytest.raises(train_digits.GradientMismatch, match=r"^\w+Norm 1 \(16 channels, 8x8\): dgamma is off by"):
        train_digits.run(norm, functions, epochs=1, images=64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_running_statistics_agree_with_the_oracle(dtype: str) -> None:
    """The expected values are computed in float64 from the inputs alone, not from results of the layer."""
    layer, rng = layer_of("batch", dtype=dtype), np.random.default_rng(3)
    mean, var = np.zeros(8), np.ones(8)
    for size in (6, 4, 1, 9):
        x = (rng.normal(size=(size, 8, 3, 5)) * rng.uniform(0.5, 3, size=(8, 1, 1)) + 2).astype(dtype)
        layer.forward(x)
        local_mean, local_invstd = (statistic[None] for statistic in reference.batch_norm_stats(x))
        ORACLE.batch_norm_gather_stats(local_mean, local_invstd, [size * 15], running_mean=mean, running_var=var)
    rtol = 1e-12 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(layer.running_mean, mean, rtol)
    np.testing.assert_allclose(layer.running_var, var, rtol)
    assert layer.running_mean.dtype == layer.running_var.dtype == dtype


def test_evaluation_uses_the_running_statistics() -> None:
    layer, rng = layer_of("batch"), np.random.default_rng(4)
    layer.forward(rng.normal(size=(6, 8, 3, 5)) * 2 + 1)
    kept = layer.running_mean.copy(), layer.running_var.copy()
    x = rng.normal(size=(4, 8, 3, 5)) * 3 - 2
    y = layer.evaluate(x)
    gamma, beta = (parameter.value for parameter in layer.parameters)
    expected = reference.batch_norm_elemt(x, kept[0], (kept[1] + 1e-5) ** -0.5, gamma, beta)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(kept, (layer.running_mean, layer.running_var))  # an evaluation does not change them
    np.testing.assert_array_equal(layer.evaluate(x[2:3]), y[2:3])  # a sample does not depend on the others


@EACH
def test_the_accuracy_is_that_of_an_evaluation(norm: str) -> None:
    model = network.Network(np, lambda _, sample: layer_of(norm, ORACLE, sample=sample), np.dtype("float64"), seed=0)
    images = np.random.default_rng(5).normal(size=(12, 1, 8, 8))
    model.loss_and_gradients(images, np.arange(12) % 10)
    alone = np.concatenate([model.scores(image[None]) for image in images])
    np.testing.assert_allclose(model.scores(images), alone, rtol=1e-9, atol=1e-9)
    labels = alone.argmax(axis=1)
    assert model.accuracy(images, labels, batch=5) == 1.0
    assert model.accuracy(images, np.where(np.arange(12) < 3, 9 - labels, labels)) == 0.75


@EACH
@pytest.mark.gpu
def test_training_on_a_gpu_learns(norm: str) -> None:
    cupy, _ = train_digits.find_device("gpu")
    result = train_digits.run(norm, xp=cupy, epochs=3, images=256)
    assert np.mean(result.losses[-4:]) < LEFT.get(norm, 0.5) * np.mean(result.losses[:4])


# The command line.


@ONE
def test_command_line(
    norm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = dict.fromkeys(RESULTS[norm], 0)

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in calls:
        monkeypatch.setattr(cunorm, name, counted(getattr(cunorm, name), name))
    monkeypatch.setattr(train_digits, "split_digits", FewDigits(128))
    plot = tmp_path / "loss.png"
    arguments = ["--device", "cpu", "--norm", norm, "--epochs", "2", "--plot", str(plot)]
    assert train_digits.main(arguments) == 1  # four steps do not reach 95 %
    printed = capsys.readouterr().out
    evaluates = {"batch": "batch_norm_elemt"}.get(norm, f"{norm}_norm")
    assert calls == {name: 3 * 4 + 3 * 4 * (name == evaluates) for name in calls}
    said = ", ".join(f"{count} {name}" for name, count in calls.items())
    assert f"cunorm launches {sum(calls.values())} ({said})" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100
    assert "cpu executor: exact, not fast" in printed
    assert re.search(rf"gradient checks +{3 * tensors(norm)} tensors agree", printed)
    assert re.search(r"test accuracy +\d+\.\d+%", printed)

    from matplotlib.image import imread

    picture = imread(plot)
    assert min(picture.shape[:2]) > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # not blank

    monkeypatch.setattr(train_digits, "REQUIRED_ACCURACY", 0.0)
    assert train_digits.main(arguments) == 0


def test_a_plot_that_cannot_be_written_does_not_hide_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_digits, "split_digits", FewDigits(16))
    monkeypatch.setattr(train_digits, "plot", full)
    assert train_digits.main(["--device", "cpu", "--epochs", "1", "--plot", str(tmp_path / "loss.png")]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("test accuracy ") and "\nplot " not in said.out
    assert said.err == f"--plot: {tmp_path / 'loss.png'}: No space left on device\n"


def test_the_path_of_a_plot_without_a_suffix_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_digits, "split_digits", FewDigits(16))
    train_digits.main(["--device", "cpu", "--epochs", "1", "--plot", str(tmp_path / "loss")])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["plot", str(tmp_path / "loss.png")]
    assert (tmp_path / "loss.png").is_file()


def test_a_failed_check_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cunorm, "group_norm_backward", spoiled("group", "dx", 0).group_norm_backward)
    assert train_digits.main(["--device", "cpu", "--epochs", "1", "--plot", str(tmp_path / "loss.png")]) == 1
    assert re.search(r"gradient check failed: GroupNorm 3 .*: dx is off by", capsys.readouterr().err)
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "0"], "--epochs: 0"),
        (["--seed", "-1"], "--seed: -1, expected at least 0, and less than 2^32"),
        (["--plot", "no/such/folder/loss.png"], "--plot: 'no/such/folder/loss.png', expected a file in an existing"),
        (["--plot", "x.txt"], "--plot: 'x.txt', expected a name that ends in .png, .svg, .pdf"),
        (["--plot", "/proc/x.png"], "--plot: cannot write in /proc: "),
        (["--plot", "/tmp"], "--plot: '/tmp', expected a file in an existing folder"),
        (["--plot", ""], "--plot: '', expected a file in an existing folder"),
        (["--dtype", "int8"], "--dtype"),
        (["--norm", "weight"], "argument --norm: invalid choice: 'weight'"),
    ],
)
def test_bad_command_line_arguments_exit_with_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_digits.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_missing_gpu_exits_with_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes its import fail
    with pytest.raises(SystemExit) as caught:
        train_digits.main(["--device", "gpu"])
    assert caught.value.code == 2
    assert "--device: no GPU to use" in capsys.readouterr().err
    assert train_digits.find_device("auto")[0] is np


def test_demo_passes_its_norm_to_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, seen = importlib.import_module("cunorm.examples.train_digits"), []
    monkeypatch.setattr(example, "plot", lambda result, path, executor: seen.append((result.norm, path)))
    monkeypatch.setattr(example, "split_digits", FewDigits(16))
    for norm in (*RESULTS, None):
        given = [] if norm is None else ["--norm", norm]
        path = tmp_path / f"{norm}.png"
        cli.main(["demo", *given, "--device", "cpu", "--epochs", "1", "--plot", str(path)])
    titles = {norm: f"{norm.title()}Norm" for norm in RESULTS} | {"rms": "RMSNorm", None: "GroupNorm"}
    assert seen == [(title, tmp_path / f"{norm}.png") for norm, title in titles.items()]


@EACH
@pytest.mark.long
def test_the_full_training_reaches_97_percent(norm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "loss.png"
    began = time.process_time()  # CPU time of all cores, because wall-clock time depends on other processes
    assert train_digits.main(["--device", "cpu", "--norm", norm, "--plot", str(plot)]) == 0
    assert time.process_time() - began < 120
    accuracy = re.search(r"accuracy +([\d.]+)%", capsys.readouterr().out)
    assert accuracy is not None
    assert float(accuracy[1]) >= 97
    assert plot.is_file()
