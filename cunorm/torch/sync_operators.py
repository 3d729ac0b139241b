"""The operators ``torch.ops.cunorm.batch_norm_*``: what a process computes of a synchronised BatchNorm by itself.

Between them torch's functional collectives exchange a packet (`cunorm.distributed.packets`) and sums, so that a
compiler sees every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cunorm.distributed.packets import PacketFormat
from cunorm.ops.batch_norm.op import RUNNING
from cunorm.ops.batch_norm.strategies import SUMS

from .launches import NAMES, accumulator, data_format, dense, laid_like, launch_of
from .norms import MaybeTensor

_LIBRARY = torch.library.Library("cunorm", "FRAGMENT")


def _options(x: Tensor, **dtypes: Any) -> tuple[tuple[str, object], ...]:
    """The options of a plan for x: its layout, and dtypes of parameters."""
    form = data_format(x)
    if form is None:
        raise ValueError(f"x: strides {tuple(x.stride())}, expected a contiguous or channels-last tensor")
    return ("data_format", form), *dtypes.items()


def _format(x: Tensor) -> PacketFormat:
    return PacketFormat(x.device.type == "cpu", NAMES[x.dtype], x.shape[1])


def _of(x: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(x.shape), x.dtype, x.device


def _dtype(parameter: MaybeTensor) -> torch.dtype | None:
    return None if parameter is None else parameter.dtype


def _saved(x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor) -> tuple[Tensor, Tensor, Tensor, MaybeTensor]:
    """Saved tensors as kernels read them: hooks on saved tensors may have changed their layouts."""
    wide = accumulator(x.dtype)
    stats = [one.to(wide).contiguous() for one in (mean, invstd)]
    return dense(x), stats[0], stats[1], None if gamma is None else gamma.contiguous()


def packet(x: Tensor, eps: float) -> Tensor:
    """The packet of this process, int64."""
    C, form = x.shape[1], _format(x)
    made = torch.empty(form.words, dtype=torch.int64, device=x.device)
    made[:1].fill_(x.numel() // C)
    if form.kind is not None:
        made[1] = form.kind
    statistics = made[form.head :].view(accumulator(x.dtype))
    launch = launch_of("batch_norm_stats", *_of(x), ("x", "mean", "invstd"), ("eps",), _options(x))
    launch((x, statistics[:C], statistics[C:]), (eps,))
    return made


def _packet_fake(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(_format(x).words, dtype=torch.int64)


def merge(
    packets: Tensor, x: Tensor, running_mean: MaybeTensor, running_var: MaybeTensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and invstd (C,) of the whole batch, and the counts (world,) of the processes, from packets (world, words).

    The running statistics are updated in place.
    """
    (world, row), C, wide, form = packets.shape, x.shape[1], accumulator(x.dtype), _format(x)
    if form.kind is not None:
        form.check_kinds(packets[:, 1].tolist(), "input")
    numbers = packets.view(wide)[:, form.first :]
    mean, invstd = numbers.new_empty(C), numbers.new_empty(C)
    running = [None if one is None else one.contiguous() for one in (running_mean, running_var)]
    dtypes = tuple((name, one.dtype) for name, one in zip(RUNNING, running, strict=True) if one is not None)
    launch = launch_of(
        "batch_norm_gather_stats",
        (world, C),
        wide,
        x.device,
        ("means", "invstds", "counts", "mean", "invstd", *RUNNING),
        ("eps", "momentum", "means_stride", "invstds_stride", "counts_stride"),
        (("dtypes", dtypes),),
    )
    strides = (numbers.stride(0), numbers.stride(0), row)
    launch((numbers[:, :C], numbers[:, C:], packets, mean, invstd, *running), (eps, momentum, *strides))
    for theirs, ours in zip((running_mean, running_var), running, strict=True):
        if theirs is not None and theirs is not ours:
            theirs.copy_(ours)  # type: ignore[arg-type,unused-ignore]
    return mean, invstd, packets[:, 0].clone()


