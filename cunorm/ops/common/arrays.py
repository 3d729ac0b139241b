"""The arrays that several ops have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cunorm.core.opspec import ArraySpec

#: A tensor in the problem's layout; y and dx are such.
TENSOR = ArraySpec(("N", "C", "HxW"), ("dtype",), tensor=True)
X, DY = replace(TENSOR, values="slices"), replace(TENSOR, values="gradient")
#: An element a channel, as it is given.
GAMMA = ArraySpec(("C",), ("gamma_dtype",), values="gamma")
BETA = ArraySpec(("C",), ("beta_dtype",))
#: Gradients of gamma and beta have gamma's dtype, or that of the statistics without it.
PARAMETER_GRADIENT = ArraySpec(("C",), ("gamma_dtype", "stats_dtype"))
#: Statistics of a group of one sample.
MEAN = ArraySpec(("N", "group"), ("stats_dtype",), values="mean")
RSTD = replace(MEAN, values="rstd")
#: The arrays of a forward, and of its gradients, where statistics are of a group.
FORWARD_RESULTS: Mapping[str, ArraySpec] = {"y": TENSOR, "mean": MEAN, "rstd": RSTD}
GRADIENT_INPUTS: Mapping[str, ArraySpec] = {"dy": DY, "x": X, "mean": MEAN, "rstd": RSTD, "gamma": GAMMA}
GRADIENT_RESULTS: Mapping[str, ArraySpec] = {"dx": TENSOR, "dgamma": PARAMETER_GRADIENT, "dbeta": PARAMETER_GRADIENT}
#: The flags of their output mask: each result has its own.
FLAGS: Mapping[str, tuple[str, ...]] = {name: (name,) for name in GRADIENT_RESULTS}


def of_rows(arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The same arrays where samples are rows without positions: tensors are (N, C)."""
    return {name: replace(array, sizes=("N", "C")) if array.tensor else array for name, array in arrays.items()}
