"""The problems that people ask a command for: a shape, a workload, a trace."""

from __future__ import annotations

import argparse

from cunorm.core.arrays import dtype_named
from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import OPS, fault_of, problem_of
from cunorm.tiling import problem_trace

from .workloads import WORKLOADS, problems


def problems_of(asked: argparse.Namespace) -> list[Problem]:
    """The problems of a command's arguments: one shape, a workload or a trace, less what OP and --layout leave out.

    Parameters
    ----------
    asked : argparse.Namespace
        With op, shape, workload, from_trace, dtype, layout and outputs, None where not given.

    Raises
    ------
    ValueError, TypeError, TraceError, OSError
        In one sentence, what is wrong.
    """
    sources = [name for name in ("shape", "workload", "from_trace") if getattr(asked, name) is not None]
    if len(sources) != 1:
        came = " and ".join(f"--{name.replace('_', '-')}" for name in sources) or "none of them"
        raise ValueError(f"--shape, --workload or --from-trace: {came}, expected one")
    if asked.op is not None and asked.op not in OPS:
        plan_options(asked.op, "", asked.dtype)  # which words it
    if asked.dtype is not None:
        dtype_named("--dtype", asked.dtype)
    if asked.shape is not None:
        if asked.op is None:
            raise ValueError("OP: missing, expected the name of a function before --shape: group_norm_backward")
        options = plan_options(asked.op, asked.shape, asked.dtype or "float32", asked.layout, asked.outputs)
        return [problem_of(asked.op, **options)]
    if asked.outputs is not None:
        raise ValueError("--outputs: goes with --shape")
    if asked.workload is not None:
        if asked.workload not in WORKLOADS:
            raise ValueError(f"--workload: {asked.workload!r}, expected one of {', '.join(WORKLOADS)}")
        dtype = dtype_named("--dtype", asked.dtype or "float32")
        found = [problem for name, problem in problems(dtype) if name == asked.workload]
    else:
        if asked.dtype is not None:
            raise ValueError("--dtype: the problems of a trace have their own")
        found = list(problem_trace.read(asked.from_trace, fault_of))
    layout = None if asked.layout is None else asked.layout.upper()
    chosen = [one for one in found if asked.op in (None, one.op) and layout in (None, one.layout)]
    if not chosen:
        raise ValueError(f"no problem left: {len(found)} in all, none of that OP and --layout")
    return list(dict.fromkeys(chosen))
