"""What the first phases check, in their documented order: nulls, dtypes, then attributes and shapes; then the executor.

A check raises `NullPointer` where the documented code is ACLNN_ERR_PARAM_NULLPTR, and TypeError or ValueError where it
is ACLNN_ERR_PARAM_INVALID. Nothing is allocated or written here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import (
    DTYPES,
    Array,
    dtype_name,
    flag,
    integer,
    mask,
    one_dtype,
    place_of,
    same_place,
    shape_of,
    share_elements,
    sized,
    span,
)
from .ascend_executor import AclOpExecutor, NullPointer, Operand
from .batch_norm_backward import batch_norm_backward_reduce
from .checks import direct_layout, split_axes
from .group_norm import group_norm_backward
from .ops import plan
from .results import Result, memory_order, view_as

__all__ = ["CHANNELS_IN_A_GROUP", "batch_norm_reduce", "group_norm"]

#: The dtypes of these interfaces; float64 is for cunorm's own functions.
DATA = ("float16", "bfloat16", "float32")
#: Of gradOut and input of BatchNorm, and of every array.
LEAST_DIMENSIONS, MOST_DIMENSIONS = 2, 8
#: The documented limit of C / group in training. None of cunorm's: for `strict_limits`.
CHANNELS_IN_A_GROUP = 8000

Named = tuple[str, Array]


def group_norm(
    gradOut: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    gamma: Any,
    N: Any,
    C: Any,
    HxW: Any,
    group: Any,
    outputMask: Any,
    gradInput: Any,
    gradGammaOut: Any,
    gradBetaOut: Any,
    *,
    strict: bool,
) -> AclOpExecutor:
    """The executor of aclnnGroupNormBackward; ``strict``: within the documented limit of C / group."""
    tensors = _named(gradOut=gradOut, input=input)
    statistics = _named(mean=mean, rstd=rstd)
    scale = [] if gamma is None else _named(gamma=gamma)
    outputs = _named(gradInput=gradInput, gradGammaOut=gradGammaOut, gradBetaOut=gradBetaOut)
    flags = outputMask.tolist() if isinstance(outputMask, np.ndarray) else outputMask
    asked = flags if isinstance(flags, (tuple, list)) and len(flags) == len(outputs) else [False] * len(outputs)
    _required([*tensors, *statistics])
    kept = _wanted(outputs, asked, [f"outputMask[{index}]" for index in range(len(outputs))])
    same_place([*tensors, *statistics, *scale, *kept])

    data = dtype_name("gradOut", gradOut, DATA)
    for named in [tensors[1], *(each for each in kept if each[0] == "gradInput")]:
        one_dtype(tensors[0], named)
    gradients = [each for each in kept if each[0] != "gradInput"]
    for name, array in [*statistics, *scale, *gradients]:
        dtype_name(name, array, (data, "float32"), f" beside {data} gradOut")

    N, C, HxW = sizes = integer("N", N, 0), integer("C", C, 0), integer("HxW", HxW, 0)
    groups = integer("group", group)
    wanted = mask("outputMask", flags, [name for name, _ in outputs])
    if C % groups:
        raise ValueError(f"C: {C}, expected a multiple of group, {groups}")
    if strict and C // groups > CHANNELS_IN_A_GROUP:
        raise ValueError(
            f"C: {C // groups} channels in each of group {groups}, expected at most {CHANNELS_IN_A_GROUP}, which only "
            "strict_limits asks for"
        )
    for name, array in tensors:
        _sized(name, array, N * C * HxW, "N * C * HxW")
    for name, array in statistics:
        _sized(name, array, N * groups, "N * group")
    for name, array in [*scale, *gradients]:
        _sized(name, array, C, "C")
    for name, array in kept:
        # Without gamma, any shape of C elements will do for its gradients.
        like = input.shape if name == "gradInput" else array.shape if gamma is None else gamma.shape
        _writable(name, array, like, ", the shape of " + ("input" if name == "gradInput" else "gamma"))

    # cunorm makes gradients of parameters in gamma's dtype, or without gamma in that of the statistics. Where these
    # are not of one dtype they are made in float32, and the caller's narrower ones rounded from that.
    owners = statistics if gamma is None else scale
    shared = _common([*owners, *gradients], data)
    saved = shared if gamma is None else _common(statistics, data)
    rows, axes = _memory(tensors[1][1], sizes)
    made = plan(
        "group_norm_backward",
        shape=rows,
        dtype=data,
        num_groups=groups,
        gamma_dtype=None if gamma is None else shared,
        output_mask=wanted,
        data_format="NCHW" if axes == (0, 1, 2) else "NHWC",
        device=_device(input),
    )
    tensor = functools.partial(Operand, shape=sizes, dtype=DTYPES[data], axes=axes)
    vector = functools.partial(Operand, shape=(C,), dtype=DTYPES[shared], axes=(0,))
    moments = functools.partial(Operand, shape=(N * groups,), dtype=DTYPES[saved], axes=(0,))
    inputs = [
        *(tensor(*each) for each in tensors),
        *(moments(*each) for each in statistics),
        vector(*scale[0]) if scale else None,
    ]
    results = [
        None if not keep else tensor(*each) if each[0] == "gradInput" else vector(*each)
        for each, keep in zip(outputs, wanted, strict=True)
    ]
    _apart(inputs, results, ("gradInput", "gradOut") if made.strategy is None or made.strategy.in_place else None)
    call = functools.partial(group_norm_backward, num_groups=groups, output_mask=wanted, tile=made.tile)
    return AclOpExecutor("aclnnGroupNormBackward", made, call, inputs, results)


def batch_norm_reduce(
    gradOut: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    inputG: Any,
    weightG: Any,
    biasG: Any,
    sumDy: Any,
    sumDyXmu: Any,
    gradWeight: Any,
    gradBias: Any,
) -> AclOpExecutor:
    """The executor of aclnnBatchNormReduceBackward."""
    tensors = _named(gradOut=gradOut, input=input)
    statistics = _named(mean=mean, invstd=invstd)
    scale = [] if weight is None else _named(weight=weight)
    outputs = _named(sumDy=sumDy, sumDyXmu=sumDyXmu, gradWeight=gradWeight, gradBias=gradBias)
    _required([*tensors, *statistics])
    kept = _wanted(outputs, (inputG, inputG, weightG, biasG), ("inputG", "inputG", "weightG", "biasG"))
    same_place([*tensors, *statistics, *scale, *kept])

    data = dtype_name("gradOut", gradOut, DATA)
    one_dtype(*tensors)
    for name, array in [*statistics, *scale, *kept]:
        dtype_name(name, array, DATA)
    for named in kept:
        if named[0] == "gradWeight":
            one_dtype((scale or statistics)[0], named)

    flags = {name: flag(name, value) for name, value in (("inputG", inputG), ("weightG", weightG), ("biasG", biasG))}
    if not LEAST_DIMENSIONS <= input.ndim <= MOST_DIMENSIONS:
        raise ValueError(f"input: {input.ndim} dimensions, expected {LEAST_DIMENSIONS} to {MOST_DIMENSIONS}")
    sizes = split_axes(input.shape, "NCHW")
    C = sizes[1]
    if C == 0:
        raise ValueError(f"input: shape {input.shape}, expected at least one channel, on axis 1")
    shape_of("gradOut", gradOut, input.shape, ", the shape of input")
    for name, array in [*statistics, *scale, *kept]:
        _sized(name, array, C, "one a channel")
    for name, array in kept:
        _writable(name, array, array.shape, "")

    # Statistics that cunorm does not take beside this data are taken as float32, which they all fit.
    saved = data if all(array.dtype == gradOut.dtype for _, array in statistics) else "float32"
    rows, axes = _memory(tensors[1][1], sizes)
    made = plan(
        "batch_norm_backward_reduce",
        shape=rows,
        dtype=data,
        output_mask=tuple(flags.values()),
        data_format="NCHW" if axes == (0, 1, 2) else "NHWC",
        device=_device(input),
    )
    tensor = functools.partial(Operand, shape=sizes, dtype=DTYPES[data], axes=axes)
    moments = functools.partial(Operand, shape=(C,), dtype=DTYPES[saved], axes=(0,))
    # Sums are rounded to whatever dtype they are written in, so weight has no further say: its values are not needed.
    inputs = [*(tensor(*each) for each in tensors), *(moments(*each) for each in statistics)]
    names = [name for name, _ in kept]
    results = [Operand(name, array, (C,), array.dtype, (0,)) if name in names else None for name, array in outputs]
    _apart(inputs, results, None)
    call = functools.partial(
        batch_norm_backward_reduce,
        input_g=flags["inputG"],
        gamma_g=flags["weightG"],
        beta_g=flags["biasG"],
        tile=made.tile,
    )
    return AclOpExecutor("aclnnBatchNormReduceBackward", made, call, inputs, results)


# ---- what both need -------------------------------------------------------------------------------------------------


def _named(**arrays: Any) -> list[Named]:
    """The arrays with their names; one of a subclass of NumPy's as a plain array, for a matrix has its own shapes."""
    return [(name, np.asarray(array) if isinstance(array, np.ndarray) else array) for name, array in arrays.items()]


