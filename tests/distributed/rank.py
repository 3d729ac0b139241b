"""One rank of a test with several processes: ``python -m tests.distributed.rank gloo|mpi CASE``.

`processes.py` starts it. A rank prints its findings, and ends with code 0 if they are right.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cunorm.distributed import Engine, MpiEngine, TorchEngine, sync_batch_norm, sync_batch_norm_backward
from tests.distributed.batches import Batch, batches, check, computed

#: Seconds that gloo waits for another rank, which may compile kernels.
PATIENCE = 120


def joined(library: str) -> tuple[Engine, int]:
    """The engine of all ranks, and this process's rank."""
    if library == "mpi":
        from mpi4py import MPI

        return MpiEngine(), int(MPI.COMM_WORLD.Get_rank())
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = {"master_listen_fd": int(os.environ["LISTEN_FD"])} if rank == 0 else {}
    patience = datetime.timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), world, rank == 0, patience, **listening)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    return TorchEngine(), rank


class Dying:
    """An engine that kills its process before it exchanges."""

    def __init__(self, engine: Engine, function: str) -> None:
        self.engine, self.function, self.size = engine, function, engine.size

    def all_gather(self, send: Any, receive: Any) -> None:
        self._perhaps("all_gather")
        self.engine.all_gather(send, receive)

    def all_reduce(self, buffer: Any) -> None:
        self._perhaps("all_reduce")
        self.engine.all_reduce(buffer)

    def _perhaps(self, function: str) -> None:
        if function == self.function:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def equal(engine: Engine, rank: int) -> None:
    """The results of all batches are those of the whole batch on one process."""
    count = 0
    for batch in batches(engine.size):
        check(batch, rank, engine)
        count += 1
    print(f"rank {rank} of {engine.size}: {count} batches agree")


def same_parameters(engine: Engine, rank: int) -> None:
    """All ranks have the same bits of statistics and running statistics after several steps."""
    found, _ = computed(Batch((5, 3, 1)[: engine.size]), rank, engine)
    own = np.concatenate([found[name] for name in ("mean", "invstd", "running_mean", "running_var")])
    received = np.empty((engine.size, own.size // 2), np.int64)
    engine.all_gather(own.view(np.int64), received)
    assert (received == received[0]).all(), received
    print(f"rank {rank}: the same bits")


def dies(function: str) -> Callable[[Engine, int], None]:
    """The last rank is killed in an exchange. The others print their error."""

    def run(engine: Engine, rank: int) -> None:
        used = Dying(engine, function) if rank == engine.size - 1 else engine
        x = np.ones((2, 3, 4), np.float32)
        try:
            _, saved = sync_batch_norm(x, engine=used)
            sync_batch_norm_backward(x, x, saved, engine=used)
        except Exception as error:
            print(f"rank {rank} ends with {type(error).__name__}: {error}")
            raise
        raise AssertionError(f"rank {rank} of a broken group has results")

    return run


def other_x(engine: Engine, rank: int, dtype: str, channels: int) -> None:
    """The last rank has another x: an error on all ranks, which they print, and no change of running statistics."""
    odd = rank == engine.size - 1
    x = np.ones((2, channels if odd else 4, 3), dtype if odd else "float32")
    running = np.full(x.shape[1], 3, x.dtype)
    try:
        sync_batch_norm(x, running_mean=running, engine=engine)
    except Exception as error:
        assert (running == 3).all()
        print(f"rank {rank} ends with {type(error).__name__}: {error}")
        raise
    raise AssertionError(f"rank {rank} normalises with the statistics of another x")


def other_channels(engine: Engine, rank: int) -> None:
    """The packets differ in size."""
    other_x(engine, rank, "float32", 6)


def other_dtype(engine: Engine, rank: int) -> None:
    """float16 and float32 have packets of the same size. The group stays usable."""
    with contextlib.suppress(ValueError):
        other_x(engine, rank, "float16", 4)


CASES: dict[str, Callable[[Engine, int], None]] = {
    "equal": equal,
    "same_parameters": same_parameters,
    "dies_in_all_gather": dies("all_gather"),
    "dies_in_all_reduce": dies("all_reduce"),
    "other_dtype": other_dtype,
    "other_channels": other_channels,
}


def main(library: str, *cases: str) -> None:
    """Run cases in this process."""
    engine, rank = joined(library)
    for case in cases:
        CASES[case](engine, rank)
    if library == "gloo":
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
