"""Launches of plans on tensors: their layouts and dtypes, the memory that torch allocates, and torch's stream.

The functions of this module compute on memory. What differentiates, transforms or compiles must not see them: it sees
the operators of `cunorm.torch.operators`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cunorm.ops.registry import plan
from cunorm.runtime.checks import parameter_dtypes
from cunorm.runtime.plans import Plan

#: The dtypes that kernels read and write, with cunorm's names.
NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
#: The dtypes that gamma and beta may have, by the dtype of x.
PARAMETERS = {
    dtype: tuple(one for one, named in NAMES.items() if named in parameter_dtypes(name))
    for dtype, name in NAMES.items()
}
#: The types of device with an executor. AMD's GPUs are named "cuda", too.
DEVICES = ("cpu",) if torch.version.hip else ("cpu", "cuda")
#: Maximum number of cached launches. A model has few problems; one that pads nothing may have many.
KEPT = 4096


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics and of the arithmetic for tensors of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def data_format(x: Tensor) -> str | None:
    """The order in which an (N, C, ...) tensor is dense in memory: "NCHW", "NHWC", or None for neither."""
    if x.is_contiguous():
        return "NCHW"
    if x.dim() > 2 and x.permute(0, *range(2, x.dim()), 1).is_contiguous():
        return "NHWC"
    return None


def dense(x: Tensor) -> Tensor:
    """Return an (N, C, ...) tensor itself if kernels read its layout, otherwise a contiguous copy."""
    return x if data_format(x) is not None else x.contiguous()


def as_parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Gamma or beta as kernels read it beside x of a dtype; a copy only if that differs."""
    if parameter is None:
        return None
    if parameter.dtype not in PARAMETERS[dtype]:
        parameter = parameter.to(accumulator(dtype))
    return parameter.contiguous()


def as_parameters(gamma: Tensor | None, beta: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Gamma and beta as kernels read them. Two dtypes become that of the statistics, so that no gradient is narrower.

    Kernels write dgamma and dbeta in one dtype.
    """
    if gamma is not None and beta is not None and gamma.dtype != beta.dtype:
        gamma, beta = gamma.to(accumulator(dtype)), beta.to(accumulator(dtype))
    return as_parameter(gamma, dtype), as_parameter(beta, dtype)


def laid_like(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy with the memory layout of x, which is dense, and its dtype; a copy only if they differ.

    A gradient may be expanded (of a sum), transposed, or contiguous although x is channels-last (of Inductor).
    """
    if dy.stride() == x.stride() and dy.dtype == x.dtype:
        return dy
    if dy.dtype == x.dtype and dy.device == x.device and data_format(dy) == data_format(x):  # strides of sizes of 1
        return dy
    return torch.empty_like(x).copy_(dy)


class Launch:
    """A plan that runs on tensors.

    Parameters
    ----------
    plan : Plan
    arrays, numbers : sequence of str
        Names of the arrays and numbers that a call passes, in this order. Other arrays of the plan are absent, and its
        other numbers 0.
    """

    __slots__ = ("_needs", "_ordinal", "_pick", "plan")

    def __init__(self, plan: Plan, arrays: Sequence[str], numbers: Sequence[str] = ()) -> None:
        self.plan = plan
        given = (*arrays, "workspace", *numbers)
        self._pick = operator.itemgetter(*[given.index(name) if name in given else -1 for name in plan.names])
        self._needs = plan.workspace_nbytes
        self._ordinal = None if plan.place.kind == "cpu" else plan.place.ordinal

    def __call__(self, arrays: Sequence[Tensor | None], numbers: Sequence[float] = ()) -> None:
        """Launch the kernels on torch's current stream of the plan's device, without synchronisation.

        Parameters
        ----------
        arrays : sequence of Tensor or None
            Dense tensors in the layout of the plan, on its device. None: an absent array.
        numbers : sequence of float
        """
        pointers = [0 if array is None else array.data_ptr() for array in arrays]
        workspace = None
        if self._needs:
            # Torch's allocator keeps it for this stream until the kernels are done, and for a graph that is captured.
            device = "cpu" if self._ordinal is None else torch.device("cuda", self._ordinal)
            workspace = torch.empty(self._needs, dtype=torch.uint8, device=device)
        values = self._pick((*pointers, 0 if workspace is None else workspace.data_ptr(), *numbers, 0))
        # The current stream belongs to the thread, and gradients run in threads of their own.
        stream = None if self._ordinal is None else torch.cuda.current_stream(self._ordinal).cuda_stream
        self.plan.launch(values, stream=stream)


@functools.lru_cache(maxsize=KEPT)
def launch_of(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    arrays: tuple[str, ...],
    numbers: tuple[str, ...] = (),
    options: tuple[tuple[str, object], ...] = (),
) -> Launch:
    """The launch of an op, made once.

    Parameters
    ----------
    op : str
        Name of an op of cunorm.
    shape : tuple of int
        Shape of x as torch shows it, (N, C, ...) also for channels-last memory.
    dtype : torch.dtype
        Dtype of x.
    device : torch.device
        "cpu", or a GPU with its index.
    arrays, numbers : tuple of str
        See `Launch`.
    options : tuple of (name, value)
        Options of `cunorm.plan`. Dtypes may be those of torch. ``dtypes`` is a tuple of pairs, which can be a key.
    """
    named: dict[str, Any] = {
        name: NAMES.get(value, value) if isinstance(value, torch.dtype) else value for name, value in options
    }
    if "dtypes" in named:
        named["dtypes"] = {array: NAMES.get(one, one) for array, one in named["dtypes"]}
    if named.get("data_format") == "NHWC":
        shape = (shape[0], *shape[2:], shape[1])
    place = "cpu" if device.type == "cpu" else device.index
    return Launch(plan(op, shape=tuple(shape), dtype=NAMES[dtype], device=place, **named), arrays, numbers)
