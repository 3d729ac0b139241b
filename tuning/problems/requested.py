"""The problems that the arguments of a command select: one shape, a workload or a trace."""

from __future__ import annotations

import argparse

from cunorm.core.arrays import dtype_named
from cunorm.core.errors import TraceError, about_file
from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import layout_named, naming_options, plan_options, refuse_without_shape, typed_options
from cunorm.ops.registry import OPS, fault_of, problem_of
from cunorm.tiling import problem_trace

from .workloads import WORKLOADS, problems


def problems_of(asked: argparse.Namespace) -> list[Problem]:
    """The problems of one shape, a workload or a trace. OP and --layout select a part of a workload or trace.

    Parameters
    ----------
    asked : argparse.Namespace
        With the arguments of `add_problem` and `add_lists` in parser.py; None if an argument is missing.

    Raises
    ------
    ValueError, TypeError, TraceError, OSError
        If an argument is wrong. The message is one sentence.
    """
    sources = [name for name in ("shape", "workload", "from_trace") if getattr(asked, name) is not None]
    if len(sources) != 1:
        came = " and ".join(f"--{name.replace('_', '-')}" for name in sources) or "none"
        raise ValueError(f"--shape, --workload or --from-trace: received {came}, expected exactly one")
    if asked.op is not None and asked.op not in OPS:
        plan_options(asked.op, "", asked.dtype)  # raises the error message for an unknown op
    if asked.dtype is not None:
        dtype_named("--dtype", asked.dtype)
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
    """The problems of a workload or a trace that OP and --layout select, each once."""
    layout = layout_named(asked.layout)
    chosen = [one for one in found if asked.op in (None, one.op) and layout in (None, one.layout)]
    if not chosen:
        raise ValueError(f"no problem left: {len(found)} in all, none matches OP and --layout")
    return list(dict.fromkeys(chosen))
