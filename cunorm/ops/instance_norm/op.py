"""InstanceNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

from typing import Any

from cunorm.core.arrays import dtype_name, epsilon, mask
from cunorm.core.opspec import Number, oracle_of
from cunorm.core.problem import LAYOUTS, Problem, accumulator
from cunorm.ops.common.array_specs import (
    BETA,
    FLAGS,
    FORWARD_RESULTS,
    GAMMA,
    GRADIENT_INPUTS,
    GRADIENT_RESULTS,
    Y_TYPES,
    X,
)
from cunorm.ops.group_norm.op import OUTPUTS, checked_backward, checked_forward, group_problem, parameters_asked
from cunorm.runtime.checks import GRADIENTS, chosen, parameter_named, split_axes, y_types
from cunorm.runtime.op import Checked, Op, Request

from .strategies import BACKWARD, FORWARD


def _sizes(shape: tuple[int, ...], data_format: object) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """N, C, HxW and groups, and the shape of the statistics. Without channels there is one group, which has a size."""
    N, C, HxW = split_axes(shape, data_format)
    return (N, C, HxW, C or 1), (N, C)


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    data_format, y_dtype = options
    dtype = dtype_name("x", arrays[0])
    sizes, saved = _sizes(arrays[0].shape, data_format)
    return checked_forward("instance_norm", dtype, arrays, data_format, sizes, saved, y_dtype)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    output_mask, data_format = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", arrays[1])
    sizes = _sizes(arrays[1].shape, data_format)
    return checked_backward("instance_norm_backward", dtype, arrays, wanted, data_format, *sizes)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes, _ = _sizes(asked.shape, asked.data_format)
    facts = (parameters_asked(asked), accumulator(asked.dtype), asked.data_format, sizes, OUTPUTS)
    made = group_problem("instance_norm", asked.dtype, *facts, others=y_types(asked.y_dtype, asked.dtype))
    return made, (asked.data_format, asked.y_dtype)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes, _ = _sizes(asked.shape, asked.data_format)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    outputs = chosen(GRADIENTS, mask("output_mask", asked.output_mask, GRADIENTS))
    facts = ((gamma, None), accumulator(asked.dtype), asked.data_format, sizes, outputs)
    return group_problem("instance_norm_backward", asked.dtype, *facts), (asked.output_mask, asked.data_format)


_FAMILY = "instance_norm"
_SIZES = {"N": "N", "C": "C", "HxW": "HxW"}

INSTANCE_NORM = Op(
    name="instance_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"x": X, "gamma": GAMMA, "beta": BETA},
    results=FORWARD_RESULTS,
    optional=("gamma", "beta"),
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS,
    types=Y_TYPES,
    optional_types=tuple(Y_TYPES),
    group_per_channel=True,
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place={"y": "x"},
    options=("gamma_dtype", "beta_dtype", "data_format", "y_dtype"),
)
INSTANCE_NORM_BACKWARD = Op(
    name="instance_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=GRADIENT_INPUTS,
    results=GRADIENT_RESULTS,
    optional=("gamma",),
    layouts=LAYOUTS,
    flags=FLAGS,
    group_per_channel=True,
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place={"dx": "dy"},
    options=("gamma_dtype", "data_format"),
)
