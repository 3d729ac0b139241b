"""The ops of cunorm by name, and `plan`: a prepared call of any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from cunorm.core import opspec
from cunorm.core.arrays import dtype_named, integer
from cunorm.core.devices import known
from cunorm.core.problem import Problem, accumulator
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.batch_norm.op import (
    BATCH_NORM_BACKWARD_ELEMT,
    BATCH_NORM_BACKWARD_REDUCE,
    BATCH_NORM_ELEMT,
    BATCH_NORM_GATHER_STATS,
    BATCH_NORM_STATS,
)
from cunorm.ops.group_norm.op import GROUP_NORM, GROUP_NORM_BACKWARD
from cunorm.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BACKWARD
from cunorm.runtime.checks import place_for
from cunorm.runtime.op import Op, Request, plan_of
from cunorm.runtime.plans import Plan, Target
from cunorm.tiling.table import shown

#: Every op by its function's name: those of `cunorm.core.opspec.OPS`, which are nothing but these.
OPS: dict[str, Op] = cast(dict[str, Op], opspec.OPS)
for op in (
    GROUP_NORM,
    GROUP_NORM_BACKWARD,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    BATCH_NORM_STATS,
    BATCH_NORM_GATHER_STATS,
    BATCH_NORM_ELEMT,
    BATCH_NORM_BACKWARD_REDUCE,
    BATCH_NORM_BACKWARD_ELEMT,
):
    OPS[op.name] = op
#: What `plan` takes for ops that do not ask for it.
UNASKED: dict[str, Any] = {
    "num_groups": None,
    "normalized_shape": None,
    "gamma_dtype": None,
    "beta_dtype": None,
    "output_mask": (True, True, True),
    "data_format": "NCHW",
    "activation": None,
}


def fault_of(problem: Problem) -> str | None:
    """What is wrong with a problem that came from a file; None for one that a call could have."""
    op = OPS.get(problem.op)
    if op is None:
        return f"op '{shown(problem.op)}', expected one of {', '.join(OPS)}"
    outputs = tuple(name for name in op.results if name in problem.outputs)
    if outputs != problem.outputs or not outputs:
        came, expected = shown(",".join(problem.outputs)), ",".join(op.results)
        return f"{problem.op}: outputs '{came}', expected some of {expected}, in that order"
    named = tuple(name for name, _ in problem.others)
    if named != tuple(op.types):
        words = [",".join(name.removesuffix("_t") for name in names) or "none" for names in (named, op.types)]
        return f"{problem.op}: types of {shown(words[0])}, expected {words[1]}"
    sentence = _array_fault(op, problem) or _request_fault(op, problem)
    return None if sentence is None else f"{problem.op}: {sentence}"


def _array_fault(op: Op, problem: Problem) -> str | None:
    """What is wrong with the dtypes that a plan is not asked for: those of statistics, sums and counts."""
    saved = [accumulator(problem.dtype)]
    if "mean" in op.inputs:  # given, and then in x's dtype if the caller likes
        saved.append(problem.dtype)
    if problem.stats_dtype not in saved:
        return f"stats_dtype {problem.stats_dtype!r}, expected {' or '.join(dict.fromkeys(saved))}"
    for name, dtype in problem.others:
        allowed = op.types[name]
        if dtype not in allowed:
            return f"types: {name.removesuffix('_t')} {dtype!r}, expected {' or '.join(allowed)}"
    return None


def _request_fault(op: Op, problem: Problem) -> str | None:
    """What a plan of the problem would be refused with, or would have otherwise."""
    shape = next(array for array in op.inputs.values() if array.tensor).shape_of(problem)
    if problem.layout == "NHWC":
        shape = (shape[0], *shape[2:], shape[1])
    asked = Request(
        shape=shape,
        dtype=problem.dtype,
        num_groups=problem.group,
        normalized_shape=problem.C,
        gamma_dtype=problem.gamma_dtype,
        beta_dtype=problem.beta_dtype,
        output_mask=tuple(results[0] in problem.outputs for results in op.flags.values()),
        data_format=problem.layout,
        activation=problem.activation,
    )
    try:
        made, _ = op.request(asked)
    except (TypeError, ValueError) as error:
        return str(error)
    made = replace(made, stats_dtype=problem.stats_dtype, others=problem.others).canonical()
    for field in fields(Problem):
        came, expected = getattr(problem, field.name), getattr(made, field.name)
        if came != expected:
            return f"{field.name} {came!r}, expected {expected!r}"
    return None


def gpu_present() -> bool:
    """Whether CuPy imports and sees a GPU."""
    try:
        import_cupy = executor("gpu")
    except ImportError:
        return False
    return bool(import_cupy.present())


def place_named(device: object) -> Target:
    """Where a plan runs: None is the current GPU where there is one, else the CPU executor."""
    if device is None:
        return place_for("gpu", executor("gpu").current()) if gpu_present() else place_for("cpu", 0)
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        raise TypeError(f'device: {device!r}, expected None, "cpu", the number of a GPU, or the name of a known one')
    if isinstance(device, int):
        if not gpu_present():
            raise ValueError(f"device: GPU {device}, but CuPy sees none; see `cunorm doctor`")
        return place_for("gpu", device)
    return place_for("cpu", 0) if device == "cpu" else Target("cpu", 0, known(device))


def _counted(plan: Plan) -> Any:
    from cunorm.traffic.traffic import measure  # here: few plans are counted, and it is a tenth of `import cunorm`

    return measure(plan)


def plan(
    op: str,
    *,
    shape: Sequence[int],
    dtype: object,
    num_groups: int | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    gamma_dtype: object = None,
    beta_dtype: object = None,
    output_mask: Sequence[bool] = (True, True, True),
    data_format: str = "NCHW",
    activation: str | None = None,
    device: int | str | None = None,
    tile: Tile | Mapping[str, object] | None = None,
) -> Plan:
    """A prepared call of an op: what will run, how much workspace it needs, and why. No arrays needed.

    Parameters
    ----------
    op : str
        The name of the op's function, ``"group_norm_backward"`` say.
    shape : sequence of int
        Of x, in ``data_format``, contiguous. (A tensor with channels-last strides in an NCHW shape is planned as
        its NHWC shape.) Of means for batch_norm_gather_stats.
    dtype : str or dtype
        Of x, or of means.
    num_groups : int
        For GroupNorm only.
    normalized_shape : int or sequence of int
        For LayerNorm only.
    gamma_dtype, beta_dtype : str or dtype, optional
        None: whatever the call brings, or nothing.
    output_mask : sequence of 3 bools
        Of a backward; of batch_norm_backward_reduce it is (input_g, gamma_g, beta_g).
    data_format : {"NCHW", "NHWC"}
    activation : {None, "silu"}
    device : None, "cpu", int or str, optional
        None: the current GPU where there is one, else the CPU executor. An int is CuPy's number of a GPU. The name of
        a known device (``"A100"``) plans for the CPU executor posing as it.
    tile : Tile or mapping, optional
        Instead of the chosen one.

    Returns
    -------
    Plan
        With ``problem``, ``strategy``, ``tile``, ``workspace_nbytes``, ``explain()``; call it with the op's arrays.

    Raises
    ------
    TypeError, ValueError, UnsupportedTile
        As the op.
    """
    asked = {
        "num_groups": num_groups,
        "normalized_shape": normalized_shape,
        "gamma_dtype": gamma_dtype,
        "beta_dtype": beta_dtype,
        "output_mask": output_mask,
        "data_format": data_format,
        "activation": activation,
    }
    made, request = _asked(op, shape, dtype, asked)
    planned = plan_of(made, request, place_named(device), None if tile is None else Tile.of(tile))
    return replace(planned, counter=_counted)


def problem_of(op: str, *, shape: Sequence[int], dtype: object, **options: Any) -> Problem:
    """The problem that `plan` would plan, from the same arguments but device and tile.

    Raises
    ------
    TypeError, ValueError
        As `plan`.
    """
    made, request = _asked(op, shape, dtype, UNASKED | options)
    return made.request(request)[0].canonical()


def _asked(op: object, shape: object, dtype: object, options: Mapping[str, Any]) -> tuple[Op, Request]:
    """What `plan` was asked for, where that has sense for the op."""
    made = OPS.get(op) if isinstance(op, str) else None
    if made is None:
        raise ValueError(f"op: {op!r}, expected one of {', '.join(OPS)}")
    for name, value in options.items():
        if name not in made.takes and value != UNASKED[name]:
            raise ValueError(f"{name}: {value!r}, expected {UNASKED[name]!r} for {op}, which does not take one")
        if name in ("num_groups", "normalized_shape") and name in made.takes and value is None:
            raise TypeError(f"{name}: None, expected {'an int' if name == 'num_groups' else 'a shape'} for {op}")
    element = dtype_named("dtype", dtype)
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise TypeError(f"shape: {shape!r}, expected a sequence of sizes")
    least = 2 if "normalized_shape" not in made.takes else 1
    if not least <= len(shape) <= 8:
        raise ValueError(f"shape: {shape!r}, expected {least} to 8 sizes")
    sizes = tuple(integer("shape", size, 0) for size in shape)
    return made, Request(sizes, element, **options)
