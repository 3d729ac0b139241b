"""What the strategies of GroupNorm share: sizes, the parameter kernel, registers."""

from __future__ import annotations

from .devices import Device
from .problem import Problem
from .strategy import MAX_GRID, Launch, Tile, ceil_div

__all__ = [
    "RESIDENT_REGISTERS",
    "WARP",
    "blocks_for",
    "is_backward",
    "pair_bytes",
    "parameter_launch",
    "refuses_registers",
    "round_up",
    "tensors_read",
]

WARP = 32
#: Threads of the small kernel that sums parameter gradients: its rows are few, so only latency counts.
PARAMETER_THREADS = 512
#: Registers a thread has in `block` and `split`: their launch bounds ask for 512 resident threads. The compile gate
#: proves that none of their kernels spills with that many.
RESIDENT_REGISTERS = 128


def is_backward(problem: Problem) -> bool:
    """Whether gradients are wanted."""
    return problem.op.endswith("backward")


def pair_bytes(problem: Problem) -> int:
    """Bytes of a `Pair` in reduce.cuh: two accumulators."""
    return 2 * problem.sum_itemsize


def tensors_read(problem: Problem) -> int:
    """Tensors of x's size that a sweep reads: x in a forward; dy, and x unless only dbeta is wanted, in a backward."""
    return 1 + problem.reads_x if is_backward(problem) else 1


def round_up(value: int, step: int) -> int:
    """The multiple of ``step`` at or above ``value``."""
    return ceil_div(value, step) * step


def blocks_for(items: int) -> int:
    """Blocks for that many items: kernels walk on by the grid's size, so any cap is right."""
    return min(items, MAX_GRID)


def parameter_launch(problem: Problem, rows: int) -> Launch:
    """The kernel that sums the workspace's rows into dgamma and dbeta."""
    return Launch(
        kernel="group_norm_backward_parameters",
        entry="group_norm_backward_parameters",
        grid=blocks_for(ceil_div(problem.C, WARP)),
        threads=PARAMETER_THREADS,
        arguments=("workspace", "dgamma", "dbeta", rows, problem.C),
        shared_bytes=PARAMETER_THREADS * pair_bytes(problem),
        traffic=rows * problem.C * pair_bytes(problem),
        takes_tile=False,
        layout="NCHW",  # which it does not look at
        phases=1 + rows * WARP // (4 * PARAMETER_THREADS),  # a warp has four rows in flight
    )


def refuses_registers(registers: int, tile: Tile, device: Device) -> str | None:
    """Why a thread cannot have that many registers, or None."""
    limit = min(255, device.registers_per_multiprocessor // tile.threads)
    if registers > limit:
        return f"needs up to {registers} registers a thread, {tile.threads} threads have {limit}"
    return None
