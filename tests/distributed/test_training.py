"""The training example with several processes: the same losses and accuracy, its checks, and failing processes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.distributed.processes import OPEN_MPI, missing
from tests.distributed.threads import Threads
from tests.support.covering import every
from tests.support.paths import ROOT, environment

sys.path.insert(0, str(ROOT / "examples"))
checks = importlib.import_module("digits_checks")
parallel = importlib.import_module("digits_parallel")
train_digits = importlib.import_module("train_digits")

ENGINES = pytest.mark.parametrize("engine", ["gloo", "mpi"])
#: Seconds until a training run is killed.
LIMIT = 400


def accuracy_of(tmp_path: Path, *arguments: str) -> float:
    """Train with BatchNorm in a process of its own, and return the printed accuracy in percent."""
    command = [sys.executable, "examples/train_digits.py", "--norm", "batch", "--device", "cpu"]
    plot = tmp_path / "loss.png"
    done = subprocess.run(
        [*command, "--plot", str(plot), *arguments],
        **{"cwd": ROOT, "env": environment(**OPEN_MPI), "timeout": LIMIT, "check": False, "text": True},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    found = re.search(r"accuracy +([\d.]+)%", done.stdout)
    assert found is not None and plot.is_file(), done.stdout
    assert done.returncode == (float(found[1]) < 100 * train_digits.REQUIRED_ACCURACY), done.stdout
    assert re.search(r"gradient checks +\d+ tensors agree", done.stdout), done.stdout
    assert done.stdout.count("test accuracy  ") == 1, "one process prints"
    return float(found[1])


@functools.cache
def alone() -> float:
    """The accuracy of one process after one epoch. A test that is skipped must not train, so this is no fixture."""
    return 100 * float(train_digits.run("batch", epochs=1).accuracies[-1])


@ENGINES
@pytest.mark.long
def test_two_processes_reach_the_accuracy_of_one(engine: str, tmp_path: Path) -> None:
    if (reason := missing(engine)) is not None:
        pytest.skip(reason)
    found = accuracy_of(tmp_path, "--processes", "2", "--engine", engine, "--epochs", "1")
    assert found == pytest.approx(alone(), abs=100 / 360 + 0.01)  # of one image


@ENGINES
@pytest.mark.long
def test_the_full_training_reaches_97_percent(engine: str, tmp_path: Path) -> None:
    if (reason := missing(engine)) is not None:
        pytest.skip(reason)
    found = accuracy_of(tmp_path, "--processes", "2", "--engine", engine)
    assert found >= 97
    assert found == pytest.approx(accuracy_of(tmp_path), abs=0.3)


@pytest.mark.parametrize(("norm", "world"), every(3, [("batch", 2), ("batch", 3), ("layer", 2)]))
def test_the_losses_are_those_of_one_process(norm: str, world: int) -> None:
    """In float64 with 70 images: the second batch has 6, so some ranks have more than others."""
    options: dict[str, Any] = {"dtype": "float64", "epochs": 1, "images": 70, "check_every": 1}
    whole = train_digits.run(norm, **options)
    found: list[Any] = [None] * world

    def work(engine: Any, rank: int) -> None:
        group = parallel.Group(engine, rank)
        found[rank] = train_digits.run(norm, parallel.FUNCTIONS, group=group, **options)

    assert Threads(world).run(work) == [None] * world
    for result in found:
        np.testing.assert_allclose(result.losses, whole.losses, rtol=1e-9)
        assert result.accuracies == whole.accuracies
        assert result.library.checks > 0 and result.library.worst < 1
    assert all(result.losses == found[0].losses for result in found)


RESULTS = {"sync_batch_norm": ("y", "mean", "invstd"), "sync_batch_norm_backward": ("dx", "dgamma", "dbeta")}


@pytest.mark.parametrize(
    ("function", "tensor"),
    [
        *((function, tensor) for function, tensors in RESULTS.items() for tensor in tensors),
        *(("sync_batch_norm", tensor) for tensor in ("running_mean", "running_var")),
    ],
)
def test_a_wrong_tensor_is_a_mismatch(function: str, tensor: str) -> None:
    right = getattr(parallel.FUNCTIONS, function)

    def spoil(*arguments: Any, **options: Any) -> Any:
        results = right(*arguments, **options)
        every = (results[0], *results[1][:2], *arguments[3:5]) if function == "sync_batch_norm" else results
        names = (*RESULTS[function], "running_mean", "running_var")
        dict(zip(names, every, strict=False))[tensor][...] *= np.float32(1.001)
        return results

    library = checks.CheckedLibrary(SimpleNamespace(**{**vars(parallel.FUNCTIONS), function: spoil}))
    library.checking = True
    layer = parallel.SyncBatchNorm(parallel.Group(), np, library, np.dtype(np.float32), 1, (8, 3, 5))
    x, dy = np.random.default_rng(0).normal(size=(2, 4, 8, 3, 5)).astype(np.float32)
    layer.forward(x + 1)
    with pytest.raises(train_digits.GradientMismatch) as caught:
        layer.backward(dy)
    assert caught.value.tensor == tensor


def test_parts_are_gathered_in_order_of_ranks() -> None:
    def work(engine: Any, rank: int) -> None:
        group = parallel.Group(engine, rank)
        whole = np.arange(14.0).reshape(7, 2)
        sizes = [len(whole[one::3]) for one in range(3)]
        expected = np.concatenate([whole[one::3] for one in range(3)])
        assert np.array_equal(group.gathered(group.part(whole), sizes), expected)

    assert Threads(3).run(work) == [None] * 3


# ---- starting processes ---------------------------------------------------------------------------------------------


def test_a_process_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "GRACE", 0.2)
    codes = ["import time; time.sleep(60)", "import sys; sys.exit(3)"]
    started = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    began = time.monotonic()
    assert parallel._first_failure(started) == 3
    assert time.monotonic() - began < 30
    assert all(process.poll() is not None for process in started)


def test_no_failure_is_0() -> None:
    assert parallel._first_failure([subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]) == 0


@pytest.mark.parametrize(
    ("installed", "wanted", "found"),
    [
        ({"torch", "mpi4py"}, None, "gloo"),
        ({"mpi4py"}, None, "mpi"),
        ({"torch", "mpi4py"}, "mpi", "mpi"),
        ({"torch"}, "mpi", "pip install 'cunorm[mpi]'"),
        (set(), None, r"pip install 'cunorm[torch]' or 'cunorm[mpi]'"),
    ],
)
def test_the_engine_is_one_that_is_installed(
    installed: set[str], wanted: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    if found in parallel.ENGINES:
        assert parallel.usable_engine(wanted) == found
    else:
        with pytest.raises(LookupError, match=re.escape(found)):
            parallel.usable_engine(wanted)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "0"], "--processes: 0, expected at least 1"),
        (["--processes", "2", "--device", "gpu"], "--device: gpu, expected cpu with several --processes"),
        (["--engine", "smoke"], "argument --engine: invalid choice: 'smoke'"),
    ],
)
def test_bad_arguments_exit_with_code_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_digits.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_missing_mpiexec_exits_with_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        train_digits.main(["--processes", "2", "--engine", "mpi"])
    assert caught.value.code == 2
    assert "--engine: no mpiexec" in capsys.readouterr().err