def _merge_fake(
    packets: Tensor, x: Tensor, running_mean: MaybeTensor, running_var: MaybeTensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    C, wide = x.shape[1], accumulator(x.dtype)
    return x.new_empty(C, dtype=wide), x.new_empty(C, dtype=wide), packets.new_empty(packets.shape[0])


def elemt(x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    """The normalised x."""
    y = torch.empty_like(x)
    options = _options(x, gamma_dtype=_dtype(gamma), beta_dtype=_dtype(beta))
    launch = launch_of("batch_norm_elemt", *_of(x), ("x", "mean", "invstd", "gamma", "beta", "y"), (), options)
    launch((x, mean, invstd, gamma, beta, y))
    return y


def _elemt_fake(x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    return torch.empty_like(x)


def reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums (2, C), dgamma and dbeta of this process; an output that the mask omits is empty."""
    sums, dgamma, dbeta = _reduce_fake(dy, x, mean, invstd, gamma, mask)
    if not any(mask):
        return sums, dgamma, dbeta
    x, mean, invstd, gamma = _saved(x, mean, invstd, gamma)
    results = [*(sums if mask[0] else (None, None)), *(dgamma if mask[1] else None,), *(dbeta if mask[2] else None,)]
    launch = launch_of(
        "batch_norm_backward_reduce",
        *_of(x),
        ("dy", "x", "mean", "invstd", "gamma", *SUMS),
        (),
        (*_options(x, gamma_dtype=_dtype(gamma)), ("output_mask", tuple(mask))),
    )
    launch((laid_like(dy, x), x, mean, invstd, gamma, *results))
    return sums, dgamma, dbeta


def _reduce_fake(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    C, dtype = x.shape[1], mean.dtype if gamma is None else gamma.dtype
    sums = mean.new_empty((2, C if mask[0] else 0))
    dgamma, dbeta = (mean.new_empty(C if wanted else 0, dtype=dtype) for wanted in mask[1:])
    return sums, dgamma, dbeta


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, sums: Tensor, counts: Tensor
) -> Tensor:
    """The gradient of x from the sums over all processes."""
    x, mean, invstd, gamma = _saved(x, mean, invstd, gamma)
    dx = torch.empty_like(x)
    launch = launch_of(
        "batch_norm_backward_elemt",
        *_of(x),
        ("dy", "x", "mean", "invstd", "gamma", *SUMS[:2], "counts", "dx"),
        ("ranks", "counts_stride"),
        (*_options(x, gamma_dtype=_dtype(gamma)), ("dtypes", (("counts", "int64"),))),
    )
    sums, counts = sums.contiguous(), counts.contiguous()
    launch((laid_like(dy, x), x, mean, invstd, gamma, *sums, counts, dx), (counts.numel(), 1))
    return dx


def _input_gradient_fake(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: MaybeTensor, sums: Tensor, counts: Tensor
) -> Tensor:
    return torch.empty_like(dense(x))


_DEFINED: Mapping[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "batch_norm_packet": ("(Tensor x, float eps) -> Tensor", packet, _packet_fake),
    "batch_norm_merge": (
        "(Tensor packets, Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps)"
        " -> (Tensor, Tensor, Tensor)",
        merge,
        _merge_fake,
    ),
    "batch_norm_elemt": (
        "(Tensor x, Tensor mean, Tensor invstd, Tensor? gamma, Tensor? beta) -> Tensor",
        elemt,
        _elemt_fake,
    ),
    "batch_norm_reduce": (
        "(Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor? gamma, bool[] mask) -> (Tensor, Tensor, Tensor)",
        reduce,
        _reduce_fake,
    ),
    "batch_norm_input_gradient": (
        "(Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor? gamma, Tensor sums, Tensor counts) -> Tensor",
        input_gradient,
        _input_gradient_fake,
    ),
}


def _define() -> Any:
    """Define the operators, and return the namespace that has them."""
    for name, (schema, compute, describe) in _DEFINED.items():
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, compute, key)
        torch.library.register_fake(f"cunorm::{name}", describe, lib=_LIBRARY)
    return torch.ops.cunorm


OPERATORS = _define()
