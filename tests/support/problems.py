"""Shared by the tests of the public contract: problems of small arrays, memory layouts, checks against the oracle."""

from __future__ import annotations

import functools
import inspect
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from cunorm.tuning.verify.oracle import Expected

import cunorm
from cunorm import Tile, reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.core.problem import Problem, accumulator
from cunorm.core.problem import laid_out as memory
from cunorm.ops.registry import OPS
from cunorm.runtime.op import Op

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


# ---- arrays of a problem --------------------------------------------------------------------------------------------

#: Numbers of a call that leaves them out.
DEFAULTS = {"eps": 1e-5, "momentum": 0.1}
#: The flags of batch_norm_backward_reduce, for which other gradients have an output_mask.
FLAGS = ("input_g", "gamma_g", "beta_g")


@functools.cache
def taken(op: str) -> frozenset[str]:
    """The names of an op's arguments."""
    return frozenset(inspect.signature(getattr(cunorm, op)).parameters)


def invoke(op: str, given: dict[str, Any]) -> Any:
    """Call an op with those of the arguments that it takes."""
    return getattr(cunorm, op)(**{name: value for name, value in given.items() if name in taken(op)})


def tupled(results: Any) -> tuple[Any, ...]:
    """The results of an op, also where it is one."""
    return results if isinstance(results, tuple) else (results,)


class Arrays:
    """The arrays of one problem, NumPy: how the ops of a family take them, and what their results have to be.

    The oracle is the ops' own, which the tuner verifies candidates with. The values are not `inputs_of` the tuner:
    those are float32 in a float64 problem too, and would not show a kernel that drops the rest.
    """

    family: ClassVar[str]
    x: Any

    @property
    def dtype(self) -> str:
        """Of x."""
        return NAMES[self.x.dtype]

    @property
    def options(self) -> dict[str, Any]:
        """What a call takes besides arrays."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        """Layout, N, C, HxW and groups of the problem."""
        raise NotImplementedError

    @property
    def saved(self) -> tuple[int, ...]:
        """The shape of mean and rstd."""
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[int, ...]:
        """The shape of gamma and beta."""
        return (self.sizes[2],)

    def settle(self) -> None:
        """Make statistics and sums those of x as it is, rounded as they are saved."""
        raise NotImplementedError

    def given(self, op: str) -> dict[str, Any]:
        """The arguments of an op's call by name."""
        named = {name: getattr(self, name) for name in (*OPS[op].inputs, *OPS[op].updated)} | self.options
        return {name: value for name, value in named.items() if name in taken(op)}

    def plan(self, op: str, tile: Any, last: bool = False) -> Any:
        """The plan of a call of these arrays; ``last``: with channels innermost."""
        options = {name: value for name, value in self.options.items() if name in OPS[op].takes}
        shape = self.x.shape
        if last:
            shape, options["data_format"] = (shape[0], *shape[2:], shape[1]), "NHWC"
        return cunorm.plan(op, shape=shape, dtype=self.dtype, device="cpu", tile=tile, **options)

    def result(self, op: str, name: str) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a result that the op allocates."""
        if name in ("y", "dx"):
            return self.x.shape, self.x.dtype
        if "dy" not in OPS[op].inputs:
            return self.saved, DTYPES[accumulator(self.dtype)]
        gamma = getattr(self, "gamma", None)
        whose = gamma if gamma is not None and name in ("dgamma", "dbeta") else self.mean  # type: ignore[attr-defined]
        return self.parameters, whose.dtype

    def call(self, op: str, executor: Any, **changes: Any) -> Any:
        """Call an op with these arrays there. Changes are other arguments, and arrays that lie elsewhere.

        What the op does not take of the changes is left out.
        """
        there = {
            name: executor.put(value) if isinstance(value, np.ndarray) else value
            for name, value in self.given(op).items()
            if name not in changes
        }
        return invoke(op, {**there, **changes})

    def check(self, op: str, results: Any, **numbers: float) -> None:
        """Compare the results of an op with its oracle of these arrays; None is passed over."""
        spec, (layout, N, C, HxW, group) = OPS[op], self.sizes
        problem = Problem(
            op=op,
            dtype=self.dtype,
            gamma_dtype=None,
            beta_dtype=None,
            stats_dtype=accumulator(self.dtype),
            **memory(layout, N, C, HxW, group),
            outputs=tuple(spec.results),
            activation=self.options.get("activation"),
        )
        arrays = {name: getattr(self, name) for name in (*spec.inputs, *spec.updated)}
        given = {
            name: value.reshape(-1) if name in ("gamma", "beta") else value
            for name, value in arrays.items()
            if value is not None
        }
        numbers = {name: self.options.get(name, DEFAULTS.get(name, math.nan)) for name in spec.numbers} | numbers
        exact = {one.name: one for one in spec.oracle(problem, given, numbers)}
        for name, came in zip(spec.results, tupled(results), strict=True):
            if came is not None:
                one, shape = exact[name], self.result(op, name)[0]
                assert came.shape == shape, f"{name}: shape {came.shape}, expected {shape}"
                assert np.size(one.values) == came.size  # the oracle looks at all of it
                moved = layout == "NHWC" and came.ndim > 2 and name in ("y", "dx")
                sentence = Expected(*one, NAMES[came.dtype], moved).fault(came.reshape(-1))
                assert sentence is None, sentence

    def checked(self, op: str, executor: Any, **changes: Any) -> Any:
        """What the same `call` gives, compared with the oracle."""
        found = self.call(op, executor, **changes)
        self.compare(op, executor, found, **changes)
        return found

    def compare(self, op: str, executor: Any, found: Any, **changes: Any) -> None:
        """Compare what such a call gave with the oracle: each result is there if it is wanted, and of its dtype."""
        results = tuple(map(executor.get, tupled(found)))
        self.check(op, results, **{name: float(changes[name]) for name in OPS[op].numbers if name in changes})
        assert [came is not None for came in results] == wanted(op, changes)
        if changes.get("out") is None:
            for name, came in zip(OPS[op].results, results, strict=True):
                assert came is None or came.dtype == self.result(op, name)[1], f"{name}: {came.dtype}"

    def check_forward(self, *results: Any, **numbers: float) -> None:
        """Compare y, mean and rstd with the oracle of these arrays."""
        self.check(self.family, results, **numbers)

    def check_backward(self, *results: Any) -> None:
        """Compare dx, dgamma and dbeta with the oracle of these arrays; None is passed over."""
        self.check(f"{self.family}_backward", results)


def flagged(op: str, mask: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a gradient that say which results are wanted."""
    return {"output_mask": tuple(mask)} if "output_mask" in taken(op) else dict(zip(FLAGS, mask, strict=True))


