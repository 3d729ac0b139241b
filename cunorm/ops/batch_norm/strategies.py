"""The strategies of BatchNorm's five ops: tiles, legality, launches, workspace. No kernel text here."""

from __future__ import annotations

import math
from typing import NamedTuple

from cunorm.core.devices import Device
from cunorm.core.problem import ITEMSIZE, Problem
from cunorm.core.strategy import Launch, Strategy, Tile, by_name, ceil_div, refuses_threads
from cunorm.ops.common.building_blocks import (
    RESIDENT_REGISTERS,
    SECTOR_PACKS,
    WARP,
    blocks_for,
    fold_launches,
    fold_rows,
    pair_bytes,
    part_bytes,
    refuses_registers,
    refuses_shared,
    round_up,
    tensors_read,
    written_and_read,
)
from cunorm.ops.common.geometry import (
    LARGEST_CHUNK,
    refuses_sweep,
    slab_packs,
    slab_partials,
    sweep_blocks,
    sweep_shared,
)


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
    sizes: dict[str, int]  # of struct Batch, by the names of its members
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


def _sizes(N: int, columns: int, HxW: int, chunk: int, chunks: int) -> dict[str, int]:
    return {"N": N, "columns": columns, "HxW": HxW, "chunk": chunk, "chunks": chunks}


def cut_of(problem: Problem, tile: Tile) -> Cut:
    """The cut of a sweep: chunks of planes, or of wide rows with a few rows left over."""
    layout, N, C, HxW = view_of(problem)
    if layout == "NCHW":
        chunks = ceil_div(HxW, tile.chunk)
        blocks = sweep_blocks(layout, N, C, chunks, problem.pack, tile.threads)
        sizes = _sizes(N, C, HxW, tile.chunk, chunks) | {"C": C, "left": 0, "most_columns": 1}
        return Cut(layout, sizes, N * chunks, blocks_for(blocks), N * C * chunks)
    wide, columns = _wide(problem), _block_columns(problem, tile)
    wide_rows, left = divmod(HxW, wide)
    chunks = ceil_div(wide_rows, tile.chunk)
    swept = sweep_blocks(layout, 1, wide * C, chunks, problem.pack, tile.threads, columns)
    sizes = _sizes(1, wide * C, wide_rows, tile.chunk, chunks) | {"C": C, "left": left * C, "most_columns": columns}
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


# ---- runs: `block` of elemt ------------------------------------------------------------------------------------------


