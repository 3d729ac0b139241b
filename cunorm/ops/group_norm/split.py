"""GroupNorm's strategy `split`: legality, launches, workspace."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, Tile, by_name, ceil_div
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    fold_rows,
    gradient_registers,
    pair_bytes,
    parameter_launches,
    part_bytes,
    tensors_read,
)
from cunorm.ops.common.geometry import groups_asked, refuses_sweep, sweep_blocks, sweep_shared
from cunorm.ops.common.split_moments import moments_launches


def _chunks(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.HxW, tile.chunk)


def _layout(problem: Problem) -> str:
    """The order that the kernels are compiled for.

    With HxW = 1 both are the same bytes, and a thread of a channels-last block owns a pack of channels where a
    channels-first warp would own one element.
    """
    return "NHWC" if problem.HxW == 1 else problem.layout


def refuses_split(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None; no problem is refused for its sizes."""
    return refuses_sweep(_layout(problem), problem, tile, device)


def split_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes of a part for each channel, sample and chunk, and of what the sum of those rows needs."""
    rows = problem.N * _chunks(problem, tile)
    if problem.is_backward and problem.wants_parameters:
        rows = fold_rows(rows, problem.C)
    return rows * problem.C * part_bytes(problem)


def split_workspace_traffic(problem: Problem, tile: Tile) -> int:
    """Bytes of the workspace that move, with P = N * chunks * C parts and S * C pairs of slices.

    Forward 2 P: written by the first sweep, read by the fold. Backward P, written by the first sweep; and P + 2 S * C,
    for dgamma and dbeta, which read them by way of slices; and, for dx, P read by the fold, N * groups written by it,
    and what the second sweep reads: the pair of its group for every channel (channels-last for every group of a pack),
    chunk and sample, channels-last for every part of a block's threads that sweeps the same columns.
    """
    rows, pair = problem.N * _chunks(problem, tile), pair_bytes(problem)
    parts = rows * problem.C
    if not problem.is_backward:
        return 2 * parts * part_bytes(problem)
    moved = parts
    if problem.wants_parameters:
        moved += parts + 2 * (fold_rows(rows, problem.C) - rows) * problem.C
    if "dx" in problem.outputs:
        columns = min(ceil_div(problem.C, problem.pack), tile.threads)
        readers = tile.threads // columns if _layout(problem) == "NHWC" else 1
        moved += parts + problem.N * problem.group + readers * rows * groups_asked(_layout(problem), problem)
    return moved * pair


def split_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The launches in order: the first sweep, the sums of its parts, the second sweep."""
    chunks, layout = _chunks(problem, tile), _layout(problem)
    grid = blocks_for(sweep_blocks(layout, problem.N, problem.C, chunks, problem.pack, tile.threads))
    cut = {"N": problem.N, "C": problem.C, "HxW": problem.HxW, "chunk": tile.chunk, "chunks": chunks}
    shape = {**cut, "groups": problem.group}
    tensor, workspace = problem.nbytes, problem.N * chunks * problem.C * part_bytes(problem)

    def launch(
        stage: str,
        blocks: int,
        arguments: Arguments,
        traffic: int,
        shared: int = 0,
        phases: int = 1,
    ) -> Launch:
        stem = f"{problem.op}_split"
        return Launch(
            stem,
            f"{stem}_{stage}",
            blocks,
            tile.threads,
            arguments,
            shared_bytes=shared,
            traffic=traffic,
            registers=gradient_registers(problem, layout) if problem.is_backward else RESIDENT_REGISTERS,
            phases=phases,
            layout=layout,
            streams=tensors_read(problem),
        )

    if not problem.is_backward:
        return (
            *moments_launches(problem, tile, cut, problem.group, layout, grid),
            launch("apply", grid, {**by_name("x", "gamma", "beta", "y", "mean", "rstd"), **shape}, 2 * tensor),
        )

    # A block folds a group: its threads wait for one part after another.
    parts = problem.group_channels * chunks
    fold_grid, fold_phases = blocks_for(problem.N * problem.group), 1 + parts // tile.threads
    given, pair = by_name("dy", "mean", "rstd", "workspace", x=problem.reads_x), pair_bytes(problem)
    activated = problem.activation is not None
    launches = [
        launch(
            "sums",
            grid,
            {**given, **by_name(gamma=activated, beta=activated), **shape},
            tensors_read(problem) * tensor + workspace,
            sweep_shared(layout, problem, tile, pair),
        )
    ]
    if problem.wants_parameters:
        launches += parameter_launches(problem, problem.N * chunks)
    if "dx" in problem.outputs:
        parts_of = {**by_name("gamma", "workspace"), **{name: size for name, size in shape.items() if name != "chunk"}}
        launches.append(launch("fold", fold_grid, parts_of, workspace, tile.threads // WARP * pair, fold_phases))
        launches.append(launch("input", grid, {**given, **by_name("gamma", "dx", beta=activated), **shape}, 3 * tensor))
    return tuple(launches)
