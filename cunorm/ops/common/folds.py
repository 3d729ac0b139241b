"""Launches that follow or precede a strategy's own kernel: folds of the workspace's rows, and clearing of counters."""

from __future__ import annotations

from cunorm.core.problem import Problem
from cunorm.core.strategy import Arguments, Launch, by_name, ceil_div

from .limits import blocks_for, round_up

#: Threads and columns per block of the kernels that fold the rows of a workspace. 8 pairs of floats fill two sectors.
#: The columns are few so that the blocks are many. With enough blocks, a block has up to MOST_COLUMNS columns: then a
#: thread sums several rows, and fewer threads address their first row and combine their sums.
FOLD_THREADS, FOLD_COLUMNS, MOST_COLUMNS = 512, 8, 32
#: Threads for sums in float64. With FOLD_THREADS the compiler spills: it keeps the registers of a thread so few that a
#: multiprocessor can hold as many threads as it may.
DOUBLE_FOLD_THREADS = 256
#: A fold cuts its rows into slices of SLICE_ROWS rows if it has more than MANY_ROWS rows, or more than
#: MANY_ROWS_OF_ONE_SLAB rows and a single slab of columns.
MANY_ROWS, MANY_ROWS_OF_ONE_SLAB, SLICE_ROWS = 1024, 128, 32
#: A fold with at least FEW_SLABS slabs does not cut its rows. The columns of a block are doubled only if at least
#: MANY_SLABS slabs remain, about one per multiprocessor. Slices times slabs are at most MOST_SLICES, but a cut makes at
#: least two slices.
FEW_SLABS, MANY_SLABS, MOST_SLICES = 64, 128, 128
WORD = 4  # bytes per counter
LINE_WORDS = 32  # a whole line of the L2 cache for the ticket counter: ticket_words in work_queue.cuh
CLEAR_THREADS = 256
#: Counters of kept_items.cuh: the line of the ticket counter, and the number of items whose sums are stored.
ITEM_WORDS = LINE_WORDS + 1


def _fold_columns(rows: int, C: int) -> int:
    """Columns per block of a fold: few, to have many blocks, but more if there are many columns or few rows."""
    columns = min(C, FOLD_COLUMNS)
    while ceil_div(C, 2 * columns) >= MANY_SLABS and (
        2 * columns <= MOST_COLUMNS or 2 * columns * rows <= FOLD_THREADS
    ):
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
    threads = DOUBLE_FOLD_THREADS if problem.sum_itemsize == 8 else FOLD_THREADS

    def launch(rows: int, slices: int, at: int, results: Arguments) -> Launch:
        columns = min(_fold_columns(rows, C), threads)
        parts = threads // columns
        return Launch(
            kernel=kernel,
            entry=kernel,
            grid=blocks_for(ceil_div(C, columns) * slices),
            threads=threads,
            arguments={
                **given,
                **results,
                **{"rows": rows, "C": C, "columns": columns, "slices": slices, "from": at, "to": at + rows * C},
            },
            shared_bytes=threads * item_bytes,
            traffic=rows * C * item_bytes,
            reread=rows * C * item_bytes,
            registers=24 + 2 * item_bytes,  # four items per thread
            takes_tile=False,
            layout="NCHW",  # the kernel does not depend on the layout
            phases=1 + ceil_div(rows, slices) // (4 * parts),  # a thread loads four rows at a time
        )

    if slices == 1:
        return (launch(rows, 1, start, results),)
    return launch(rows, slices, start, dict.fromkeys(results, 0)), launch(slices, 1, start + rows * C, results)


def parameter_launches(problem: Problem, rows: int, start: int = 0) -> tuple[Launch, ...]:
    """Launches that sum the rows of the workspace, from sums ``start`` on, into dgamma and dbeta.

    Without a mean there are single sums, of dgamma alone.
    """
    kernel = "parameter_sums" if problem.has_mean else "gamma_sums"
    results = by_name(*(name for name in ("dgamma", "dbeta") if name in problem.spec.results))
    return fold_launches(problem, kernel, rows, problem.row_sums, by_name("workspace"), results, start)


def parameter_workspace(problem: Problem, rows: int) -> int:
    """Bytes of the rows that `parameter_launches` sums; 0 for a single row, which is stored in dgamma and dbeta."""
    if not problem.wants_parameters or rows == 1:
        return 0
    return fold_rows(rows, problem.C) * problem.C * problem.row_sums


def words_at(pairs: int, pair_bytes: int) -> int:
    """Index of the pair at which the counters begin: after ``pairs`` pairs, rounded up to a line of the L2 cache."""
    return round_up(pairs, LINE_WORDS * WORD // pair_bytes)


def item_words_moved(items: int, folds: int = 0) -> int:
    """Bytes of the accesses to the counters of kept_items.cuh.

    Each access is 4 bytes. Every counter is set to zero. Per item, there is the draw of its ticket, the draw that finds
    no item left, the signal of its sums, and the poll of the count: counted once, although a block that waits polls
    again. A fold is signalled too.
    """
    return (ITEM_WORDS + 4 * items + folds) * WORD


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
