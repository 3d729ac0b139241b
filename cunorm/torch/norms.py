"""The four norms in one table: their arrays, what they take, their composites of torch's operators, and their calls.

A norm is called with `Options` and the tensors x, gamma and beta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from cunorm.core.arrays import is_in_range
from cunorm.core.problem import MOST_AXES

from .launches import DEVICES, KEPT, NAMES, PARAMETERS, Launch, accumulator, data_format, laid_like, launch_of

MaybeTensor: TypeAlias = Tensor | None


class Options(NamedTuple):
    """The arguments of a norm that are no tensors.

    Attributes
    ----------
    name : str
        A key of `NORMS`.
    sizes : tuple of int
        The number of groups (GroupNorm), nothing (InstanceNorm), or the trailing sizes of x that make up a row
        (LayerNorm, RMSNorm).
    eps : float
    activation : str or None
    """

    name: str
    sizes: tuple[int, ...]
    eps: float
    activation: str | None = None

    def are_numbers(self) -> bool:
        """Whether the sizes are integers and eps is a real number, of whichever type."""
        return isinstance(self.eps, Real) and all(hasattr(one, "__index__") for one in self.sizes)


@dataclass(frozen=True)
class Norm:
    """A norm: the names of its arrays, and its shapes.

    Attributes
    ----------
    name : str
        Name of the forward op; that of the backward is derived.
    torchs : callable
        (options, x, gamma, beta) -> y by torch's own function, without the activation.
    rows : bool
        Whether it normalises trailing axes, of contiguous memory; otherwise channels, in two memory layouts.
    stats, gradients : tuple of str
        The statistics that a forward returns after y, and the results of a backward.
    activated : bool
        Whether an activation may be fused.
    """

    name: str
    torchs: Callable[[Options, Tensor, MaybeTensor, MaybeTensor], Tensor]
    rows: bool
    stats: tuple[str, ...] = ("mean", "rstd")
    gradients: tuple[str, ...] = ("dx", "dgamma", "dbeta")
    activated: bool = False

    @property
    def backward(self) -> str:
        """The name of the backward op."""
        return f"{self.name}_backward"

    def stats_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The shape of the statistics of an x."""
        if self.rows:
            return [*shape[: len(shape) - len(sizes)], *[1] * len(sizes)]
        return [shape[0], *(sizes or shape[1:2])]

    def parameter_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The shape of gamma and beta."""
        return list(sizes) if self.rows else [shape[1]]

    def format_of(self, x: Tensor) -> str | None:
        """The memory layout in which kernels read x, or None if x has to be copied."""
        if self.rows:
            return "NCHW" if x.is_contiguous() else None
        return data_format(x)

    def dense(self, x: Tensor) -> Tensor:
        """Return x itself if kernels read its layout, otherwise a contiguous copy."""
        return x if self.format_of(x) is not None else x.contiguous()

    def takes(self, options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> bool:
        """Whether cunorm computes a call. Other calls are left to torch's function, which computes them or raises.

        Torch raises where all groups together have one value, so these are left to it.
        """
        if not (x.layout == torch.strided and x.dtype in NAMES and x.device.type in (*DEVICES, "meta")):
            return False
        if not torch.compiler.is_compiling() and not options.are_numbers():
            return False
        least = 1 if self.rows else 2
        if not (
            least <= x.dim() <= MOST_AXES
            and 0 <= options.eps < math.inf
            and is_in_range(options.eps, NAMES[accumulator(x.dtype)])
            and self._takes_sizes(x.shape, options.sizes)
        ):
            return False
        expected = self.parameter_shape(x.shape, options.sizes)
        for one in (gamma, beta):
            if one is not None and not (
                list(one.shape) == expected
                and one.device == x.device
                and one.layout == torch.strided
                and one.dtype in NAMES
                and (one.dtype != torch.float64 or x.dtype == torch.float64)
            ):
                return False
        return True

    def _takes_sizes(self, shape: Sequence[int], sizes: Sequence[int]) -> bool:
        if self.rows:
            return 0 < len(sizes) <= len(shape) and list(shape[-len(sizes) :]) == list(sizes) and 0 not in sizes
        channels, positions = shape[1], math.prod(shape[2:])
        if not sizes:
            return channels > 0 and positions != 1
        if sizes[0] <= 0 or channels == 0 or channels % sizes[0] != 0:
            return False
        return shape[0] * (channels // sizes[0]) * positions != 1


def _group(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    return functional.group_norm(x, options.sizes[0], gamma, beta, options.eps)


def _instance(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    return functional.instance_norm(x, weight=gamma, bias=beta, eps=options.eps)


def _layer(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    return functional.layer_norm(x, options.sizes, gamma, beta, options.eps)


def _rms(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    return functional.rms_norm(x, options.sizes, gamma, options.eps)


NORMS = {
    norm.name: norm
    for norm in (
        Norm("group_norm", _group, rows=False, activated=True),
        Norm("instance_norm", _instance, rows=False),
        Norm("layer_norm", _layer, rows=True),
        Norm("rms_norm", _rms, rows=True, stats=("rstd",), gradients=("dx", "dgamma")),
    )
}


def by_torch(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    """The norm and its activation by torch's own functions."""
    y = NORMS[options.name].torchs(options, x, gamma, beta)
    return y if options.activation is None else functional.silu(y)


