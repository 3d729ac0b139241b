"""Shared by the tests of the public contract: problems of small arrays, memory layouts, checks against the oracle."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm import Tile, reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.core.problem import accumulator
from cunorm.runtime.op import Op
from tests.support.tolerance import (
    assert_within,
    backward,
    batch_elemt,
    batch_input,
    batch_reduce,
    batch_stats,
    forward,
    layer_backward,
    layer_forward,
)

SENTINEL = 200.0  # exact in every dtype

#: One tile a strategy, those of the kernel tests, so that few kernels are built.
TILES = {
    "warp": Tile("warp", threads=128, lanes=32, packs_per_thread=8, samples_per_team=1),
    "block": Tile("block", threads=64, groups=1, stages=2, load="cp_async", packs_per_thread=1),
    "split": Tile("split", threads=128, chunk=16),
}


def forget_calls() -> None:
    """Empty the caches of checked calls: the next call is checked from its first argument on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cunorm."):
            for value in list(vars(module).values()):
                if isinstance(value, Op):
                    value.calls.clear()


@dataclass
class GroupArrays:
    """The arrays of one problem, NumPy, with statistics rounded as a forward would have saved them."""

    dy: Any
    x: Any
    mean: Any
    rstd: Any
    gamma: Any
    beta: Any
    groups: int
    data_format: str

    @property
    def dtype(self) -> str:
        return NAMES[self.x.dtype]

    def check_forward(self, y: Any, mean: Any, rstd: Any) -> None:
        """Compare with the oracle of these arrays."""
        exact = reference.group_norm(self.x, self.groups, self.gamma, self.beta, data_format=self.data_format)
        bounds = forward(self.x, self.groups, self.gamma, self.beta, *exact[1:], self.dtype, self.data_format)
        for name, came, want, bound in zip(("y", "mean", "rstd"), (y, mean, rstd), exact, bounds, strict=True):
            assert_within(name, came, want, bound, NAMES[came.dtype])

    def check_backward(self, dx: Any, dgamma: Any, dbeta: Any) -> None:
        """Compare with the oracle of these arrays; None is passed over."""
        exact = reference.group_norm_backward(
            self.dy, self.x, self.mean, self.rstd, self.gamma, num_groups=self.groups, data_format=self.data_format
        )
        bounds = backward(self.dy, self.x, self.mean, self.rstd, self.gamma, self.groups, self.dtype, self.data_format)
        for name, came, want, bound in zip(("dx", "dgamma", "dbeta"), (dx, dgamma, dbeta), exact, bounds, strict=True):
            if came is not None:
                assert_within(name, came, want, bound, NAMES[came.dtype])


def group_arrays(
    shape: tuple[int, ...] = (2, 8, 3, 3),
    groups: int = 2,
    dtype: str = "float32",
    *,
    gamma_dtype: str | None = "same",
    data_format: str = "NCHW",
    seed: int = 0,
) -> GroupArrays:
    """Random arrays of that shape."""
    random = np.random.default_rng(seed)
    C = shape[1] if data_format == "NCHW" else shape[-1]

    def draw(shape: tuple[int, ...], name: str) -> np.ndarray:
        return random.standard_normal(shape).astype(DTYPES[name])

    x, dy = draw(shape, dtype), draw(shape, dtype)
    given = dtype if gamma_dtype == "same" else gamma_dtype
    gamma, beta = (None, None) if given is None else (draw((C,), given), draw((C,), given))
    sums = np.float64 if dtype == "float64" else np.float32
    _, mean, rstd = reference.group_norm(x, groups, data_format=data_format)
    return GroupArrays(dy, x, mean.astype(sums), rstd.astype(sums), gamma, beta, groups, data_format)


