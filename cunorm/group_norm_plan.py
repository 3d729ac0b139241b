"""Plans of GroupNorm: from sizes and dtypes to a Plan, and what a plan does when it is called with arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .arrays import Array, dtype_named, epsilon, integer, mask
from .call import Call, Calls, signature
from .group_norm_checks import BACKWARD_NAMES, FORWARD_NAMES, GRADIENTS, check_backward, check_forward, sizes
from .group_norm_strategies import BACKWARD, FORWARD
from .launch import Place, Plan, plan_for
from .problem import Problem, accumulator
from .strategy import Tile

__all__ = ["plan_group_norm"]

_planned_calls = Calls()


def plan_group_norm(
    op: str,
    place: Place,
    *,
    shape: Sequence[int],
    dtype: object,
    num_groups: object,
    gamma_dtype: object,
    beta_dtype: object,
    output_mask: object,
    data_format: str,
    activation: object,
    tile: Tile | None,
) -> Plan:
    """The plan of group_norm or group_norm_backward for contiguous arrays of that shape in that format."""
    name = dtype_named("dtype", dtype)
    sums = accumulator(name)
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise TypeError(f"shape: {shape!r}, expected a sequence of 2 to 8 sizes")
    if not 2 <= len(shape) <= 8:
        raise ValueError(f"shape: {shape!r}, expected 2 to 8 sizes")
    N, C, HxW, groups = sizes(tuple(integer("shape", size, 0) for size in shape), num_groups, data_format, activation)
    gamma, beta = (
        None if given is None else dtype_named(label, given, (name, sums))
        for label, given in (("gamma_dtype", gamma_dtype), ("beta_dtype", beta_dtype))
    )
    caller: Any
    wanted = mask("output_mask", output_mask, GRADIENTS)
    if op == "group_norm":
        if not all(wanted):
            raise ValueError(f"output_mask: {output_mask!r}, expected None to be masked off in a forward")
        problem = Problem(op, name, gamma, beta, sums, data_format, N, C, HxW, groups, ("y", "mean", "rstd"))
        made, caller = plan_for(problem, FORWARD, FORWARD_NAMES, place, tile), _call_forward
    else:
        outputs = tuple(gradient for gradient, flag in zip(GRADIENTS, wanted, strict=True) if flag)
        problem = Problem(op, name, gamma, None, sums, data_format, N, C, HxW, groups, outputs)
        made, caller = plan_for(problem, BACKWARD, BACKWARD_NAMES, place, tile), _call_backward
    options = {"num_groups": num_groups, "output_mask": output_mask, "data_format": data_format}
    return replace(made, caller=functools.partial(caller, options))


def _planned(plan: Plan, arrays: Sequence[Array | None], out: Any, workspace: Any) -> tuple[Any, Call | None]:
    """The key of a plan's call and the call, None where these arrays are new or are no arrays."""
    try:
        key = (plan, signature((*arrays, workspace) if out is None else (*arrays, workspace, *out)), out.__class__)
        return key, _planned_calls.get(key)
    except (AttributeError, TypeError):
        return None, None


def _call_forward(
    options: Mapping[str, Any],
    plan: Plan,
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    """What a plan of group_norm does when it is called."""
    arrays = (x, gamma, beta)
    key, call = _planned(plan, arrays, out, workspace)
    if call is None:
        call = check_forward(
            x, options["num_groups"], gamma, beta, options["data_format"], None, out, None, plan, workspace
        )
        if key is not None:
            _planned_calls.keep(key, call)
    return call(arrays, out, workspace, (epsilon(eps),))


def _call_backward(
    options: Mapping[str, Any],
    plan: Plan,
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    gamma: Array | None = None,
    *,
    beta: Array | None = None,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    """What a plan of group_norm_backward does when it is called."""
    arrays = (dy, x, mean, rstd, gamma, beta)
    key, call = _planned(plan, arrays, out, workspace)
    if call is None:
        groups, mask_, data_format = (options[name] for name in ("num_groups", "output_mask", "data_format"))
        call = check_backward(arrays, groups, mask_, data_format, None, out, None, plan, workspace)
        if key is not None:
            _planned_calls.keep(key, call)
    return call(arrays, out, workspace)
