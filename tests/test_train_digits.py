"""The training example: its own mathematics, learning, its gradient check, and its command line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
network = importlib.import_module("digits_network")
train_digits = importlib.import_module("train_digits")

Functions = tuple[Callable[..., Any], Callable[..., Any]]


@pytest.fixture
def functions() -> Functions:
    return cunorm.group_norm, cunorm.group_norm_backward


class FewDigits:
    """`split_digits` with few images."""

    def __init__(self, images: int) -> None:
        self.parts = tuple(part[:images] for part in train_digits.split_digits())

    def __call__(self) -> Any:
        return self.parts


# The network's own mathematics, in float64 with the oracle as its GroupNorm.


def difference(function: Callable[[], float], array: Any, index: tuple[int, ...], step: float = 1e-6) -> float:
    """Central finite difference of `function` in one element of `array`."""
    kept = array[index]
    array[index] = kept + step
    above = function()
    array[index] = kept - step
    below = function()
    array[index] = kept
    return (above - below) / (2 * step)


def test_convolution_is_the_definition() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(27, 6))
    y = network.Conv3x3(np, weight).forward(x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    filters = weight.T.reshape(6, 3, 3, 3)
    for n, k, i, j in np.ndindex(y.shape):
        assert y[n, k, i, j] == pytest.approx((padded[n, :, i : i + 3, j : j + 3] * filters[k]).sum(), abs=1e-12)


@pytest.mark.parametrize("name", ["conv", "relu", "pool", "dense"])
def test_layers_against_finite_differences(name: str) -> None:
    rng = np.random.default_rng(1)
    layer = {
        "conv": lambda: network.Conv3x3(np, rng.normal(size=(27, 5))),
        "relu": network.Relu,
        "pool": network.MeanPool2x2,
        "dense": lambda: network.Dense(np, rng.normal(size=(72, 5))),
    }[name]()
    x = rng.normal(size=(2, 3, 4, 6))
    dy = rng.normal(size=layer.forward(x).shape)
    dx = layer.backward(dy)
    checked = [(x, dx)] + [(parameter.value, parameter.grad) for parameter in layer.parameters]
    for array, gradient in checked:
        assert gradient.shape == array.shape
        for index in np.ndindex(array.shape):
            expected = difference(lambda: float((dy * layer.forward(x)).sum()), array, index)
            assert gradient[index] == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_network_against_finite_differences() -> None:
    norms = train_digits.CheckedNorms(reference.group_norm, reference.group_norm_backward)
    model = network.Network(np, norms, np.dtype("float64"), seed=0)
    rng = np.random.default_rng(2)
    images, labels = rng.normal(size=(3, 1, 8, 8)), np.array([7, 0, 3])
    for parameter in model.parameters:  # away from ones and zeros, where mistakes hide
        parameter.value += 0.3 * rng.normal(size=parameter.value.shape)
    model.loss_and_gradients(images, labels)
    gradients = [parameter.grad for parameter in model.parameters]
    for parameter, gradient in zip(model.parameters, gradients, strict=True):
        for flat in rng.choice(gradient.size, size=6, replace=False):
            index = tuple(int(i) for i in np.unravel_index(flat, gradient.shape))
            expected = difference(lambda: model.loss_and_gradients(images, labels), parameter.value, index)
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8)


class WithoutBlas:
    """NumPy as CuPy is where cuBLAS is missing; it notes what is taken from it."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        if name == "matmul":
            return self.refuse
        return getattr(np, name)

    def refuse(self, *_: Any) -> Any:
        raise ImportError("libcublas.so.12: cannot open shared object file")


def test_runs_without_a_matrix_library() -> None:
    oracle = reference.group_norm, reference.group_norm_backward
    options = {"dtype": "float64", "epochs": 1, "images": 64}
    namespace = WithoutBlas()
    plain, spared = train_digits.run(*oracle, **options), train_digits.run(*oracle, xp=namespace, **options)
    np.testing.assert_allclose(plain.losses, spared.losses, rtol=1e-9)
    assert "matmul" in namespace.used
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: its functions cannot be looked up")
    missing = [name for name in sorted(namespace.used) if not hasattr(cupy, name)]
    assert missing == []


# Learning and the check, through cunorm.


def test_learns_and_agrees_with_the_oracle(functions: Functions) -> None:
    result = train_digits.run(*functions, epochs=3, images=256, check_every=5)
    losses = result.losses
    assert len(losses) == 3 * 4
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    assert result.accuracies[-1] > 0.6
    assert result.norms.checks == 6 * 3 * 3  # six tensors, three layers, steps 0, 5 and 10
    assert result.norms.worst < 1
    assert result.norms.backward_calls == 3 * 12
    assert result.norms.forward_calls == 3 * 12 + 3 * 3 * 4  # and four batches of test images after each epoch


def test_float64(functions: Functions) -> None:
    result = train_digits.run(*functions, dtype="float64", epochs=1, images=64)
    assert result.norms.checks == 6 * 3