@dataclass
class LayerArrays:
    """The arrays of one problem of LayerNorm, NumPy, with statistics rounded as a forward would have saved them."""

    dy: Any
    x: Any
    normalized_shape: Any
    mean: Any
    rstd: Any
    gamma: Any
    beta: Any

    @property
    def row(self) -> tuple[int, ...]:
        """normalized_shape as a tuple of int."""
        return tuple(np.atleast_1d(self.normalized_shape).tolist())

    def check_forward(self, y: Any, mean: Any, rstd: Any, eps: float = 1e-5) -> None:
        """Compare with the oracle of these arrays."""
        exact = reference.layer_norm(self.x, self.row, self.gamma, self.beta, eps=eps)
        bounds = layer_forward(self.x, self.row, self.gamma, self.beta, *exact[1:], NAMES[self.x.dtype])
        for name, came, want, bound in zip(("y", "mean", "rstd"), (y, mean, rstd), exact, bounds, strict=True):
            assert_within(name, came, want, bound, NAMES[came.dtype])

    def check_backward(self, dx: Any, dgamma: Any, dbeta: Any) -> None:
        """Compare with the oracle of these arrays; None is passed over."""
        given = (self.dy, self.x, self.row, self.mean, self.rstd, self.gamma)
        exact, bounds = reference.layer_norm_backward(*given), layer_backward(*given, NAMES[self.x.dtype])
        for name, came, want, bound in zip(("dx", "dgamma", "dbeta"), (dx, dgamma, dbeta), exact, bounds, strict=True):
            if came is not None:
                assert_within(name, came, want, bound, NAMES[came.dtype])


