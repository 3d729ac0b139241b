"""The checks of the first phases: nulls, dtypes, attributes, shapes and memory, in this order. They return executors.

A check raises `NullPointer` if the documented code is ACLNN_ERR_PARAM_NULLPTR, and TypeError or ValueError if it is
ACLNN_ERR_PARAM_INVALID. A first phase allocates and writes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cunorm.core.arrays import (
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
    sized,
    view_as,
)
from cunorm.ops.batch_norm.api import batch_norm_backward_reduce
from cunorm.ops.group_norm.api import group_norm_backward
from cunorm.ops.registry import plan
from cunorm.runtime.checked_call import OVERLAPS
from cunorm.runtime.checks import check_rank, check_size, direct_layout, memory_order, writable

from .acl_op_executor import AclOpExecutor, NullPointer, Operand

#: The dtypes of these interfaces. Only cunorm's own functions support float64.
DATA = ("float16", "bfloat16", "float32")
#: The documented limit of C / group in training. cunorm has no such limit; `strict_limits` enforces it.
CHANNELS_IN_A_GROUP = 8000

Named = tuple[str, Array]  # the argument's name in the caller's interface


def _all_sized(named: Sequence[Named], size: int, what: str) -> None:
    for name, array in named:
        _sized(name, array, size, what)


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
    """Return the executor of aclnnGroupNormBackward. ``strict`` enforces the documented limit of C / group."""
    tensors = [("gradOut", gradOut), ("input", input)]
    statistics = [("mean", mean), ("rstd", rstd)]
    scale = [] if gamma is None else [("gamma", gamma)]
    outputs = [("gradInput", gradInput), ("gradGammaOut", gradGammaOut), ("gradBetaOut", gradBetaOut)]
    wrong: Exception | None = None
    try:
        wanted = mask("outputMask", outputMask, [name for name, _ in outputs])
    except (TypeError, ValueError) as error:  # raised below: nulls and dtypes are checked before attributes
        wanted, wrong = (False,) * len(outputs), error
    _required([*tensors, *statistics])
    kept = _wanted(outputs, wanted, [f"outputMask[{index}]" for index in range(len(outputs))])
    gradients = kept[1:] if wanted[0] else kept
    same_place([*tensors, *statistics, *scale, *kept])

    data = dtype_name("gradOut", gradOut, DATA)
    one_dtype(*tensors)
    if wanted[0]:
        one_dtype(tensors[0], ("gradInput", gradInput))
    for name, array in [*statistics, *scale, *gradients]:
        dtype_name(name, array, (data, "float32"), f" beside {data} gradOut")

    N, C, HxW = sizes = integer("N", N, 0), integer("C", C, 0), integer("HxW", HxW, 0)
    check_size(sizes, "N * C * HxW")
    groups = integer("group", group)
    if wrong is not None:
        raise wrong
    if C % groups:
        raise ValueError(f"C: {C}, expected a multiple of group, {groups}")
    if strict and C // groups > CHANNELS_IN_A_GROUP:
        raise ValueError(
            f"C / group: {C // groups}, expected at most {CHANNELS_IN_A_GROUP}, the limit that strict_limits enforces"
        )
    _all_sized(tensors, N * C * HxW, "N * C * HxW")
    _all_sized(statistics, N * groups, "N * group")
    _all_sized([*scale, *gradients], C, "C")
    if wanted[0]:
        shape_of("gradInput", gradInput, input.shape, ", the shape of input")
    for name, array in gradients if scale else ():  # any shape is legal without gamma
        shape_of(name, array, gamma.shape, ", the shape of gamma")
    for name, array in kept:
        writable(name, array)

    # cunorm writes dgamma and dbeta in gamma's dtype or, without gamma, in the dtype of the statistics. If gamma (or
    # the statistics) and the outputs have different dtypes, cunorm computes in float32 and rounds narrower outputs.
    owners = statistics if gamma is None else scale
    shared = _common([*owners, *gradients], data)
    saved = shared if gamma is None else _common(statistics, data)
    # Use the shape of input if its first axes are N and C. Then an array that needs a copy is copied only once.
    tensor, asked = _tensors(input, input.shape if input.shape[:2] == (N, C) else sizes, data)
    made = plan(
        "group_norm_backward",
        num_groups=groups,
        gamma_dtype=None if gamma is None else shared,
        output_mask=wanted,
        **asked,
    )
    vector = functools.partial(Operand, shape=(C,), dtype=DTYPES[shared], axes=(0,))
    moments = functools.partial(Operand, shape=(N * groups,), dtype=DTYPES[saved], axes=(0,))
    inputs = [
        *(tensor(*each) for each in tensors),
        *(moments(*each) for each in statistics),
        vector("gamma", gamma) if scale else None,
    ]
    results = [
        (tensor if name == "gradInput" else vector)(name, array) if keep else None
        for (name, array), keep in zip(outputs, wanted, strict=True)
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
    """Return the executor of aclnnBatchNormReduceBackward."""
    tensors = [("gradOut", gradOut), ("input", input)]
    statistics = [("mean", mean), ("invstd", invstd)]
    scale = [] if weight is None else [("weight", weight)]
    outputs = [("sumDy", sumDy), ("sumDyXmu", sumDyXmu), ("gradWeight", gradWeight), ("gradBias", gradBias)]
    names = ("inputG", "inputG", "weightG", "biasG")
    flags = (inputG, inputG, weightG, biasG)
    given = [isinstance(value, (bool, np.bool_)) and bool(value) for value in flags]  # flag() below checks the types
    _required([*tensors, *statistics])
    kept = _wanted(outputs, given, names)
    same_place([*tensors, *statistics, *scale, *kept])

    data = dtype_name("gradOut", gradOut, DATA)
    one_dtype(*tensors)
    for name, array in [*statistics, *scale, *kept]:
        dtype_name(name, array, DATA)
    if given[2]:
        one_dtype((scale or statistics)[0], ("gradWeight", gradWeight))

    wanted = [flag(name, value) for name, value in zip(names, flags, strict=True)]
    check_rank(input.shape, name="input")
    check_size(input.shape, "input")
    C = input.shape[1]
    if C == 0:
        raise ValueError(f"input: shape {input.shape}, expected at least one channel, on axis 1")
    shape_of("gradOut", gradOut, input.shape, ", the shape of input")
    for name, array in [*statistics, *scale, *kept]:
        _sized(name, array, C, "one per channel")
    for name, array in kept:
        writable(name, array)

    tensor, asked = _tensors(input, input.shape, data)
    made = plan("batch_norm_backward_reduce", output_mask=wanted[1:], **asked)
    moments = functools.partial(Operand, shape=(C,), dtype=DTYPES[_common(statistics, data)], axes=(0,))
    # Each sum is rounded once to the dtype of its output. The values of weight are not read.
    inputs = [*(tensor(*each) for each in tensors), *(moments(*each) for each in statistics)]
    results = [
        Operand(name, array, (C,), array.dtype, (0,)) if keep else None
        for (name, array), keep in zip(outputs, wanted, strict=True)
    ]
    unread = [Operand(*named, named[1].shape, named[1].dtype, ()) for named in scale]
    _apart([*inputs, *unread], results, None)
    _, input_g, gamma_g, beta_g = wanted
    call = functools.partial(
        batch_norm_backward_reduce, input_g=input_g, gamma_g=gamma_g, beta_g=beta_g, tile=made.tile
    )
    return AclOpExecutor("aclnnBatchNormReduceBackward", made, call, inputs, results, unread)


# ---- shared helpers -------------------------------------------------------------------------------------------------


def _required(arrays: Sequence[Named]) -> None:
    for name, array in arrays:
        if array is None:
            raise NullPointer(f"{name}: None, expected an array")


def _wanted(outputs: Sequence[Named], flags: Sequence[bool], names: Sequence[str]) -> list[Named]:
    """Return the outputs whose flags are set. Other outputs are ignored. `names` are the names of the flags."""
    for (output, array), wanted, name in zip(outputs, flags, names, strict=True):
        if wanted and array is None:
            raise NullPointer(f"{output}: None, expected an array because {name} is True")
    return [named for named, wanted in zip(outputs, flags, strict=True) if wanted]


def _sized(name: str, array: Array, size: int, what: str) -> None:
    """Check the number of dimensions and the number of elements."""
    check_rank(array.shape, 0, name)
    sized(name, array, size, f"{size} elements, {what}")


def _common(arrays: Sequence[Named], data: str) -> str:
    """Return ``data`` if all arrays have that dtype, else float32. cunorm accepts either one beside ``data``."""
    return data if all(array.dtype == DTYPES[data] for _, array in arrays) else "float32"


def _tensors(x: Array, shape: tuple[int, ...], data: str) -> tuple[Callable[[str, Array], Operand], dict[str, Any]]:
    """Return a function that makes operands of shape (N, C, *) in x's memory order, and the options of the plan."""
    seen = view_as(x, shape)
    layout = "NCHW" if seen is None else direct_layout(seen, "NCHW")
    axes = memory_order(len(shape), "NCHW", layout)
    kind, ordinal = place_of(x)
    asked = {
        "shape": tuple(shape[axis] for axis in axes),
        "dtype": data,
        "data_format": layout,
        "device": "cpu" if kind == "cpu" else ordinal,
    }
    return functools.partial(Operand, shape=shape, dtype=DTYPES[data], axes=axes), asked


def _apart(
    inputs: Sequence[Operand | None], results: Sequence[Operand | None], in_place: tuple[str, str] | None
) -> None:
    """Check that no output overlaps another array.

    ``in_place`` names an output and an input that may have the same elements at the same addresses.
    """
    before = [each for each in inputs if each is not None]
    for result in results:
        if result is None:
            continue
        for other in before:
            allowed = (result.name, other.name) == in_place and result.lies_as(other)
            if not allowed and result.overlaps(other.array, other.span):
                raise ValueError(OVERLAPS.format(result.name, other.name))
        before.append(result)
