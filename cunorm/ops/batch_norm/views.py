"""How BatchNorm's kernels look at a tensor: as planes, or as rows of channels; how a sweep of either is cut."""

from __future__ import annotations

import math
from typing import NamedTuple

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, ceil_div
from cunorm.ops.common.building_blocks import SECTOR_PACKS, WARP, blocks_for, round_up
from cunorm.ops.common.geometry import refuses_sweep, sweep_blocks

__all__ = ["columns_of", "cut_of", "refuses_cut", "refuses_layout", "view_of"]


class View(NamedTuple):
    """How kernels look at a tensor: planes of HxW, or HxW rows of C channels (and N = 1)."""

    layout: str
    N: int
    C: int
    HxW: int


def view_of(problem: Problem) -> View:
    """With one channel a tensor is one plane, with HxW = 1 it is rows: the same bytes in a better order."""
    rows = problem.N * problem.HxW
    if problem.C == 1:
        return View("NCHW", 1, 1, rows)
    if problem.HxW == 1 or problem.layout == "NHWC":
        return View("NHWC", 1, problem.C, rows)
    return View("NCHW", problem.N, problem.C, problem.HxW)


def refuses_layout(problem: Problem, layout: str) -> str | None:
    """Why kernels of that layout cannot take the problem, or None."""
    if view_of(problem).layout == layout:
        return None
    return "channels-last data has no planes" if layout == "NCHW" else "channels-first data has no rows of channels"


# ---- sweeps: `split`, and `column` of tensors ------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a sweep is cut: struct Batch in wide_rows.cuh."""

    layout: str
    sizes: tuple[int, ...]  # N, columns, HxW, chunk, chunks, C, elements left over, columns of packs of a block
    rows: int  # of partial results [rows, C]
    blocks: int
    met: int  # channels that the warps of all blocks meet, each counted once a warp


def _wide(problem: Problem) -> int:
    """Rows of a wide row: as many as are whole sectors."""
    unit = SECTOR_PACKS * problem.pack
    return unit // math.gcd(problem.C, unit)


def columns_of(problem: Problem) -> int:
    """Packs of a wide row."""
    return _wide(problem) * problem.C // problem.pack


def _block_columns(problem: Problem, tile: Tile) -> int:
    """Columns of packs of a block: at most the tile's, evenly, and whole sectors."""
    columns = columns_of(problem)
    even = round_up(ceil_div(columns, ceil_div(columns, tile.columns)), SECTOR_PACKS)
    return min(even, tile.columns)


def cut_of(problem: Problem, tile: Tile) -> Cut:
    """The cut of a sweep: chunks of planes, or of wide rows with a few rows left over."""
    layout, N, C, HxW = view_of(problem)
    if layout == "NCHW":
        chunks = ceil_div(HxW, tile.chunk)
        blocks = sweep_blocks(layout, N, C, chunks, problem.pack, tile.threads)
        return Cut(layout, (N, C, HxW, tile.chunk, chunks, C, 0, 1), N * chunks, blocks_for(blocks), N * C * chunks)
    wide, columns = _wide(problem), _block_columns(problem, tile)
    wide_rows, left = divmod(HxW, wide)
    chunks = ceil_div(wide_rows, tile.chunk)
    swept = sweep_blocks(layout, 1, wide * C, chunks, problem.pack, tile.threads, columns)
    sizes = (1, wide * C, wide_rows, tile.chunk, chunks, C, left * C, columns)
    met = swept * (tile.threads // WARP) * min(columns, WARP) * problem.pack + left * C
    return Cut(layout, sizes, chunks * wide + left, blocks_for(swept + ceil_div(left * C, tile.threads)), met)


def refuses_cut(problem: Problem, tile: Tile, device: Device) -> str | None:
    """Why the tile is not legal, or None; no problem of the right layout is refused for its sizes."""
    layout = "NCHW" if tile.strategy == "split" else "NHWC"
    if (sentence := refuses_layout(problem, layout) or refuses_sweep(layout, problem, tile, device)) is not None:
        return sentence
    if layout == "NHWC" and tile.columns > tile.threads:
        return f"columns is {tile.columns}, expected at most threads, {tile.threads}"
    return None
