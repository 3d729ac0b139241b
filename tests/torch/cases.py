"""The four norms as cases: cunorm's and torch's function of each, on small tensors that share their kernels' builds."""

from __future__ import annotations

import contextlib
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cunorm.torch import functional
from cunorm.torch.norms import Options

GROUPS = 4
SHAPE = (2, 8, 3, 5)
#: Relative error of a dtype in a comparison with float64, and the absolute error for values near 1.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A norm: (x, *parameters) -> y by cunorm and by torch, the shapes of its parameters, and its options."""

    name: str
    mine: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    parameters: tuple[tuple[int, ...], ...]
    options: Options

    def __str__(self) -> str:
        return self.name


def _silu(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
    return F.silu(F.group_norm(x, GROUPS, w, b))


CASES = [
    Case(
        "group_norm",
        lambda x, w=None, b=None: functional.group_norm(x, GROUPS, w, b),
        lambda x, w=None, b=None: F.group_norm(x, GROUPS, w, b),
        ((8,), (8,)),
        Options("group_norm", (GROUPS,), 1e-5),
    ),
    Case(
        "group_norm_silu",
        lambda x, w=None, b=None: functional.group_norm(x, GROUPS, w, b, activation="silu"),
        _silu,
        ((8,), (8,)),
        Options("group_norm", (GROUPS,), 1e-5, "silu"),
    ),
    Case(
        "instance_norm",
        lambda x, w=None, b=None: functional.instance_norm(x, weight=w, bias=b),
        lambda x, w=None, b=None: F.instance_norm(x, weight=w, bias=b),
        ((8,), (8,)),
        Options("instance_norm", (), 1e-5),
    ),
    Case(
        "layer_norm",
        lambda x, w=None, b=None: functional.layer_norm(x, (3, 5), w, b),
        lambda x, w=None, b=None: F.layer_norm(x, (3, 5), w, b),
        ((3, 5), (3, 5)),
        Options("layer_norm", (3, 5), 1e-5),
    ),
    Case(
        "rms_norm",
        lambda x, w=None: functional.rms_norm(x, (3, 5), w, 1e-6),
        lambda x, w=None: F.rms_norm(x, (3, 5), w, 1e-6),
        ((3, 5),),
        Options("rms_norm", (3, 5), 1e-6),
    ),
]
#: Whether Inductor and Triton can compile what they write in C and C++.
CAN_INDUCE = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
#: Filters for what torch warns about while it compiles: itself, and, in 2.11 on a machine with a GPU, matrix products.
COMPILER_WARNINGS = (
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:The CUDA Graph is empty:UserWarning",  # one that torch captures itself, to make its pool of memory
)
#: The cases whose norm takes channels, in two memory layouts.
CHANNELS = CASES[:3]


def tensors(
    case: Case, dtype: torch.dtype = torch.float32, shape: Sequence[int] = SHAPE, seed: int = 0
) -> tuple[Tensor, ...]:
    """x and the parameters of a case, all of one dtype, that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(one, generator=generator, dtype=torch.float64) for one in (shape, *case.parameters)]
    return tuple(one.to(dtype).requires_grad_() for one in made)


def random(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """A tensor of normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(came: Any, expected: Any, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    """Assert that tensors are equal up to the tolerance of a dtype, relative to the largest value of each."""
    if isinstance(came, (tuple, list)):
        assert len(came) == len(expected)
        for one, other in zip(came, expected, strict=True):
            close(one, other, dtype, factor)
        return
    assert (came is None) == (expected is None)
    if came is None:
        return
    assert came.shape == expected.shape
    if not came.numel():
        return
    tolerance = TOLERANCES[dtype] * factor
    largest = expected.detach().double().nan_to_num().abs().max().item()
    torch.testing.assert_close(
        came.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance * (largest + 1e-30),
        equal_nan=True,
    )  # fmt: skip


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Operators of torch that wait for the GPU raise. A copy from pageable memory is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first use warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exact(case: Case, given: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """y and the gradients by torch's function in float64, on the same rounded inputs."""
    wide = [one.detach().double().requires_grad_() for one in given]
    y = case.theirs(*wide)
    return y, *torch.autograd.grad(y, wide, dy.double())
