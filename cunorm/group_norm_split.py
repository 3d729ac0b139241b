"""GroupNorm's strategy `split`: legality, launches, workspace."""

from __future__ import annotations

from .devices import Device
from .group_norm_common import (
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    is_backward,
    pair_bytes,
    parameter_launch,
    refuses_registers,
    tensors_read,
)
from .problem import Problem
from .strategy import MAX_GRID, Launch, Tile, ceil_div, refuses_threads

__all__ = ["refuses_split", "split_launches", "split_workspace"]


def _chunks(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.HxW, tile.chunk)


def _split_grid(problem: Problem, tile: Tile) -> int:
    """Sweep::items() in sweep.cuh."""
    chunks = _chunks(problem, tile)
    if problem.layout == "NCHW":
        return blocks_for(ceil_div(problem.N * problem.C * chunks, tile.threads // WARP))
    columns = ceil_div(problem.C, problem.pack)
    return blocks_for(problem.N * chunks * ceil_div(columns, min(columns, tile.threads)))


def _split_shared(problem: Problem, tile: Tile, item_bytes: int, *, always: bool = False) -> int:
    if problem.layout == "NCHW":
        return tile.threads * item_bytes if always else 0
    return tile.threads * problem.pack * item_bytes


def refuses_split(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if tile.chunk > 2**30:
        return f"chunk is {tile.chunk}, expected at most 2**30 positions"
    needed = _split_shared(problem, tile, 3 * problem.sum_itemsize)
    if needed > device.shared_memory_per_block:
        return f"needs {needed} bytes of shared memory, a block of {device.name} has {device.shared_memory_per_block}"
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


def split_workspace(problem: Problem, tile: Tile) -> int:
    return problem.N * _chunks(problem, tile) * problem.C * pair_bytes(problem)


def split_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    chunks, grid = _chunks(problem, tile), _split_grid(problem, tile)
    cut = (problem.N, problem.C, problem.HxW, problem.group, tile.chunk, chunks)
    tensor, workspace = problem.nbytes, split_workspace(problem, tile)

    def launch(stage: str, blocks: int, arguments: tuple[str | int | float, ...], traffic: int, shared: int) -> Launch:
        stem = f"{problem.op}_split"
        return Launch(stem, f"{stem}_{stage}", blocks, tile.threads, arguments, shared, traffic, RESIDENT_REGISTERS)

    if not is_backward(problem):
        fold_grid = blocks_for(ceil_div(problem.N * problem.group, tile.threads // WARP))
        return (
            launch(
                "moments",
                grid,
                ("x", "workspace", *cut),
                tensor + workspace,
                _split_shared(problem, tile, 3 * problem.sum_itemsize),
            ),
            launch("fold", fold_grid, ("x", "workspace", "mean", "rstd", *cut, "eps"), workspace, 0),
            launch("apply", grid, ("x", "gamma", "beta", "y", "mean", "rstd", *cut), 2 * tensor, 0),
        )

    given = ("dy", "x" if problem.reads_x else 0, "mean", "rstd")
    pair = pair_bytes(problem)
    sums = launch(
        "sums",
        grid,
        (*given, "workspace", *cut),
        tensors_read(problem) * tensor + workspace,
        _split_shared(problem, tile, pair),
    )
    if "dx" not in problem.outputs:
        return (sums, parameter_launch(problem, problem.N * chunks))
    fold_grid = blocks_for(ceil_div(problem.N * problem.C, tile.threads))
    folds = (launch("fold", fold_grid, ("workspace", problem.N, problem.C, chunks), workspace, 0),)
    parameter_blocks = ceil_div(problem.C, WARP) if problem.wants_parameters else 0
    apply = launch(
        "input",
        min(grid + parameter_blocks, MAX_GRID),
        (*given, "gamma", "dx", "workspace", "dgamma", "dbeta", *cut, parameter_blocks),
        3 * tensor,
        _split_shared(problem, tile, pair, always=True),
    )
    return (sums, *(folds if chunks > 1 else ()), apply)
