"""LayerNorm's strategy `split`: legality, launches, workspace; and what its other strategies share with it."""

from __future__ import annotations

import math
from typing import Any

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, Tile, by_name, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    WARP,
    blocks_for,
    fold_rows,
    moments_bytes,
    pair_bytes,
    parameter_launches,
    refuses_registers,
    refuses_resident,
    round_up,
    tensors_read,
)
from cunorm.ops.common.geometry import refuses_chunk
from cunorm.ops.common.split_moments import moments_launches


def gradient_arguments(problem: Problem) -> Arguments:
    """What every sweep of a backward reads."""
    return by_name("dy", "mean", "rstd", "gamma", x=problem.reads_x)


def owners(problem: Problem, tile: Tile, step: int) -> int:
    """How many owners share out the rows, `tile.rows` each, in turn: a multiple of ``step``.

    Where an owner has several rows, and those start off 16-byte boundaries, also a number that lets it cover all its
    rows from the same place.
    """
    count = round_up(ceil_div(problem.N, tile.rows), step)
    if problem.C % problem.pack and count < problem.N:
        count = round_up(count, math.lcm(step, problem.pack))
    return count


def _span(problem: Problem, tile: Tile) -> int:
    """Strips::span in strips.cuh."""
    return WARP * tile.packs * problem.pack


def _strips(problem: Problem, tile: Tile) -> int:
    return ceil_div(problem.C + problem.pack - 1, _span(problem, tile))


def _bands(problem: Problem, tile: Tile) -> int:
    return min(problem.N, owners(problem, tile, 1))


def _split_registers(problem: Problem, tile: Tile) -> int:
    widened = problem.pack * problem.sum_itemsize // 4
    if problem.is_backward:
        return 64 + tile.packs * (8 + 4 * widened)
    return 52 + tile.packs * (4 + 2 * widened)


def refuses_split(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None; no problem is refused for its sizes."""
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    needed = _split_registers(problem, tile)
    if problem.is_backward:
        return refuses_registers(max(needed, RESIDENT_REGISTERS), tile, device)
    return refuses_chunk(tile, "elements") or refuses_resident(needed, tile, device)


def _row_sums(problem: Problem, tile: Tile) -> int:
    """Pairs of the workspace that hold the sums of strips."""
    return problem.N * _strips(problem, tile) if "dx" in problem.outputs else 0


def split_workspace(problem: Problem, tile: Tile) -> int:
    """Bytes: forward moments for each chunk of a row; backward one for each strip of a row, and each band's columns."""
    if not problem.is_backward:
        return problem.N * ceil_div(problem.C, tile.chunk) * moments_bytes(problem)
    bands = _bands(problem, tile)
    kept = fold_rows(bands, problem.C) * problem.C if problem.wants_parameters and bands > 1 else 0
    return (_row_sums(problem, tile) + kept) * pair_bytes(problem)


def split_workspace_traffic(problem: Problem, tile: Tile) -> int:
    """Bytes of the workspace that move.

    Forward the chunks' are written by the first sweep and read by the fold. Backward the bands' columns are written
    once and read once, by way of slices; a row's strips are written by the first sweep, read by the fold, which writes
    one pair a row, which the second sweep reads for every strip.
    """
    if not problem.is_backward:
        return 2 * split_workspace(problem, tile)
    row_sums = _row_sums(problem, tile)
    bands = split_workspace(problem, tile) - row_sums * pair_bytes(problem)
    fold = problem.N if row_sums else 0
    return 2 * bands + (3 * row_sums + fold) * pair_bytes(problem)


def split_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    """The launches in order: the first sweep, the sums of its parts, the second sweep."""
    return _backward(problem, tile) if problem.is_backward else _forward(problem, tile)


def _forward(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    rows, length = problem.N, problem.C
    chunks, bands = ceil_div(length, tile.chunk), _bands(problem, tile)
    warps, shape = tile.threads // WARP, {"rows": rows, "length": length, "bands": bands}
    grid = blocks_for(ceil_div(bands * _strips(problem, tile), warps))
    # A row is a sample of one channel.
    cut = {"N": rows, "C": 1, "HxW": length, "chunk": tile.chunk, "chunks": chunks}
    return (
        *moments_launches(problem, tile, cut, 1, "NCHW", blocks_for(ceil_div(rows * chunks, warps))),
        Launch(
            "layer_norm_split",
            "layer_norm_split_apply",
            grid,
            tile.threads,
            {**by_name("x", "gamma", "beta", "y", "mean", "rstd"), **shape},
            traffic=2 * problem.nbytes,
            registers=_split_registers(problem, tile),
            phases=ceil_div(rows, bands),
        ),
    )


def _backward(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    rows, length, pair = problem.N, problem.C, pair_bytes(problem)
    bands, strips, stem = _bands(problem, tile), _strips(problem, tile), "layer_norm_backward_split"
    shape, row_sums = {"rows": rows, "length": length, "bands": bands}, _row_sums(problem, tile)
    warps = tile.threads // WARP
    grid = blocks_for(ceil_div(bands * strips, warps))
    given, wants_dx = gradient_arguments(problem), "dx" in problem.outputs
    direct = problem.wants_parameters and bands == 1
    kept = problem.wants_parameters and not direct
    facts: dict[str, Any] = {"registers": _split_registers(problem, tile), "phases": ceil_div(rows, bands)}
    partial = (row_sums + bands * length * problem.wants_parameters) * pair
    rows_at: Arguments = {"row_sums": "workspace" if wants_dx else 0, "bands_at": row_sums}
    sums = {**given, **by_name(workspace=kept, dgamma=direct, dbeta=direct), **rows_at, **shape}
    traffic = tensors_read(problem) * problem.nbytes + partial
    launches = [Launch(stem, f"{stem}_sums", grid, tile.threads, sums, traffic=traffic, **facts)]
    if kept:
        launches += parameter_launches(problem, bands, start=row_sums)
    if wants_dx:
        fold: dict[str, Any] = {"shared_bytes": warps * pair, "traffic": row_sums * pair}
        fold["phases"] = 1 + strips // tile.threads
        launches.append(
            Launch(stem, f"{stem}_fold", blocks_for(rows), tile.threads, {"row_sums": "workspace", **shape}, **fold)
        )
        sweep = {**given, "dx": "dx", "row_sums": "workspace", **shape}
        launches.append(Launch(stem, f"{stem}_input", grid, tile.threads, sweep, traffic=3 * problem.nbytes, **facts))
    return tuple(launches)
