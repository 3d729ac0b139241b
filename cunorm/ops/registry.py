"""Registry of cunorm's ops by name, and `plan`, which prepares a call of any op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, cast

from cunorm.core import opspec
from cunorm.core.arrays import dtype_named, integer, is_array, said
from cunorm.core.devices import Device, known
from cunorm.core.problem import MOST_AXES, Problem, accumulator
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
from cunorm.ops.instance_norm.op import INSTANCE_NORM, INSTANCE_NORM_BACKWARD
from cunorm.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BACKWARD
from cunorm.ops.rms_norm.op import RMS_NORM, RMS_NORM_BACKWARD
from cunorm.runtime.checks import place_for
from cunorm.runtime.op import EVERY, Op, Request, plan_of, requested
from cunorm.runtime.plans import Plan, Target
from cunorm.tiling import choose_tile
from cunorm.tiling.table import Entry, shown

#: Every op by function name. This is the dict `cunorm.core.opspec.OPS` itself; the loop below fills it.
OPS: dict[str, Op] = cast(dict[str, Op], opspec.OPS)
for op in (
    GROUP_NORM,
    GROUP_NORM_BACKWARD,
    INSTANCE_NORM,
    INSTANCE_NORM_BACKWARD,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    BATCH_NORM_STATS,
    BATCH_NORM_GATHER_STATS,
    BATCH_NORM_ELEMT,
    BATCH_NORM_BACKWARD_REDUCE,
    BATCH_NORM_BACKWARD_ELEMT,
):
    OPS[op.name] = op
#: Default of each option of `plan`. An op without an option accepts only this default.
UNASKED: dict[str, Any] = {one.name: one.default for one in fields(Request) if one.default is not MISSING}


def fault_of(problem: Problem) -> str | None:
    """Return the error message for a problem that was read from a file, or None if a call can have the problem."""
    op = OPS.get(problem.op)
    if op is None:
        return f"op '{shown(problem.op)}', expected one of {', '.join(OPS)}"
    outputs = tuple(name for name in op.results if name in problem.outputs)
    if outputs != problem.outputs or not outputs:
        came, expected = shown(",".join(problem.outputs)), ",".join(op.results)
        return f"{problem.op}: outputs '{came}', expected some of {expected}, in that order"
    sentence = _types_fault(op, problem) or _array_fault(op, problem) or _request_fault(op, problem)
    return None if sentence is None else f"{problem.op}: {sentence}"


def _types_fault(op: Op, problem: Problem) -> str | None:
    """Return the error message for names of `Problem.others` that are not those of the op, or None."""
    named = tuple(name for name, _ in problem.others)
    if named == tuple(name for name in op.types if name in named or name in op.required_types):
        return None
    came, expected, optional = (
        ",".join(name.removesuffix("_t") for name in names) for names in (named, op.required_types, op.optional_types)
    )
    behind = f"; optional: {optional}" if optional else ""
    return f"types: {shown(came or 'none')}, expected {expected or 'none'}{behind}"


def _array_fault(op: Op, problem: Problem) -> str | None:
    """Return the error message for dtypes that `plan` has no option for (statistics, sums, counts), or None."""
    saved = [accumulator(problem.dtype)]
    if any(array.dtype == ("stats_dtype",) for array in op.inputs.values()):  # inputs, which may also have x's dtype
        saved.append(problem.dtype)
    if problem.stats_dtype not in saved:
        return f"stats_dtype {problem.stats_dtype!r}, expected {' or '.join(dict.fromkeys(saved))}"
    for name, dtype in problem.others:
        allowed = op.types[name]
        if dtype not in allowed:
            return f"types: {name.removesuffix('_t')} {dtype!r}, expected {' or '.join(allowed)}"
        if name in op.optional_types and dtype == op.default_type(problem, name):
            return f"types: {name.removesuffix('_t')} {dtype!r}, expected none, because that is its default"
    return None


def _request_fault(op: Op, problem: Problem) -> str | None:
    """Return the error that `plan` raises for the problem, or the first field that `plan` sets otherwise, or None."""
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
        residual="residual" in problem.extras,
        dh="dh" in problem.extras,
        y_dtype=dict(problem.others).get("y_t"),
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
    """Whether CuPy can be imported and finds a GPU."""
    try:
        import_cupy = executor("gpu")
    except ImportError:
        return False
    return bool(import_cupy.present())


def place_named(device: object) -> Target:
    """Target of a plan. None selects the current GPU if there is one, otherwise the CPU executor."""
    if device is None:
        return place_for("gpu", executor("gpu").current()) if gpu_present() else place_for("cpu", 0)
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        raise TypeError(f'device: {device!r}, expected None, "cpu", a GPU number, or the name of a known device')
    if isinstance(device, int):
        if not gpu_present():
            raise ValueError(f"device: GPU {device}, but CuPy finds no GPU; run `cunorm doctor`")
        return place_for("gpu", device)
    if device == "cpu":
        return place_for("cpu", 0)
    return Target("cpu", 0, known(device, others='None, "cpu", a GPU number or '))


def _counted(plan: Plan) -> Any:
    # Imported late, because few plans are counted, and this import is a tenth of `import cunorm`.
    from cunorm.traffic.traffic import measure

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
    output_mask: Sequence[bool] = EVERY,
    data_format: str = "NCHW",
    activation: str | None = None,
    residual: bool = False,
    dh: bool = False,
    y_dtype: object = None,
    dtypes: Mapping[str, object] | None = None,
    device: int | str | None = None,
    tile: Tile | Mapping[str, object] | None = None,
) -> Plan:
    """Prepare a call of an op without arrays: select the strategy and the tile, and compute the workspace size.

    Parameters
    ----------
    op : str
        Name of the op's function, for example ``"group_norm_backward"``.
    shape : sequence of int
        Shape of a contiguous x, in ``data_format``. For a tensor with an NCHW shape and channels-last strides, pass
        the NHWC shape and ``data_format="NHWC"``. For batch_norm_gather_stats: shape (world, C) of means.
    dtype : str or dtype
        Dtype of x, or of means for batch_norm_gather_stats.
    num_groups : int
        Number of groups. GroupNorm requires it; other ops do not take it.
    normalized_shape : int or sequence of int
        Last sizes of x, which make up a row. LayerNorm and RMSNorm require it; other ops do not take
        it.
    gamma_dtype, beta_dtype : str or dtype, optional
        Dtypes of gamma and beta. With None, a call of the plan may pass the array in any dtype that the op takes, or
        None.
    output_mask : sequence of bools
        Which outputs of a backward are wanted: (dx, dgamma, dbeta), (dx, dgamma) for rms_norm_backward, or
        (input_g, gamma_g, beta_g) for batch_norm_backward_reduce.
    data_format : {"NCHW", "NHWC"}
        Position of the channel axis in ``shape``: second or last.
    activation : {None, "silu"}
        Activation that is fused into GroupNorm.
    residual, dh : bool
        Whether a call of a LayerNorm or RMSNorm passes a residual, or its gradient passes dh.
    y_dtype : str or dtype, optional
        Dtype of y of a forward: x's dtype, or float32 for 16-bit x. None means x's dtype.
    dtypes : mapping of str to dtype, optional
        Dtypes of other arrays, by name: of statistics that are inputs (``{"mean": "bfloat16"}``), of sums, of running
        statistics and of counts. Only `Plan.launch` needs them, because it sees no arrays. By default, statistics and
        sums have the dtype of the accumulator, and counts are int64; a batch_norm_backward_elemt without counts takes a
        number.
    device : None, "cpu", int or str, optional
        None selects the current GPU if there is one, otherwise the CPU executor. An int is a GPU number, as CuPy
        counts GPUs. The name of a known device (``"A100"``) plans for the CPU executor with the limits of that device.
    tile : Tile or mapping, optional
        Strategy and tile fields that replace the automatic choice.

    Returns
    -------
    Plan
        Plan with ``problem``, ``strategy``, ``tile``, ``workspace_nbytes`` and ``explain()``. Call it with the op's
        arrays.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or is an unsupported dtype.
    ValueError
        If the op is unknown or does not take an option, or if a size, a format or the device is invalid.
    UnsupportedTile
        If ``tile`` is not legal for the problem on the device.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> plan = cunorm.plan("layer_norm", shape=(8, 768), dtype="float32", normalized_shape=768, device="H200")
    >>> plan.tile.strategy, plan.workspace_nbytes
    ('block', 0)
    >>> print(plan.explain())
    layer_norm float32 rows=8 length=768 -> y, mean, rstd
    device...
    strategy   block (...)
    ...
    """
    asked = {
        "num_groups": num_groups,
        "normalized_shape": normalized_shape,
        "gamma_dtype": gamma_dtype,
        "beta_dtype": beta_dtype,
        "output_mask": output_mask,
        "data_format": data_format,
        "activation": activation,
        "residual": residual,
        "dh": dh,
        "y_dtype": y_dtype,
        "dtypes": dtypes,
    }
    made, request = _asked(op, shape, dtype, asked)
    planned = plan_of(made, request, place_named(device), None if tile is None else Tile.of(tile))
    return replace(planned, counter=_counted)


def is_stale(entry: Entry) -> bool:
    """Whether the kernels of a table's entry have changed since it was tuned, or no longer exist."""
    op = OPS.get(entry.problem.op)
    return op is None or choose_tile.is_stale(entry, op.strategies)