def wanted(op: str, given: dict[str, Any]) -> list[bool]:
    """Which results a call with these arguments gives."""
    if "output_mask" in taken(op):
        return [bool(flag) for flag in given.get("output_mask", (True,) * 3)]
    if "input_g" in taken(op):
        inputs, gamma, beta = (bool(given.get(flag, True)) for flag in FLAGS)
        return [inputs, inputs, gamma, beta]
    return [True] * len(OPS[op].results)


@dataclass
class GroupArrays(Arrays):
    """Of GroupNorm, with statistics rounded as a forward would have saved them."""

    family = "group_norm"

    dy: Any
    x: Any
    mean: Any
    rstd: Any
    gamma: Any
    beta: Any
    groups: int
    data_format: str
    activation: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"num_groups": self.groups, "data_format": self.data_format, "activation": self.activation}

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        N, C = self.x.shape[0], self.x.shape[1 if self.data_format == "NCHW" else -1]
        return self.data_format, N, C, self.x.size // max(1, N * C), self.groups

    @property
    def saved(self) -> tuple[int, ...]:
        return (len(self.x), self.groups)

    def settle(self) -> None:
        exact = reference.group_norm(self.x, self.groups, data_format=self.data_format)
        self.mean, self.rstd = _saved(self.dtype, exact[1:])


def group_arrays(
    shape: tuple[int, ...] = (2, 8, 3, 3),
    groups: int = 2,
    dtype: str = "float32",
    *,
    gamma_dtype: str | None = "same",
    data_format: str = "NCHW",
    seed: int = 0,
    offset: float = 0.0,
) -> GroupArrays:
    """Random arrays of that shape, x so far from 0."""
    random = np.random.default_rng(seed)
    C = shape[1] if data_format == "NCHW" else shape[-1]
    x = (random.standard_normal(shape) + offset).astype(DTYPES[dtype])
    dy = random.standard_normal(shape).astype(DTYPES[dtype])
    gamma = beta = None
    if gamma_dtype is not None:
        given = DTYPES[dtype if gamma_dtype == "same" else gamma_dtype]
        gamma, beta = (random.standard_normal(C).astype(given) for _ in range(2))
    made = GroupArrays(dy, x, None, None, gamma, beta, groups, data_format)
    made.settle()
    return made


