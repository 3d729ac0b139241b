"""Specifications of the arrays that several ops share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cunorm.core.opspec import ArraySpec

#: A tensor in the problem's layout, such as y and dx.
TENSOR = ArraySpec(("N", "C", "HxW"), ("dtype",), tensor=True)
#: The result of a forward, in x's dtype or, from 16-bit x, in float32.
Y = replace(TENSOR, dtype=("y_t", "dtype"))
Y_TYPES: Mapping[str, tuple[str, ...]] = {"y_t": ("float32",)}
X, DY = replace(TENSOR, values="slices"), replace(TENSOR, values="gradient")
#: Parameters: one element per channel, in the dtype that the caller passes.
GAMMA = ArraySpec(("C",), ("gamma_dtype",), values="gamma")
BETA = ArraySpec(("C",), ("beta_dtype",))
#: Gradients of gamma and beta have gamma's dtype, or the dtype of the statistics if gamma is absent.
PARAMETER_GRADIENT = ArraySpec(("C",), ("gamma_dtype", "stats_dtype"))
#: Statistics: one element per sample and group.
MEAN = ArraySpec(("N", "group"), ("stats_dtype",), values="mean")
RSTD = replace(MEAN, values="rstd")
#: Arrays of a forward and of its gradients, for ops with statistics per sample and group.
FORWARD_RESULTS: Mapping[str, ArraySpec] = {"y": Y, "mean": MEAN, "rstd": RSTD}
GRADIENT_INPUTS: Mapping[str, ArraySpec] = {"dy": DY, "x": X, "mean": MEAN, "rstd": RSTD, "gamma": GAMMA}
GRADIENT_RESULTS: Mapping[str, ArraySpec] = {"dx": TENSOR, "dgamma": PARAMETER_GRADIENT, "dbeta": PARAMETER_GRADIENT}
#: The tensor that a forward adds to x, their sum h, and the gradient that reaches h past the norm.
RESIDUAL: Mapping[str, ArraySpec] = {"residual": replace(TENSOR, values="normal")}
H: Mapping[str, ArraySpec] = {"h": TENSOR}
DH: Mapping[str, ArraySpec] = {"dh": replace(TENSOR, values="normal")}
#: Flags of the gradients' output mask: one flag per result.
FLAGS: Mapping[str, tuple[str, ...]] = {name: (name,) for name in GRADIENT_RESULTS}


def of_rows(arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Return the specifications for ops on rows, which have no positions: tensors are (N, C)."""
    return {name: replace(array, sizes=("N", "C")) if array.tensor else array for name, array in arrays.items()}
