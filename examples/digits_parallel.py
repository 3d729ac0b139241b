"""Data-parallel training of ``train_digits.py``: processes, the exchange between them, and BatchNorm over all of them.

Each process trains on its part of every batch. The gradients of all parameters are summed over the processes, so all of
them do the same step of Adam and keep the same parameters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import cunorm
from cunorm import reference
from cunorm.distributed import (
    Engine,
    LocalEngine,
    MpiEngine,
    TorchEngine,
    sync_batch_norm,
    sync_batch_norm_backward,
)

if __package__:
    from .digits_checks import CheckedLibrary, Numbers, Oracle
    from .digits_network import Array, Parameter
    from .digits_norms import EPSILON, MOMENTUM, BatchNorm
else:  # imported by a script in the same folder
    from digits_checks import CheckedLibrary, Numbers, Oracle
    from digits_network import Array, Parameter
    from digits_norms import EPSILON, MOMENTUM, BatchNorm

#: For each engine, the module that it needs and the extra of cunorm that installs it.
ENGINES = {"gloo": ("torch", "torch"), "mpi": ("mpi4py", "mpi")}
#: Seconds that the other processes have to end after one has failed.
GRACE = 10

#: The functions of the norms with several processes: those of cunorm, and those over all processes.
FUNCTIONS = SimpleNamespace(
    **{name: getattr(cunorm, name) for name in cunorm.__all__},
    sync_batch_norm=sync_batch_norm,
    sync_batch_norm_backward=sync_batch_norm_backward,
)


class Group:
    """The processes of a training run, and this process's rank among them."""

    def __init__(self, engine: Engine | None = None, rank: int = 0) -> None:
        self.engine, self.rank = engine or LocalEngine(), rank
        self.size = self.engine.size

    def part(self, rows: Array) -> Array:
        """Return this process's part of an array: every `size`-th row."""
        return rows[self.rank :: self.size]

    def total(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all processes."""
        sums = np.array(numbers, np.float64)
        self.engine.all_reduce(sums)
        return [float(one) for one in sums]

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Replace the gradients by their sums over all processes, with one exchange."""
        if self.size == 1:
            return
        packed = np.concatenate([parameter.grad.ravel() for parameter in parameters])
        self.engine.all_reduce(packed)
        ends = np.cumsum([parameter.grad.size for parameter in parameters])[:-1]
        for parameter, summed in zip(parameters, np.split(packed, ends), strict=True):
            parameter.grad = summed.reshape(parameter.grad.shape)

    def gathered(self, part: Array, sizes: Sequence[int]) -> Array:
        """Return the parts of all processes, one after the other. `sizes` are their lengths."""
        send = np.zeros((max(sizes), *part.shape[1:]), part.dtype)
        send[: len(part)] = part
        receive = np.empty((self.size, *send.shape), part.dtype)
        self.engine.all_gather(send, receive)
        return np.concatenate([one[:size] for one, size in zip(receive, sizes, strict=True)])


class SyncBatchNorm(BatchNorm):
    """`BatchNorm` with the statistics of the whole batch. The oracle computes its results from the whole batch."""

    def __init__(self, group: Group, xp: Any, library: CheckedLibrary, dtype: Any, *where: Any) -> None:
        super().__init__(xp, library, dtype, *where)
        self.group = group

    def forward(self, x: Array) -> Array:
        self.x, self.before = x, (self.running_mean.copy(), self.running_var.copy())
        self.y, self.saved = self.library.sync_batch_norm(
            x,
            self.gamma.value,
            self.beta.value,
            self.running_mean,
            self.running_var,
            engine=self.group.engine,
            eps=EPSILON,
            momentum=MOMENTUM,
        )
        return self.y

    def backward(self, dy: Array) -> Array:
        dy = self.xp.ascontiguousarray(dy)
        dx, self.gamma.grad, self.beta.grad = self.library.sync_batch_norm_backward(
            dy, self.x, self.saved, self.gamma.value, engine=self.group.engine
        )
        if self.library.checking:  # on all processes at the same steps
            mean, invstd, counts = self.saved
            sizes = [int(count) // (self.sample[1] * self.sample[2]) for count in counts]
            self.check(
                **{"dy": dy, "y": self.y, "dx": dx, "dgamma": self.gamma.grad, "dbeta": self.beta.grad},
                **{"batch_x": self.group.gathered(self.x, sizes), "batch_dy": self.group.gathered(dy, sizes)},
                **{"mean": mean, "invstd": invstd, "before_mean": self.before[0], "before_var": self.before[1]},
                **{"running_mean": self.running_mean, "running_var": self.running_var},
            )
        return dx

    def oracle(self, t: dict[str, Numbers]) -> Oracle:
        """Compute the statistics and sums from the whole batch, and the rest with cunorm's rounded statistics."""
        whole, whole_dy, given = t["batch_x"], t["batch_dy"], (t["mean"], t["invstd"], t["gamma"])
        count, column = whole.size // whole.shape[1], (-1, 1, 1)
        mean, invstd = reference.batch_norm_stats(whole, eps=EPSILON)
        before = {"running_mean": t["before_mean"], "running_var": t["before_var"]}
        _, _, running_mean, running_var = reference.batch_norm_gather_stats(
            mean[None], invstd[None], [count], eps=EPSILON, momentum=MOMENTUM, **before
        )
        sum_dy, sum_dy_xmu, _, _ = reference.batch_norm_backward_reduce(whole_dy, whole, *given)
        _, _, dgamma, dbeta = reference.batch_norm_backward_reduce(t["dy"], t["x"], *given)
        dx = reference.batch_norm_backward_elemt(t["dy"], t["x"], *given, sum_dy, sum_dy_xmu, count)
        # The magnitudes of the terms.
        scale, shift, inverse = (np.abs(t[name]).reshape(column) for name in ("gamma", "beta", "invstd"))
        centre, largest = t["mean"].astype(np.float64).reshape(column), np.abs(whole).max(axis=(0, 2, 3))
        upstream, xmu = np.abs(t["dy"]), np.abs(t["x"] - centre)
        every, every_xmu = np.abs(whole_dy), np.abs(whole - centre)
        a, b = ((every * each).sum(axis=(0, 2, 3)).reshape(column) / count for each in (1.0, every_xmu))
        size_dy, size_dy_xmu = ((upstream * each).sum(axis=(0, 2, 3)) for each in (1.0, xmu))
        return {
            "mean": (mean, largest),
            "invstd": (invstd, invstd),
            "running_mean": (running_mean, (1 - MOMENTUM) * np.abs(t["before_mean"]) + MOMENTUM * largest),
            "running_var": (running_var, running_var),
            "y": (reference.batch_norm_elemt(t["x"], *given, t["beta"]), scale * xmu * inverse + shift),
            "dgamma": (dgamma, size_dy_xmu * np.abs(t["invstd"])),
            "dbeta": (dbeta, size_dy),
            "dx": (dx, inverse * scale * (upstream + a + xmu * inverse**2 * b)),
        }


def usable_engine(wanted: str | None) -> str:
    """Return the wanted engine, or one that is installed; raise LookupError if its module is missing."""
    for name in (wanted,) if wanted else ENGINES:
        if importlib.util.find_spec(ENGINES[name][0]) is not None:
            return name
    extras = " or ".join(f"'cunorm[{ENGINES[name][1]}]'" for name in ((wanted,) if wanted else ENGINES))
    raise LookupError(f"no engine to use; type: pip install {extras}")


@contextlib.contextmanager
def joined(engine: str, meeting: str, rank: int, processes: int) -> Iterator[Group]:
    """Join the other processes, which `start` has started too."""
    if engine == "mpi":
        from mpi4py import MPI

        yield Group(MpiEngine(), int(MPI.COMM_WORLD.Get_rank()))
        return
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    yield Group(TorchEngine(), rank)
    torch.distributed.destroy_process_group()


def start(engine: str, processes: int, arguments: Sequence[str]) -> int:
    """Run the example in several processes; return 0 if all of them return 0, else the first other exit code."""
    program = [str(Path(__file__).with_name("train_digits.py")), *arguments, "--engine", engine, "--meet"]
    if engine == "mpi":
        beside = Path(sys.executable).with_name("mpiexec")
        launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
        if launcher is None:
            raise LookupError("no mpiexec; install an MPI, such as the wheel mpich, or use --engine gloo")
        # With -m mpi4py, an exception in one process ends all of them.
        command = [launcher, "-n", str(processes), sys.executable, "-m", "mpi4py", *program, "mpi"]
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        started = [
            subprocess.Popen([sys.executable, *program, meeting, "--rank", str(rank)], env=environment)
            for rank in range(processes)
        ]
        return _first_failure(started)


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for processes; return 0, or the exit code of one that failed, after the others have ended."""
    try:
        while any(process.poll() is None for process in started):
            failed = [process.returncode for process in started if process.poll()]
            if failed:
                until = time.monotonic() + GRACE
                while any(process.poll() is None for process in started) and time.monotonic() < until:
                    time.sleep(0.05)
                return int(failed[0])
            time.sleep(0.05)
        return next((process.returncode for process in started if process.returncode), 0)
    finally:
        for process in started:
            process.kill()
            process.wait()
