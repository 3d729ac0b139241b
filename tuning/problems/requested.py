"""The problems that the arguments of a command select: one shape, a workload, a trace, or the stale ones of tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from cunorm.core.arrays import dtype_named
from cunorm.core.devices import Device
from cunorm.core.errors import TraceError, about_file
from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import layout_named, naming_options, plan_options, refuse_without_shape, typed_options
from cunorm.ops.registry import OPS, fault_of, is_stale, problem_of
from cunorm.tiling import choose_tile, problem_trace, table
from cunorm.tiling.table import Entry

from .workloads import WORKLOADS, problems


def problems_of(asked: argparse.Namespace) -> list[Problem]:
    """The problems of one shape, a workload or a trace. OP and --layout select a part of a workload or trace.

    Those of --stale depend on the device, see `stale_problems`.

    Parameters
    ----------
    asked : argparse.Namespace
        With the arguments of `add_problem` and `add_lists` in parser.py; None if an argument is missing.

    Raises
    ------
    ValueError, TypeError, TraceError, OSError
        If an argument is wrong. The message is one sentence.
    """
    check_source(asked)
    if asked.shape is not None:
        if asked.op is None:
            raise ValueError("OP: missing, expected the name of a function before --shape: group_norm_backward")
        try:
            return [problem_of(asked.op, **typed_options(asked))]
        except (TypeError, ValueError) as error:
            raise type(error)(naming_options(error)) from None
    refuse_without_shape(asked)
    if asked.workload is not None:
        if asked.workload not in WORKLOADS:
            raise ValueError(f"--workload: {asked.workload!r}, expected one of {', '.join(WORKLOADS)}")
        dtype = dtype_named("--dtype", asked.dtype or "float32")
        found = [problem for name, problem in problems(dtype) if name == asked.workload]
    else:
        found = _of_trace(asked)
    return _selected(found, asked)


def check_source(asked: argparse.Namespace) -> None:
    """Check that one source of problems was passed, and that OP and --dtype are valid (ValueError, TypeError)."""
    known = [name for name in ("shape", "workload", "from_trace", "stale") if hasattr(asked, name)]
    options = {f"--{name.replace('_', '-')}": getattr(asked, name) for name in known}
    given = [option for option, value in options.items() if value not in (None, False)]
    if len(given) != 1:
        *others, last = options
        came = " and ".join(given) or "none"
        raise ValueError(f"{', '.join(others)} or {last}: received {came}, expected exactly one")
    if asked.op is not None and asked.op not in OPS:
        plan_options(asked.op, "", asked.dtype)  # raises the error message for an unknown op
    if asked.dtype is not None:
        dtype_named("--dtype", asked.dtype)


def stale_problems(asked: argparse.Namespace, device: Device, source: str) -> tuple[list[Problem], int]:
    """The problems of --stale that OP and --layout select: those whose entry in a tiling table is stale.

    The entries are those of the table that --table names. Without --table they are those that calls use: of a problem
    that is in several tables of the device, the entry of the first one.

    Parameters
    ----------
    source : str
        The source of the new entries. An entry with better evidence is left as it is, for instance a measured one if
        the cost model tunes.

    Returns
    -------
    problems : list of Problem
    left : int
        Number of stale entries with better evidence.

    Raises
    ------
    ValueError, TypeError, TableError, OSError
        If an argument is wrong, or the table cannot be read. The message is one sentence.
    """
    refuse_without_shape(asked)
    if asked.dtype is not None:
        raise ValueError("--dtype: not valid with --stale, because a table contains the dtypes")
    if asked.table is not None and not Path(asked.table).exists():
        raise ValueError(f"--table: {asked.table}: no such file, expected the table whose entries are tuned again")
    named = [] if asked.table is None else [(asked.table, table.read(asked.table))]
    found: dict[Problem, Entry] = {}
    for path, one in named or [(path, read.table) for path, read in choose_tile.tables(device)]:
        for entry in one.entries.values():
            if (fault := fault_of(entry.problem)) is not None:
                raise ValueError(f"{path}: {fault}; remove the entry")
            found.setdefault(entry.problem, entry)
    stale = {problem: entry for problem, entry in found.items() if is_stale(entry)}
    chosen = _selected([*stale], asked) if stale else []
    worse = [problem for problem in chosen if table.rank_of(source) <= stale[problem].rank]
    return worse, len(chosen) - len(worse)


def _of_trace(asked: argparse.Namespace) -> list[Problem]:
    """The problems of --from-trace (ValueError, TraceError). An error in the file names the file and the line."""
    if asked.dtype is not None:
        raise ValueError("--dtype: not valid with --from-trace, because a trace contains the dtypes")
    try:
        found = list(problem_trace.read(asked.from_trace, fault_of))
    except OSError as error:
        raise ValueError(f"--from-trace: {about_file(error, asked.from_trace)}") from None
    if not found:
        raise TraceError(f"--from-trace: {asked.from_trace}: contains no problem")
    return found


def _selected(found: list[Problem], asked: argparse.Namespace) -> list[Problem]:
    """The problems of a list that OP and --layout select, each once."""
    layout = layout_named(asked.layout)
    chosen = [one for one in found if asked.op in (None, one.op) and layout in (None, one.layout)]
    if not chosen:
        raise ValueError(f"no problem left: {len(found)} in all, none matches OP and --layout")
    return list(dict.fromkeys(chosen))
