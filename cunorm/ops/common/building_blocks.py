"""Shared parts of the ops' strategies: sizes, launches that fold partial rows, limits of registers and memory."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import MAX_GRID, Arguments, Launch, Tile, by_name, ceil_div

WARP = 32
#: 16-byte packs per 32-byte sector; equals Run::sector_packs in team.cuh.
SECTOR_PACKS = 2
#: Threads and columns per block of the kernels that fold the rows of a workspace. 8 pairs of floats fill two sectors.
#: The columns are few so that the blocks are many.
FOLD_THREADS, FOLD_COLUMNS = 512, 8
#: A fold cuts its rows into slices of SLICE_ROWS rows if it has more than MANY_ROWS rows, or more than
#: MANY_ROWS_OF_ONE_SLAB rows and a single slab of columns.
MANY_ROWS, MANY_ROWS_OF_ONE_SLAB, SLICE_ROWS = 1024, 128, 32
#: A fold with at least FEW_SLABS slabs does not cut its rows. The columns of a block are doubled only if at least
#: MANY_SLABS slabs remain. Slices times slabs are at most MOST_SLICES, but a cut makes at least two slices.
FEW_SLABS, MANY_SLABS, MOST_SLICES = 64, 256, 128
#: Registers per thread in kernels whose launch bounds require 512 resident threads, blocks_of(512) in reduce.cuh. The
#: compile gate proves that none of these kernels spills.
RESIDENT_REGISTERS = 128
#: Registers per thread in kernels whose launch bounds require 384 resident threads.
ACTIVATED_REGISTERS = 168


def bound_registers(problem: Problem, layout: str) -> int:
    """Registers per thread of a kernel whose threads hold no packs.

    The launch bounds of the kernel set this limit: gradient_threads in backward_sweep.cuh and slab_threads in
    backward_slab.cuh.
    """
    wide = problem.is_backward and problem.activation is not None and layout == "NHWC" and problem.pack >= 8
    return ACTIVATED_REGISTERS if wide else RESIDENT_REGISTERS


def round_up(value: int, step: int) -> int:
    """Smallest multiple of ``step`` that is not less than ``value``."""
    return ceil_div(value, step) * step


def blocks_for(items: int) -> int:
    """Blocks for ``items`` work items. Any cap is correct, because kernels loop over items with the grid as stride."""
    return min(items, MAX_GRID)


def _fold_columns(rows: int, C: int) -> int:
    """Columns per block of a fold: few, to have many blocks, but more if few rows would leave threads idle."""
    columns = min(C, FOLD_COLUMNS)
    while 2 * columns * rows <= FOLD_THREADS and ceil_div(C, 2 * columns) >= MANY_SLABS:
        columns *= 2
    return columns


def _fold_slices(rows: int, C: int) -> int:
    """Slices into which a fold cuts the rows, to have many blocks and never a single block for many rows."""
    slabs = ceil_div(C, _fold_columns(rows, C))
    if slabs >= FEW_SLABS or rows <= (MANY_ROWS_OF_ONE_SLAB if slabs == 1 else MANY_ROWS):
        return 1
    return min(ceil_div(rows, SLICE_ROWS), max(2, MOST_SLICES // slabs))


def fold_rows(rows: int, C: int) -> int:
    """Rows of the workspace of a fold: ``rows`` rows of C items, and one row per slice if there are several slices."""
    slices = _fold_slices(rows, C)
    return rows + (slices if slices > 1 else 0)


def fold_launches(
    problem: Problem,
    kernel: str,
    rows: int,
    item_bytes: int,
    given: Arguments,
    results: Arguments,
    start: int = 0,
) -> tuple[Launch, ...]:
    """Launches of a kernel on fold_columns.cuh that folds the workspace, from item ``start`` on, into results.

    ``given`` are the arguments of every launch. Only the last launch writes ``results``.
    """
    C, slices = problem.C, _fold_slices(rows, problem.C)

    def launch(rows: int, slices: int, at: int, results: Arguments) -> Launch:
        columns = _fold_columns(rows, C)
        parts = FOLD_THREADS // columns
        return Launch(
            kernel=kernel,
            entry=kernel,
            grid=blocks_for(ceil_div(C, columns) * slices),
            threads=FOLD_THREADS,
            arguments={
                **given,
                **results,
                **{"rows": rows, "C": C, "columns": columns, "slices": slices, "from": at, "to": at + rows * C},
            },
            shared_bytes=FOLD_THREADS * item_bytes,
            traffic=rows * C * item_bytes,
            registers=24 + 2 * item_bytes,  # four items per thread
            takes_tile=False,
            layout="NCHW",  # the kernel does not depend on the layout
            phases=1 + ceil_div(rows, slices) // (4 * parts),  # a thread loads four rows at a time
        )

    if slices == 1:
        return (launch(rows, 1, start, results),)
    return launch(rows, slices, start, dict.fromkeys(results, 0)), launch(slices, 1, start + rows * C, results)


def parameter_launches(problem: Problem, rows: int, start: int = 0) -> tuple[Launch, ...]:
    """Launches that sum the rows of the workspace, from pair ``start`` on, into dgamma and dbeta."""
    given, results = by_name("workspace"), by_name("dgamma", "dbeta")
    return fold_launches(problem, "parameter_sums", rows, problem.pair, given, results, start)


def parameter_workspace(problem: Problem, rows: int) -> int:
    """Bytes of the rows that `parameter_launches` sums; 0 for a single row, which is stored in dgamma and dbeta."""
    if not problem.wants_parameters or rows == 1:
        return 0
    return fold_rows(rows, problem.C) * problem.C * problem.pair


def refuses_shared(needed: int, device: Device) -> str | None:
    """Return the error message if a block needs more shared memory than the device has, or None."""
    if needed > device.shared_memory_per_block:
        return f"needs {needed} bytes of shared memory per block, {device.name} has {device.shared_memory_per_block}"
    return None


def refuses_cluster_size(tile: Tile, device: Device) -> str | None:
    """Return the error message if the device does not support clusters of this size, or None."""
    if tile.cluster in (2, 4, 8, 16) and tile.cluster <= device.largest_cluster:
        return None
    most = device.largest_cluster
    expected = f"a power of two from 2 to {most}" if most > 1 else "no clusters"
    return f"cluster is {tile.cluster}, but {device.name} supports {expected}"


def refuses_resident(needed: int, tile: Tile, device: Device) -> str | None:
    """Return the error message if a thread needs more registers than `RESIDENT_REGISTERS` or the device allow."""
    if needed > RESIDENT_REGISTERS:
        return f"needs up to {needed} registers per thread, its launch bounds allow {RESIDENT_REGISTERS}"
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


def refuses_registers(registers: int, tile: Tile, device: Device) -> str | None:
    """Return the error message if a thread needs more registers than the device has for it, or None."""
    limit = min(255, device.registers_per_multiprocessor // tile.threads)
    if registers > limit:
        return f"needs up to {registers} registers per thread, blocks of {tile.threads} threads allow {limit}"
    return None


WORD = 4  # bytes per counter
LINE_WORDS = 32  # a whole line of the L2 cache for the ticket counter: ticket_words in work_queue.cuh
CLEAR_THREADS = 256


def words_at(pairs: int, pair_bytes: int) -> int:
    """Index of the pair at which the counters begin: after ``pairs`` pairs, rounded up to a line of the L2 cache."""
    return round_up(pairs, LINE_WORDS * WORD // pair_bytes)


def clear_launch(at: int, words: int) -> Launch:
    """Launch that sets ``words`` counters to zero, from pair ``at`` of the workspace on."""
    return Launch(
        "clear_counters",
        "clear_counters",
        blocks_for(ceil_div(words, CLEAR_THREADS)),
        CLEAR_THREADS,
        {"workspace": "workspace", "from": at, "count": words},
        traffic=words * WORD,
        registers=32,
        takes_tile=False,
        layout="NCHW",  # the kernel does not depend on the layout
        prepares=True,
    )