def _run_shared(problem: Problem, tile: Tile) -> int:
    """What a block knows of the channels of the planes that its run touches: Affine or Coefficients in norm.cuh."""
    _, N, C, HxW = view_of(problem)
    planes = min(N * C, tile.chunk // HxW + 2)
    values = 5 if problem.is_backward else 4
    return round_up(planes * values * problem.sum_itemsize, 16)


def _refuses_run(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if (sentence := refuses_layout(problem, "NCHW")) is not None:
        return sentence
    if tile.chunk % problem.pack or tile.chunk > LARGEST_CHUNK:
        return f"chunk is {tile.chunk}, expected a multiple of {problem.pack} up to {LARGEST_CHUNK} elements"
    if (sentence := refuses_shared(_run_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


# ---- slabs: `block` of stats and of reduce ---------------------------------------------------------------------------


def _slab_shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block: the arrays in the order of the kernel, each from a 16-byte boundary, for the worst
    alignment.
    """
    layout, _, C, HxW = view_of(problem)
    channels = min(tile.channels, C)
    partials = slab_partials(layout, HxW, problem.pack, tile.threads)
    # What a channel has so far, and of the latest; its centre or mean.
    sizes = [*[channels * part_bytes(problem)] * 2, channels * problem.sum_itemsize]
    sizes += [channels * pair_bytes(problem), partials * pair_bytes(problem)]
    sizes += [16 * slab_packs(layout, channels, HxW, problem.pack)] * tensors_read(problem)
    return sum(round_up(size, 16) for size in sizes)


def _refuses_slab(problem: Problem, tile: Tile, device: Device) -> str | None:
    if (sentence := refuses_threads(tile)) is not None:
        return sentence
    if (sentence := refuses_layout(problem, "NCHW")) is not None:
        return sentence
    if (sentence := refuses_shared(_slab_shared(problem, tile), device)) is not None:
        return sentence
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


# ---- stats and backward_reduce: partial results, then their fold -----------------------------------------------------


def _rows(problem: Problem, tile: Tile) -> int:
    """Rows of partial results [rows, C]; one row is the results themselves."""
    return ceil_div(view_of(problem).N, tile.samples) if tile.strategy == "block" else cut_of(problem, tile).rows


def _workspace(problem: Problem, tile: Tile) -> int:
    rows = _rows(problem, tile)
    return 0 if rows == 1 else fold_rows(rows, problem.C) * problem.C * part_bytes(problem)


SUMS = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")


def _reducing_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    layout, N, C, HxW = view_of(problem)
    rows = _rows(problem, tile)
    if not problem.is_backward:
        given, wanted = by_name("x", "eps"), by_name("mean", "invstd")
        fold_given = by_name("workspace", "eps")
    else:
        given = by_name("dy", "mean", "invstd", x=problem.reads_x)
        wanted = by_name(**{name: name in problem.outputs for name in SUMS})
        fold_given = by_name("invstd", "workspace")
    results = {**(wanted if rows == 1 else dict.fromkeys(wanted, 0)), **by_name(workspace=rows > 1)}
    traffic = tensors_read(problem) * problem.nbytes + (rows > 1) * rows * C * part_bytes(problem)
    cached = 0
    if tile.strategy == "block":
        entry = f"{problem.op}_block"
        blocks = blocks_for(ceil_div(C, tile.channels) * rows)
        sizes = {"N": N, "C": C, "HxW": HxW, "channels": min(tile.channels, C), "samples": min(tile.samples, N)}
        shared = _slab_shared(problem, tile)
        passes = 1 if problem.is_backward else 2
        phases = min(N, tile.samples) * (1 + passes)  # it waits for each sample, then sums what it staged
    else:
        entry = f"{problem.op}_sweep"
        layout, sizes, _, blocks, met = cut_of(problem, tile)
        shared, phases = sweep_shared(layout, problem, tile, part_bytes(problem)), 1
        cached = met * problem.sum_itemsize * problem.is_backward  # its mean
    main = Launch(
        entry,
        entry,
        blocks,
        tile.threads,
        {**given, **results, **sizes},
        shared_bytes=shared,
        traffic=traffic,
        cached=cached,
        registers=RESIDENT_REGISTERS,
        phases=phases,
        layout=layout,
    )
    if rows == 1:
        return (main,)
    kernel = f"{problem.op}_fold"
    return (main, *fold_launches(problem, kernel, rows, part_bytes(problem), fold_given, wanted))


# ---- elemt and backward_elemt: one stream ----------------------------------------------------------------------------


def _channel_bytes(problem: Problem) -> int:
    """What a thread reads of a channel: statistics, parameters, and a backward's sums."""
    count = 4 if problem.is_backward else 2
    given = (dtype for dtype in (problem.gamma_dtype, problem.beta_dtype) if dtype is not None)
    return count * problem.sum_itemsize + sum(ITEMSIZE[dtype] for dtype in given)


def _streaming_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    layout, _, C, HxW = view_of(problem)
    cached = 0
    spec = problem.spec
    if tile.strategy == "block":
        elements = problem.N * problem.C * problem.HxW
        blocks = blocks_for(ceil_div(elements, tile.chunk))
        sizes = {"elements": elements, "C": C, "HxW": HxW, "chunk": tile.chunk}
        shared, phases = _run_shared(problem, tile), 2  # what it knows of its channels, then the stream
    else:
        layout, sizes, _, blocks, met = cut_of(problem, tile)
        shared, phases, cached = 0, 1, met * _channel_bytes(problem)
    entry = f"{problem.op}_{tile.strategy}"
    return (
        Launch(
            entry,
            entry,
            blocks,
            tile.threads,
            {**by_name(*spec.arrays, *spec.numbers), **sizes},
            shared_bytes=shared,
            traffic=len(spec.tensors) * problem.nbytes,
            cached=cached,
            registers=RESIDENT_REGISTERS,
            phases=phases,
            layout=layout,
        ),
    )


# ---- gather_stats: a thread a channel --------------------------------------------------------------------------------


def _refuses_gather(problem: Problem, tile: Tile, device: Device) -> str | None:
    return refuses_threads(tile)


def _gather_launches(problem: Problem, tile: Tile) -> tuple[Launch, ...]:
    entry, spec = f"{problem.op}_column", problem.spec
    return (
        Launch(
            entry,
            entry,
            blocks_for(ceil_div(problem.C, tile.threads)),
            tile.threads,
            {**by_name(*spec.arrays, *spec.numbers), "world": problem.N, "C": problem.C},
            traffic=2 * problem.nbytes,
            phases=1 + problem.N // 4,  # a thread has four ranks in flight
            layout="NCHW",  # which it does not look at
        ),
    )


_CHUNKS = {"threads": (128, 256, 512), "chunk": (64, 256, 1024, 4096, 16384, 65536)}
#: 512 threads would only be more parts of the same columns; 8 columns of packs are 128 bytes of a row. What a thread
#: adds up one after another costs digits, so chunks are not longer, nor ranges of samples below.
_ROWS = {
    "threads": (128, 256),
    "columns": (8, 32, 128),
    "chunk": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
}
_SLABS = {
    "threads": (64, 128, 256, 512),
    "channels": (1, 2, 4, 8, 16, 32, 64),
    "samples": (1, 2, 4, 8, 16, 32, 64),
}
_RUNS = {"threads": (128, 256, 512), "chunk": (2048, 8192, 32768)}


def _columns_worth(problem: Problem, tile: Tile) -> bool:
    """Whether no fewer columns of the space are all that there are."""
    return all(columns >= tile.columns or columns < columns_of(problem) for columns in _ROWS["columns"])


def _example(tile: Tile, pack: int) -> tuple[int, int, int, int]:
    return 8, 64, 64, 64


def _named(*strategies: Strategy) -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in strategies}


def _reducing(op: str) -> dict[str, Strategy]:
    known = ("threads",)
    facts = (_reducing_launches, _workspace, written_and_read(_workspace), _example)
    return _named(
        Strategy("block", op, _SLABS, known, _refuses_slab, *facts),
        Strategy("split", op, _CHUNKS, known, refuses_cut, *facts),
        Strategy("column", op, _ROWS, known, refuses_cut, *facts, worth=_columns_worth),
    )


def _nothing(problem: Problem, tile: Tile) -> int:
    return 0


def _streaming(op: str) -> dict[str, Strategy]:
    known, facts = ("threads",), (_streaming_launches, _nothing, _nothing, _example)
    return _named(
        Strategy("block", op, _RUNS, known, _refuses_run, *facts),
        Strategy("column", op, _ROWS, known, refuses_cut, *facts, worth=_columns_worth),
    )


STATS: dict[str, Strategy] = _reducing("batch_norm_stats")
GATHER_STATS: dict[str, Strategy] = _named(
    Strategy(
        "column",
        "batch_norm_gather_stats",
        {"threads": (64, 128)},
        ("threads",),
        _refuses_gather,
        _gather_launches,
        _nothing,
        _nothing,
        lambda tile, pack: (8, 64, 1, 64),
    )
)
ELEMT: dict[str, Strategy] = _streaming("batch_norm_elemt")
BACKWARD_REDUCE: dict[str, Strategy] = _reducing("batch_norm_backward_reduce")
BACKWARD_ELEMT: dict[str, Strategy] = _streaming("batch_norm_backward_elemt")