def composite(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Tensor:
    """What the kernels compute, by torch's functions: in the precision of the statistics, rounded once."""
    wide = accumulator(x.dtype)
    gamma, beta = (None if one is None else one.to(wide) for one in (gamma, beta))
    return by_torch(options, x.to(wide), gamma, beta).to(x.dtype)


class Call:
    """The calls of a norm on tensors of the same shapes, strides, dtypes and devices.

    Parameters
    ----------
    options : Options
    x, gamma, beta : Tensor
        Tensors of such a call.

    Attributes
    ----------
    options : Options
    norm : Norm
    ready : bool
        Whether cunorm computes such calls, x is dense, and gamma and beta are as kernels read them. Only then the
        methods work.
    """

    def __init__(self, options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> None:
        norm, sizes = NORMS[options.name], options.sizes
        self.options, self.norm, self._stride = options, norm, x.stride()
        given = [one for one in (gamma, beta) if one is not None]
        self.ready = (
            norm.takes(options, x, gamma, beta)
            and x.device.type in DEVICES
            and norm.format_of(x) is not None
            and all(one.is_contiguous() and one.dtype in PARAMETERS[x.dtype] for one in given)
            and len({one.dtype for one in given}) <= 1  # kernels write dgamma and dbeta in one dtype
        )
        if not self.ready:
            return
        self._facts = (tuple(x.shape), x.dtype, x.device)
        self._options: tuple[tuple[str, object], ...] = (("gamma_dtype", None if gamma is None else gamma.dtype),)
        if norm.rows:
            self._options += (("normalized_shape", sizes),)
        else:
            self._options += (("data_format", norm.format_of(x)),)
            self._options += (("num_groups", sizes[0]),) if sizes else ()
            self._options += (("activation", options.activation),) if norm.activated else ()
        self._beta = (("beta_dtype", None if beta is None else beta.dtype),) if "dbeta" in norm.gradients else ()
        self._wide, self._stats = accumulator(x.dtype), norm.stats_shape(x.shape, sizes)
        self._forward = launch_of(
            norm.name, *self._facts, ("x", "gamma", "beta", "y", *norm.stats), ("eps",), (*self._options, *self._beta)
        )
        self._backward: dict[tuple[bool, ...], Launch] = {}
        self._parameter = norm.parameter_shape(x.shape, sizes)
        self._gamma_dtype = self._wide if gamma is None else gamma.dtype
        self._beta_dtype = self._gamma_dtype if beta is None else beta.dtype

    def forward(self, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> list[Tensor]:
        """Compute y and the statistics."""
        stats = [torch.empty(self._stats, dtype=self._wide, device=x.device) for _ in self.norm.stats]
        results = [torch.empty_like(x), *stats]
        self._forward((x, gamma, beta, *results), (self.options.eps,))
        return results

    def reads(self, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor, stats: Sequence[Tensor]) -> bool:
        """Whether `backward` reads saved tensors as they are: hooks may have changed their layouts and dtypes."""
        return (
            x.stride() == self._stride
            and x.dtype == self._facts[1]
            and (gamma is None or (gamma.is_contiguous() and gamma.dtype == self._gamma_dtype))
            and (beta is None or (beta.is_contiguous() and beta.dtype == self._beta_dtype))
            and all(one.is_contiguous() and one.dtype == self._wide for one in stats)
        )

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        gamma: MaybeTensor,
        beta: MaybeTensor,
        stats: Sequence[Tensor],
        mask: tuple[bool, ...],
    ) -> list[MaybeTensor]:
        """Compute the wanted gradients of x, gamma and beta; the others are None."""
        launch = self._backward.get(mask)
        if launch is None:
            launch = self._backward[mask] = self._launch_backward(mask)
        dx = torch.empty_like(x) if mask[0] else None
        parameters = [
            torch.empty(self._parameter, dtype=self._gamma_dtype, device=x.device) if wanted else None
            for wanted in mask[1:]
        ]
        beta = None if self.options.activation is None else beta  # only the derivative of an activation needs it
        launch((laid_like(dy, x), x, gamma, beta, *stats, dx, *parameters))
        if self._beta_dtype != self._gamma_dtype and mask[-1]:
            parameters[-1] = parameters[-1].to(self._beta_dtype)  # type: ignore[union-attr]
        return [dx, *parameters]

    def _launch_backward(self, mask: tuple[bool, ...]) -> Launch:
        arrays = ("dy", "x", "gamma", "beta", *self.norm.stats, *self.norm.gradients)
        options = (*self._options, *(self._beta if self.options.activation else ()), ("output_mask", mask))
        return launch_of(self.norm.backward, *self._facts, arrays, (), options)


_calls: dict[tuple[object, ...], Call] = {}


def call_of(options: Options, x: Tensor, gamma: MaybeTensor, beta: MaybeTensor) -> Call:
    """The `Call` for these tensors, made once. They have memory: none is a fake or a meta tensor."""
    key = (
        options,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        None if gamma is None else (gamma.shape, gamma.stride(), gamma.dtype, gamma.device),
        None if beta is None else (beta.shape, beta.stride(), beta.dtype, beta.device),
    )
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= KEPT:
            _calls.clear()
        call = _calls.setdefault(key, Call(options, x, gamma, beta))
    return call
