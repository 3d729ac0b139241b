"""Start the ranks of a test as processes: with sockets of this machine for gloo, with mpiexec for MPI."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT, environment

#: Seconds until the processes of a test are killed.
LIMIT = 300
#: Open MPI runs as root, as in a container, and starts more ranks than there are cores. Other MPIs ignore this.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # version 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # version 5
}


@dataclass
class Ended:
    """The end of a process: its exit code and everything that it printed."""

    code: int
    printed: str


@functools.cache
def mpiexec() -> str | None:
    """The command that starts MPI processes: of this Python's environment, or of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def missing(library: str) -> str | None:
    """Why processes cannot use a library, or None."""
    if library == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed: pip install 'cunorm[mpi]'"
        return None if mpiexec() else "there is no mpiexec: install an MPI, such as the wheel mpich"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install 'cunorm[torch]'"
    return None


def gloo(command: list[str], world: int, limit: float = LIMIT) -> list[Ended]:
    """Run a command as ranks of gloo. Each finds RANK, WORLD_SIZE and PORT in its environment.

    Rank 0 inherits the listening socket LISTEN_FD of that port, so that no other program can take the port.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        port, fd = listener.getsockname()[1], listener.fileno()
        started = []
        for rank in range(world):
            places = {"RANK": rank, "WORLD_SIZE": world, "PORT": port, "LISTEN_FD": fd}
            env = environment(**{name: str(value) for name, value in places.items()}, OMP_NUM_THREADS="1")
            passed = [fd] if rank == 0 else []
            started.append(
                subprocess.Popen(
                    command,
                    env=env,
                    cwd=ROOT,
                    pass_fds=passed,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
    return _ended(started, limit)


def mpi(command: list[str], world: int, limit: float = LIMIT) -> list[Ended]:
    """Run a command under mpiexec. The result is the end of mpiexec, with what it and the ranks print.

    Each rank prints to a file: mpiexec loses lines of ranks that end after another rank's abort, sometimes all of them.
    """
    launcher = mpiexec()
    assert launcher is not None
    with tempfile.TemporaryDirectory() as folder:
        to_file = ["sh", "-c", 'exec "$@" >"$PRINTED/$$" 2>&1', "sh"]
        started = subprocess.Popen(
            [launcher, "-n", str(world), *to_file, *command],
            env=environment(OMP_NUM_THREADS="1", PRINTED=folder, **OPEN_MPI),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return _ended([started], limit, Path(folder))


def _ended(started: list[subprocess.Popen[str]], limit: float, folder: Path | None = None) -> list[Ended]:
    """Wait for processes; fail the test and kill them all if one is not done in time.

    The files of a folder, if there is one, are read at the end of each process, as printed by it.
    """
    until, late = time.monotonic() + limit, []
    found = []
    for rank, process in enumerate(started):
        try:
            printed, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.kill()
            printed, _ = process.communicate()
        files = [path.read_text() for path in sorted(folder.iterdir())] if folder else []
        found.append(Ended(process.returncode, "".join([*files, printed])))
    if late:
        text = "\n".join(f"-- {rank}: code {one.code}\n{one.printed}" for rank, one in enumerate(found))
        pytest.fail(f"processes {late} are not done after {limit} s:\n{text}")
    return found


def ranks(library: str, world: int, *arguments: str, module: str = "tests.distributed.rank") -> list[Ended]:
    """Run ``python -m module library arguments`` in as many processes; skip the test if the library is missing.

    A warning of cunorm's or of the tests is an error, as in the tests of this process.
    """
    if (reason := missing(library)) is not None:
        pytest.skip(reason)
    python, program = [sys.executable, "-u", "-W", "error"], ["-m", module, library, *arguments]
    if library == "mpi":
        return mpi([*python, "-m", "mpi4py", *program], world)
    return gloo([*python, *program], world)