def _required(arrays: Sequence[Named]) -> None:
    for name, array in arrays:
        if array is None:
            raise NullPointer(f"{name}: None, expected an array")


def _wanted(outputs: Sequence[Named], flags: Sequence[Any], why: Sequence[str]) -> list[Named]:
    """The outputs whose flag is set; the others are not looked at. What is no bool is left to later checks."""
    kept = []
    for named, wanted, reason in zip(outputs, flags, why, strict=True):
        if isinstance(wanted, (bool, np.bool_)) and wanted:
            if named[1] is None:
                raise NullPointer(f"{named[0]}: None, expected an array, for {reason} is True")
            kept.append(named)
    return kept


def _sized(name: str, array: Array, size: int, what: str) -> None:
    """Check the number of dimensions and of elements."""
    if array.ndim > MOST_DIMENSIONS:
        raise ValueError(f"{name}: {array.ndim} dimensions, expected at most {MOST_DIMENSIONS}")
    sized(name, array, size, f"{size} elements, {what}")


def _writable(name: str, array: Array, shape: tuple[int, ...], why: str) -> None:
    """Check an output's shape, and that it can be written."""
    shape_of(name, array, shape, why)
    Result(name, shape, array.dtype, (), label=name).check(array)


def _common(arrays: Sequence[Named], data: str) -> str:
    """The one dtype that takes all of these, of which each is of ``data`` or float32."""
    return data if all(array.dtype == DTYPES[data] for _, array in arrays) else "float32"


def _memory(x: Array, sizes: tuple[int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of (N, C, HxW) in the order in which x has them in memory, and its axes in that order."""
    seen = view_as(x, sizes)
    layout = "NCHW" if seen is None else direct_layout(seen, "NCHW")
    axes = memory_order(3, "NCHW", layout)
    return tuple(sizes[axis] for axis in axes), axes


def _device(x: Array) -> int | str:
    """Where to plan."""
    kind, ordinal = place_of(x)
    return "cpu" if kind == "cpu" else ordinal


def _apart(
    inputs: Sequence[Operand | None], results: Sequence[Operand | None], in_place: tuple[str, str] | None
) -> None:
    """Check that what is written overlaps nothing; but the first of ``in_place`` may be exactly the second."""
    before = [(each, *span(each.array)) for each in inputs if each is not None]
    for result in results:
        if result is None:
            continue
        low, high = span(result.array)
        for other, other_low, other_high in before:
            apart = high <= other_low or other_high <= low or not share_elements(result.array, other.array)
            allowed = (result.name, other.name) == in_place and result.lies_as(other)
            if not apart and not allowed:
                raise ValueError(f"{result.name}: overlaps {other.name} in memory; pass separate arrays")
        before.append((result, low, high))