def is_legal(entry: Entry, device: Device) -> bool:
    """Whether the tile of a table's entry is legal for its problem on a device."""
    op = OPS.get(entry.problem.op)
    strategy = None if op is None else op.strategies.get(entry.tile.strategy)
    return strategy is not None and strategy.refuses(entry.problem, entry.tile, device) is None


def problem_of(op: str, *, shape: Sequence[int], dtype: object, **options: Any) -> Problem:
    """Return the problem that `plan` solves. The arguments are those of `plan`, without ``device`` and ``tile``.

    Raises
    ------
    TypeError, ValueError
        See `plan`.
    """
    made, request = _asked(op, shape, dtype, UNASKED | options)
    return requested(made, request)[0].canonical()


def _asked(op: object, shape: object, dtype: object, options: Mapping[str, Any]) -> tuple[Op, Request]:
    """Check the arguments of `plan` that depend on the op; return the op and the request."""
    made = OPS.get(op) if isinstance(op, str) else None
    if made is None:
        raise ValueError(f"op: {op!r}, expected one of {', '.join(OPS)}")
    for name, value in options.items():
        if name not in (*made.takes, "dtypes") and (is_array(value) or value != UNASKED[name]):
            raise ValueError(f"{name}: {said(value)}, expected {UNASKED[name]!r} for {op}, which does not take one")
        if name in ("num_groups", "normalized_shape") and name in made.takes and value is None:
            raise TypeError(f"{name}: None, expected {'an int' if name == 'num_groups' else 'a shape'} for {op}")
    element = dtype_named("dtype", dtype)
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise TypeError(f"shape: {shape!r}, expected a sequence of sizes")
    least = 2 if "normalized_shape" not in made.takes else 1
    if not least <= len(shape) <= MOST_AXES:
        raise ValueError(f"shape: {shape!r}, expected {least} to {MOST_AXES} sizes")
    sizes = tuple(integer("shape", size, 0) for size in shape)
    return made, Request(sizes, element, **options)
