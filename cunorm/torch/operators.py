"""The operators ``torch.ops.cunorm.*``: a forward and a backward of each norm, for what traces, transforms or compiles.

What differentiates them is in `cunorm.torch.differentiation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launches import accumulator, as_parameters
from .norms import NORMS, MaybeTensor, Norm, Options, call_of

LIBRARY = torch.library.Library("cunorm", "FRAGMENT")
_FORWARD = "(Tensor x, Tensor? gamma, Tensor? beta, SymInt[] sizes, float eps, str? activation) -> ({})"
_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? gamma, Tensor? beta, Tensor? mean, Tensor rstd, SymInt[] sizes, float eps,"
    " str? activation, bool[] mask) -> ({})"
)

Operator = Callable[..., Any]


def _forward(norm: Norm) -> Operator:
    def compute(
        x: Tensor, gamma: MaybeTensor, beta: MaybeTensor, sizes: Sequence[int], eps: float, activation: str | None
    ) -> tuple[Tensor, ...]:
        x, (gamma, beta) = norm.dense(x), as_parameters(gamma, beta, x.dtype)
        call = call_of(Options(norm.name, tuple(sizes), eps, activation), x, gamma, beta)
        _expect(call.ready, norm.name, x, gamma, beta)
        return tuple(call.forward(x, gamma, beta))

    return compute


def _forward_fake(norm: Norm) -> Operator:
    def describe(
        x: Tensor, gamma: MaybeTensor, beta: MaybeTensor, sizes: Sequence[int], eps: float, activation: str | None
    ) -> tuple[Tensor, ...]:
        shape = norm.stats_shape(x.shape, sizes)
        stats = [torch.empty(shape, dtype=accumulator(x.dtype), device=x.device) for _ in norm.stats]
        return torch.empty_like(norm.dense(x)), *stats

    return describe


def _backward(norm: Norm) -> Operator:
    def compute(
        dy: Tensor,
        x: Tensor,
        gamma: MaybeTensor,
        beta: MaybeTensor,
        mean: MaybeTensor,
        rstd: Tensor,
        sizes: Sequence[int],
        eps: float,
        activation: str | None,
        mask: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        dtypes = _gradient_dtypes(x, gamma, beta)
        x, (gamma, beta) = norm.dense(x), as_parameters(gamma, beta, x.dtype)
        call = call_of(Options(norm.name, tuple(sizes), eps, activation), x, gamma, beta)
        _expect(call.ready, norm.backward, x, gamma, beta)
        stats = [one.to(x.device, accumulator(x.dtype)).contiguous() for one in (mean, rstd) if one is not None]
        found = call.backward(dy, x, gamma, beta, stats, tuple(mask))
        return tuple(
            x.new_empty(0) if one is None else one.to(dtype) for one, dtype in zip(found, dtypes, strict=False)
        )

    return compute


def _backward_fake(norm: Norm) -> Operator:
    def describe(
        dy: Tensor,
        x: Tensor,
        gamma: MaybeTensor,
        beta: MaybeTensor,
        mean: MaybeTensor,
        rstd: Tensor,
        sizes: Sequence[int],
        eps: float,
        activation: str | None,
        mask: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        shape, dtypes = norm.parameter_shape(x.shape, sizes), _gradient_dtypes(x, gamma, beta)
        parameters = [
            x.new_empty(shape, dtype=dtype) if wanted else x.new_empty(0)
            for dtype, wanted in zip(dtypes[1:], mask[1:], strict=False)
        ]
        return torch.empty_like(norm.dense(x)) if mask[0] else x.new_empty(0), *parameters

    return describe


def _gradient_dtypes(x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> tuple[torch.dtype, ...]:
    """The dtypes of dx, dgamma and dbeta. That of an absent parameter's gradient is the other parameter's."""
    dgamma = accumulator(x.dtype) if gamma is None else gamma.dtype
    return x.dtype, dgamma, dgamma if beta is None else beta.dtype


def _expect(ready: bool, name: str, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> None:
    if not ready:
        came = [f"{one.dtype} {tuple(one.shape)} on {one.device}" for one in (x, gamma, beta) if one is not None]
        raise ValueError(f"cunorm::{name}: no kernel for {', '.join(came)}; use the functions of cunorm.torch")


def _define(norm: Norm) -> tuple[Operator, Operator]:
    """Define the two operators of a norm, and return them."""
    for name, schema, results, compute, describe in (
        (norm.name, _FORWARD, 1 + len(norm.stats), _forward(norm), _forward_fake(norm)),
        (norm.backward, _BACKWARD, len(norm.gradients), _backward(norm), _backward_fake(norm)),
    ):
        LIBRARY.define(name + schema.format(", ".join(["Tensor"] * results)), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, compute, key)
        torch.library.register_fake(f"cunorm::{name}", describe, lib=LIBRARY)
    return getattr(torch.ops.cunorm, norm.name).default, getattr(torch.ops.cunorm, norm.backward).default


#: Name of a norm -> its forward and its backward operator.
OPERATORS = {name: _define(norm) for name, norm in NORMS.items()}