def layer_arrays(
    shape: tuple[int, ...] = (2, 8, 3, 3), normalized_shape: Any = (3, 3), dtype: str = "float32"
) -> LayerArrays:
    """Random arrays of that shape."""
    random = np.random.default_rng(math.prod(shape))
    made = LayerArrays(*[None] * 2, normalized_shape, *[None] * 4)
    made.x, made.dy = (random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    made.gamma, made.beta = (random.standard_normal(made.row).astype(DTYPES[dtype]) for _ in range(2))
    sums = DTYPES[accumulator(dtype)]
    made.mean, made.rstd = (each.astype(sums) for each in reference.layer_norm(made.x, made.row)[1:])
    return made


#: The ops of BatchNorm on tensors: the arrays of a call in order, and count.
BATCH_OPS = {
    "batch_norm_stats": ("x",),
    "batch_norm_elemt": ("x", "mean", "invstd", "gamma", "beta"),
    "batch_norm_backward_reduce": ("dy", "x", "mean", "invstd", "gamma"),
    "batch_norm_backward_elemt": ("dy", "x", "mean", "invstd", "gamma", "sum_dy", "sum_dy_xmu", "count"),
}


@dataclass
class BatchArrays:
    """The arrays of one problem of BatchNorm, NumPy, with statistics and sums rounded as cunorm saves them."""

    dy: Any
    x: Any
    mean: Any
    invstd: Any
    gamma: Any
    beta: Any
    sum_dy: Any
    sum_dy_xmu: Any
    count: float

    def given(self, op: str) -> tuple[Any, ...]:
        """The arguments of an op's call, in order."""
        return tuple(getattr(self, name) for name in BATCH_OPS[op])

    def check(self, op: str, results: Any, eps: float = 1e-5) -> None:
        """Compare the results of an op with the oracle of these arrays; None is passed over."""
        arrays, dtype = self.given(op), NAMES[self.x.dtype]
        exact: Any
        bounds: Any
        if op == "batch_norm_stats":
            exact = reference.batch_norm_stats(self.x, eps=eps)
            bounds = batch_stats(self.x, *exact, dtype)
        elif op == "batch_norm_backward_reduce":
            exact, bounds = reference.batch_norm_backward_reduce(*arrays), batch_reduce(*arrays[:4], dtype)
        elif op == "batch_norm_elemt":
            exact, bounds = (reference.batch_norm_elemt(*arrays),), (batch_elemt(*arrays, dtype),)
        else:
            exact, bounds = (reference.batch_norm_backward_elemt(*arrays),), (batch_input(*arrays, dtype),)
        results = results if isinstance(results, tuple) else (results,)
        for index, (came, want, bound) in enumerate(zip(results, exact, bounds, strict=True)):
            if came is not None:
                assert_within(f"{op}[{index}]", came, want, bound, NAMES[came.dtype])


def batch_arrays(shape: tuple[int, ...] = (4, 8, 3, 3), dtype: str = "float32") -> BatchArrays:
    """Random arrays of that shape (N, C, *)."""
    random = np.random.default_rng(math.prod(shape))
    x, dy = (random.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    gamma, beta = (random.standard_normal(shape[1]).astype(DTYPES[dtype]) for _ in range(2))
    sums = DTYPES[accumulator(dtype)]
    mean, invstd = (each.astype(sums) for each in reference.batch_norm_stats(x))
    totals = (each.astype(sums) for each in reference.batch_norm_backward_reduce(dy, x, mean, invstd)[:2])
    return BatchArrays(dy, x, mean, invstd, gamma, beta, *totals, x.size // max(shape[1], 1))


# ---- memory layouts -------------------------------------------------------------------------------------------------


def _reversed(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty(shape, dtype)
    return base, base[(slice(None, None, -1),) * len(shape)]


def _every_other(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((*shape[:-1], 2 * shape[-1]), dtype)
    return base, base[..., ::2]


def _fortran(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty(shape[::-1], dtype)
    return base, base.T


def _channels_last(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((shape[0], *shape[2:], shape[1]), dtype)
    return base, base.transpose((0, len(shape) - 1, *range(1, len(shape) - 1)))


def _channels_first(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((shape[0], shape[-1], *shape[1:-1]), dtype)
    return base, base.transpose((0, *range(2, len(shape)), 1))


def _misaligned(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty(math.prod(shape) + 1, dtype)
    return base, base[1:].reshape(shape)


def _misaligned_channels_last(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty(math.prod(shape) + 3, dtype)
    last = base[3:].reshape((shape[0], *shape[2:], shape[1]))
    return base, last.transpose((0, len(shape) - 1, *range(1, len(shape) - 1)))


def _padded_rows(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((*shape[:-1], shape[-1] + 1), dtype)
    return base, base[..., :-1]


def _inner_channels(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((shape[0], shape[1] + 3, *shape[2:]), dtype)
    return base, base[:, 1:-2]


def _swapped(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty((*shape[:-2], shape[-1], shape[-2]), dtype)
    return base, base.swapaxes(-1, -2)


def _samples_backwards(xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    base = xp.empty(shape, dtype)
    return base, base[::-1]


#: How an array may lie in memory: (namespace, shape, dtype) -> the memory, and the array in it.
LAYOUTS: dict[str, Callable[[Any, tuple[int, ...], Any], tuple[Any, Any]]] = {
    "reversed": _reversed,
    "every other": _every_other,
    "Fortran": _fortran,
    "channels last": _channels_last,
    "channels first": _channels_first,
    "misaligned": _misaligned,
    "misaligned channels last": _misaligned_channels_last,
    "padded rows": _padded_rows,
    "inner channels": _inner_channels,
    "swapped": _swapped,
    "samples backwards": _samples_backwards,
}


def laid_out(xp: Any, values: Any, layout: str) -> Any:
    """The same values in that layout; what lies between them is NaN."""
    base, view = LAYOUTS[layout](xp, values.shape, values.dtype)
    base.fill(np.nan)
    view[...] = xp.asarray(values)
    return view


def shifted(executor: Any, array: np.ndarray, shift: int) -> Any:
    """A contiguous copy that starts ``shift`` elements into an allocation."""
    whole = executor.xp.zeros(array.size + 16, array.dtype)
    view = whole[shift : shift + array.size].reshape(array.shape)
    view[...] = executor.put(array)
    return view


def sparse(count: int, dtype: Any) -> np.ndarray:
    """Zeros whose pages exist only once they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), dtype)


def fake_cupy(shape: tuple[int, ...], dtype: Any, *, device: int = 0, address: int = 0x100000) -> Any:
    """A real cupy.ndarray over memory that does not exist: it has a shape, strides, a place, and must not be read."""
    import cupy

    nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