def _saved(dtype: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Statistics or sums, rounded as they are saved of that dtype."""
    return [each.astype(DTYPES[accumulator(dtype)]) for each in values]


@dataclass
class LayerArrays(Arrays):
    """Of LayerNorm, with statistics rounded as a forward would have saved them."""

    family = "layer_norm"

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

    @property
    def options(self) -> dict[str, Any]:
        return {"normalized_shape": self.normalized_shape}

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        length = math.prod(self.row)
        return "NCHW", self.x.size // length, length, 1, 1

    @property
    def saved(self) -> tuple[int, ...]:
        return (*self.x.shape[: self.x.ndim - len(self.row)], *(1,) * len(self.row))

    @property
    def parameters(self) -> tuple[int, ...]:
        return self.row

    def settle(self) -> None:
        self.mean, self.rstd = _saved(self.dtype, reference.layer_norm(self.x, self.row)[1:])


def layer_arrays(
    shape: tuple[int, ...] = (2, 8, 3, 3),
    normalized_shape: Any = (3, 3),
    dtype: str = "float32",
    *,
    gamma_dtype: str | None = "same",
    seed: int | None = None,
    offset: float = 0.0,
) -> LayerArrays:
    """Random arrays of that shape, x so far from 0."""
    random = np.random.default_rng(math.prod(shape) if seed is None else seed)
    made = LayerArrays(*[None] * 2, normalized_shape, *[None] * 4)
    made.x = (random.standard_normal(shape) + offset).astype(DTYPES[dtype])
    made.dy = random.standard_normal(shape).astype(DTYPES[dtype])
    if gamma_dtype is not None:
        given = DTYPES[dtype if gamma_dtype == "same" else gamma_dtype]
        made.gamma, made.beta = (random.standard_normal(made.row).astype(given) for _ in range(2))
    made.settle()
    return made


#: The ops of BatchNorm on tensors.
BATCH_OPS = ("batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt")


@dataclass
class BatchArrays(Arrays):
    """Of BatchNorm, with statistics and sums rounded as cunorm saves them."""

    family = "batch_norm"

    dy: Any
    x: Any
    mean: Any
    invstd: Any
    gamma: Any
    beta: Any
    sum_dy: Any
    sum_dy_xmu: Any
    count: float

    @property
    def options(self) -> dict[str, Any]:
        return {"count": self.count}

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        N, C = self.x.shape[:2]
        return "NCHW", N, C, self.x.size // max(1, N * C), C

    @property
    def saved(self) -> tuple[int, ...]:
        return self.parameters

    def settle(self) -> None:
        self.mean, self.invstd = _saved(self.dtype, reference.batch_norm_stats(self.x))
        sums = reference.batch_norm_backward_reduce(self.dy, self.x, self.mean, self.invstd)
        self.sum_dy, self.sum_dy_xmu = _saved(self.dtype, sums[:2])


def batch_arrays(
    shape: tuple[int, ...] = (4, 8, 3, 3),
    dtype: str = "float32",
    *,
    gamma_dtype: str | None = "same",
    seed: int | None = None,
    offset: float = 0.0,
) -> BatchArrays:
    """Random arrays of that shape (N, C, *), x so far from 0."""
    random = np.random.default_rng(math.prod(shape) if seed is None else seed)
    x = (random.standard_normal(shape) + offset).astype(DTYPES[dtype])
    dy = random.standard_normal(shape).astype(DTYPES[dtype])
    gamma = beta = None
    if gamma_dtype is not None:
        given = DTYPES[dtype if gamma_dtype == "same" else gamma_dtype]
        gamma, beta = (random.standard_normal(shape[1]).astype(given) for _ in range(2))
    made = BatchArrays(dy, x, None, None, gamma, beta, None, None, x.size // max(shape[1], 1))
    made.settle()
    return made


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
