"""What the strategies of the ops share: sizes, the kernel that sums partial rows, registers."""

from __future__ import annotations

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import MAX_GRID, Arguments, Launch, Tile, by_name, ceil_div

WARP = 32
#: 16-byte packs of a 32-byte sector: Run::sector_packs in team.cuh.
SECTOR_PACKS = 2
#: Threads of the kernels that fold the rows of a workspace, and the columns of one of their blocks: 8 pairs of floats
#: are two sectors, and narrow blocks are many.
FOLD_THREADS, FOLD_COLUMNS = 512, 8
#: Rows from which they are cut into slices, where slabs of columns alone are few blocks, or one; rows of a slice.
MANY_ROWS, MANY_ROWS_OF_ONE_SLAB, SLICE_ROWS = 1024, 128, 32
FEW_SLABS, MANY_SLABS, MOST_SLICES = 64, 256, 128
#: Registers a thread has in kernels whose launch bounds ask for 512 resident threads: blocks_of(512) in reduce.cuh. The
#: compile gate proves that none of them spills with that many.
RESIDENT_REGISTERS = 128
#: The same for 384 resident threads.
ACTIVATED_REGISTERS = 168


def bound_registers(problem: Problem, layout: str) -> int:
    """Registers of a thread that holds no packs: what the launch bounds of its kernel leave it, gradient_threads in
    backward_sweep.cuh and slab_threads in backward_slab.cuh.
    """
    wide = problem.is_backward and problem.activation is not None and layout == "NHWC" and problem.pack >= 8
    return ACTIVATED_REGISTERS if wide else RESIDENT_REGISTERS


def round_up(value: int, step: int) -> int:
    """The multiple of ``step`` at or above ``value``."""
    return ceil_div(value, step) * step


def blocks_for(items: int) -> int:
    """Blocks for that many items: kernels walk on by the grid's size, so any cap is right."""
    return min(items, MAX_GRID)


def _fold_columns(rows: int, C: int) -> int:
    """Columns of a block of a fold: few, so that blocks are many; more where few rows would leave threads idle."""
    columns = min(C, FOLD_COLUMNS)
    while 2 * columns * rows <= FOLD_THREADS and ceil_div(C, 2 * columns) >= MANY_SLABS:
        columns *= 2
    return columns


def _fold_slices(rows: int, C: int) -> int:
    """Slices of the rows of a workspace: the blocks of a fold should be many, and never one for many rows."""
    slabs = ceil_div(C, _fold_columns(rows, C))
    if slabs >= FEW_SLABS or rows <= (MANY_ROWS_OF_ONE_SLAB if slabs == 1 else MANY_ROWS):
        return 1
    return min(ceil_div(rows, SLICE_ROWS), max(2, MOST_SLICES // slabs))


def fold_rows(rows: int, C: int) -> int:
    """Rows of a workspace whose ``rows`` rows of C items are folded: themselves, and room for the slices' rows."""
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
    """The launches of a kernel on columns.cuh that folds the rows of the workspace, from item ``start``, into results.

    ``given`` are the arguments of every launch; ``results`` those that only the last launch writes.
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
            registers=24 + 2 * item_bytes,  # four items a thread
            takes_tile=False,
            layout="NCHW",  # which it does not look at
            phases=1 + ceil_div(rows, slices) // (4 * parts),  # a thread has four rows in flight
        )

    if slices == 1:
        return (launch(rows, 1, start, results),)
    return launch(rows, slices, start, dict.fromkeys(results, 0)), launch(slices, 1, start + rows * C, results)


def parameter_launches(problem: Problem, rows: int, start: int = 0) -> tuple[Launch, ...]:
    """The launches that sum the workspace's rows, from pair ``start``, into dgamma and dbeta."""
    given, results = by_name("workspace"), by_name("dgamma", "dbeta")
    return fold_launches(problem, "parameter_sums", rows, problem.pair, given, results, start)


def parameter_workspace(problem: Problem, rows: int) -> int:
    """Bytes of the workspace whose rows `parameter_launches` sums; none for one row, which is the result itself."""
    if not problem.wants_parameters or rows == 1:
        return 0
    return fold_rows(rows, problem.C) * problem.C * problem.pair


def refuses_shared(needed: int, device: Device) -> str | None:
    """Why a block cannot have that many bytes of shared memory, or None."""
    if needed > device.shared_memory_per_block:
        return f"needs {needed} bytes of shared memory, a block of {device.name} has {device.shared_memory_per_block}"
    return None


def refuses_cluster_size(tile: Tile, device: Device) -> str | None:
    """Why the device has no clusters of that many blocks, or None."""
    if tile.cluster in (2, 4, 8, 16) and tile.cluster <= device.largest_cluster:
        return None
    most = device.largest_cluster
    expected = f"a power of two from 2 to {most}" if most > 1 else "none: it has no clusters"
    return f"cluster is {tile.cluster}, {device.name} has {expected}"


def refuses_resident(needed: int, tile: Tile, device: Device) -> str | None:
    """Why a thread of a kernel that is bound to `RESIDENT_REGISTERS` cannot have what it needs, or None."""
    if needed > RESIDENT_REGISTERS:
        return f"needs up to {needed} registers a thread, its kernel leaves {RESIDENT_REGISTERS}"
    return refuses_registers(RESIDENT_REGISTERS, tile, device)


def refuses_registers(registers: int, tile: Tile, device: Device) -> str | None:
    """Why a thread cannot have that many registers, or None."""
    limit = min(255, device.registers_per_multiprocessor // tile.threads)
    if registers > limit:
        return f"needs up to {registers} registers a thread, {tile.threads} threads have {limit}"
    return None


WORD = 4  # bytes of a counter
LINE_WORDS = 32  # the tickets have a line of the L2 cache to themselves: ticket_words in work_queue.cuh
CLEAR_THREADS = 256


def words_at(pairs: int, pair_bytes: int) -> int:
    """The pair of the workspace from which the words stand, behind ``pairs`` others."""
    return round_up(pairs, LINE_WORDS * WORD // pair_bytes)


def clear_launch(at: int, words: int) -> Launch:
    """The launch that zeroes them."""
    return Launch(
        "clear_words",
        "clear_words",
        blocks_for(ceil_div(words, CLEAR_THREADS)),
        CLEAR_THREADS,
        {"workspace": "workspace", "from": at, "count": words},
        traffic=words * WORD,
        registers=32,
        takes_tile=False,
        layout="NCHW",  # which it does not look at
        prepares=True,
    )