def test_the_same_seed_gives_the_same_run(functions: Functions) -> None:
    first, again, other = (train_digits.run(*functions, epochs=1, images=128, seed=seed).losses for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 1.0001, np.nan])
@pytest.mark.parametrize("tensor", ["y", "mean", "rstd", "dx", "dgamma", "dbeta"])
def test_a_wrong_tensor_is_a_mismatch(functions: Functions, tensor: str, factor: float) -> None:
    """Among them: a zero dx, and a dgamma scaled by 0.5."""

    def spoil(names: tuple[str, ...], function: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*arguments: Any, **options: Any) -> Any:
            results = function(*arguments, **options)
            return tuple(r * r.dtype.type(factor) if n == tensor else r for n, r in zip(names, results, strict=True))

        return spoiled

    forward = spoil(("y", "mean", "rstd"), functions[0])
    backward = spoil(("dx", "dgamma", "dbeta"), functions[1])
    with pytest.raises(train_digits.GradientMismatch) as caught:
        train_digits.run(forward, backward, epochs=1, images=64)
    mismatch = caught.value
    assert mismatch.tensor == tensor
    if tensor.startswith("d"):
        assert mismatch.layer.startswith("GroupNorm 3")  # the first that the backward pass meets
    assert not mismatch.error <= mismatch.bound
    text = str(mismatch)
    assert all(part in text for part in (mismatch.layer, tensor, f"{mismatch.error:.3g}", f"{mismatch.bound:.3g}"))


def test_a_mistake_in_one_layer_names_that_layer(functions: Functions) -> None:
    def backward(dy: Any, *arguments: Any, **options: Any) -> Any:
        dx, dgamma, dbeta = functions[1](dy, *arguments, **options)
        return (dx, dgamma * dgamma.dtype.type(0.5), dbeta) if dy.shape[1] == 16 else (dx, dgamma, dbeta)

    with pytest.raises(train_digits.GradientMismatch, match=r"^GroupNorm 1 .*: dgamma is off by"):
        train_digits.run(functions[0], backward, epochs=1, images=64)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    cupy, _ = train_digits.find_device("gpu")
    result = train_digits.run(cunorm.group_norm, cunorm.group_norm_backward, xp=cupy, epochs=3, images=256)
    assert np.mean(result.losses[-4:]) < 0.5 * np.mean(result.losses[:4])


# The command line.


def test_command_line(
    functions: Functions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {"group_norm": 0, "group_norm_backward": 0}

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for function, name in zip(functions, calls, strict=True):
        monkeypatch.setattr(cunorm, name, counted(function, name))
    monkeypatch.setattr(train_digits, "split_digits", FewDigits(128))
    plot = tmp_path / "loss.png"
    arguments = ["--device", "cpu", "--epochs", "2", "--plot", str(plot)]
    assert train_digits.main(arguments) == 1  # four steps do not reach 95 %
    printed = capsys.readouterr().out
    assert calls == {"group_norm": 3 * (4 + 4), "group_norm_backward": 3 * 4}
    assert re.search(r"cunorm launches +36 \(24 group_norm, 12 group_norm_backward\)", printed)
    assert "cpu executor: exact, not fast" in printed
    assert re.search(r"gradient checks +18 tensors agree", printed)
    assert re.search(r"test accuracy +\d+\.\d+%", printed)

    from matplotlib.image import imread

    picture = imread(plot)
    assert min(picture.shape[:2]) > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # not blank

    monkeypatch.setattr(train_digits, "REQUIRED_ACCURACY", 0.0)
    assert train_digits.main(arguments) == 0


def test_a_failed_check_is_a_failed_run(
    functions: Functions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def backward(*arguments: Any, **options: Any) -> Any:
        dx, dgamma, dbeta = functions[1](*arguments, **options)
        return dx * 0, dgamma, dbeta

    monkeypatch.setattr(cunorm, "group_norm_backward", backward)
    assert train_digits.main(["--device", "cpu", "--epochs", "1", "--plot", str(tmp_path / "loss.png")]) == 1
    assert re.search(r"gradient check failed: GroupNorm 3 .*: dx is off by", capsys.readouterr().err)
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--epochs", "0"], "--epochs: 0"),
        (["--plot", "no/such/folder/loss.png"], "--plot: no folder"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_digits.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it fails
    with pytest.raises(SystemExit) as caught:
        train_digits.main(["--device", "gpu"])
    assert caught.value.code == 2
    assert "--device: no GPU to use" in capsys.readouterr().err
    assert train_digits.find_device("auto")[0] is np


@pytest.mark.long
def test_full_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "loss.png"
    assert train_digits.main(["--device", "cpu", "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    accuracy, seconds = re.search(r"accuracy +([\d.]+)%", printed), re.search(r"time +([\d.]+) s", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 97
    assert seconds is not None
    assert float(seconds[1]) < 120
    assert plot.is_file()
