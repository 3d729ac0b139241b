"""Helpers of the public contract's tests: problems with small arrays, memory layouts, checks against the oracle."""

from __future__ import annotations

import functools
import inspect
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from cunorm.tuning.verify.oracle import Expected

import cunorm
from cunorm import Tile, reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.core.problem import Problem, accumulator
from cunorm.core.problem import laid_out as memory
from cunorm.ops.registry import OPS

SENTINEL = 200.0  # exact in every dtype

#: One tile per strategy, the same as in the kernel tests, so that few kernels are built.
TILES = {
    "warp": Tile("warp", threads=128, lanes=32, packs_per_thread=8, samples_per_team=1),
    "block": Tile("block", threads=64, groups=1, stages=2, load="cp_async", packs_per_thread=1),
    "split": Tile("split", threads=128, chunk=16),
}


def norm_problem(
    op: str, dtype: str, layout: str, N: int, C: int, HxW: int, group: int, gamma_dtype: str | None = None
) -> Problem:
    """The problem of a norm that returns all its results and has no beta."""
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=None,
        stats_dtype=accumulator(dtype),
        **memory(layout, N, C, HxW, group),
        outputs=OPS[op].results_with(()),
    ).canonical()


def forget_calls() -> None:
    """Empty the caches of checked calls, so that the next call checks all its arguments."""
    for op in OPS.values():
        op.calls.clear()


# ---- arrays of a problem --------------------------------------------------------------------------------------------

#: The flags of batch_norm_backward_reduce. Other gradients have an output_mask instead.
FLAGS = ("input_g", "gamma_g", "beta_g")


@functools.cache
def taken(op: str) -> frozenset[str]:
    """The names of an op's arguments."""
    return frozenset(inspect.signature(getattr(cunorm, op)).parameters)


def invoke(op: str, given: dict[str, Any]) -> Any:
    """Call an op with those of the arguments that it takes."""
    return getattr(cunorm, op)(**{name: value for name, value in given.items() if name in taken(op)})


def tupled(results: Any) -> tuple[Any, ...]:
    """The results of an op as a tuple, also if there is only one."""
    return results if isinstance(results, tuple) else (results,)


class Arrays:
    """The NumPy arrays of one problem: the arguments of a family's ops, and checks of their results.

    The checks use the oracle of the op, with which the tuner verifies candidates. The values are not those of the
    tuner's `inputs_of`: its values have float32 precision even in a float64 problem, so they would not reveal a kernel
    that drops the remaining digits.
    """

    family: ClassVar[str]
    x: Any

    @property
    def dtype(self) -> str:
        """Name of x's dtype."""
        return NAMES[self.x.dtype]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a call that are no arrays."""
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
        """Recompute statistics and sums from the present values of x and dy, rounded to the dtype that stores them."""
        raise NotImplementedError

    def given(self, op: str) -> dict[str, Any]:
        """The arguments of an op's call by name."""
        named = {name: getattr(self, name) for name in (*OPS[op].inputs, *OPS[op].updated)} | self.options
        return {name: value for name, value in named.items() if name in taken(op)}

    def plan(self, op: str, tile: Any, last: bool = False) -> Any:
        """The plan of a call with these arrays. ``last``: channels are innermost in memory."""
        options = {name: value for name, value in self.options.items() if name in OPS[op].takes}
        shape = self.x.shape
        if last:
            shape, options["data_format"] = (shape[0], *shape[2:], shape[1]), "NHWC"
        return cunorm.plan(op, shape=shape, dtype=self.dtype, device="cpu", tile=tile, **options)

    def result(self, op: str, name: str) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a result that the op allocates."""
        if name in ("y", "dx", "h"):
            return self.x.shape, self.x.dtype
        if "dy" not in OPS[op].inputs:
            return self.saved, DTYPES[accumulator(self.dtype)]
        gamma = getattr(self, "gamma", None)
        saved = getattr(self, "mean" if "mean" in OPS[op].inputs else "rstd")
        return self.parameters, (gamma if gamma is not None and name in ("dgamma", "dbeta") else saved).dtype

    def call(self, op: str, executor: Any, **changes: Any) -> Any:
        """Call an op with these arrays on the executor. `changes` replaces or adds arguments.

        Arguments that the op does not take are dropped.
        """
        there = {
            name: executor.put(value) if isinstance(value, np.ndarray) else value
            for name, value in self.given(op).items()
            if name not in changes
        }
        return invoke(op, {**there, **changes})

    def check(self, op: str, results: Any, **numbers: float) -> None:
        """Compare the results of an op on these arrays with its oracle. Results that are None are skipped."""
        spec, (layout, N, C, HxW, group) = OPS[op], self.sizes
        extras = tuple(name for name in spec.extras if getattr(self, name) is not None)
        problem = Problem(
            op=op,
            dtype=self.dtype,
            gamma_dtype=None,
            beta_dtype=None,
            stats_dtype=accumulator(self.dtype),
            **memory(layout, N, C, HxW, group),
            outputs=spec.results_with(extras),
            activation=self.options.get("activation"),
            extras=extras,
        )
        arrays = {name: getattr(self, name) for name in (*spec.inputs, *spec.updated)}
        given = {
            name: value.reshape(-1) if name in ("gamma", "beta") else value
            for name, value in arrays.items()
            if value is not None
        }
        numbers = {name: self.options.get(name, number.default) for name, number in spec.numbers.items()} | numbers
        exact = {one.name: one for one in spec.oracle(problem, given, numbers)}
        for name, came in zip(problem.outputs, tupled(results), strict=True):
            if came is not None:
                one, shape = exact[name], self.result(op, name)[0]
                assert came.shape == shape, f"{name}: shape {came.shape}, expected {shape}"
                assert np.size(one.values) == came.size  # the oracle checks all elements
                moved = layout == "NHWC" and came.ndim > 2 and name in ("y", "dx")
                sentence = Expected(*one, NAMES[came.dtype], moved).fault(came.reshape(-1))
                assert sentence is None, sentence

    def checked(self, op: str, executor: Any, **changes: Any) -> Any:
        """Same as `call`, and compare the results with the oracle."""
        found = self.call(op, executor, **changes)
        self.compare(op, executor, found, **changes)
        return found

    def compare(self, op: str, executor: Any, found: Any, **changes: Any) -> None:
        """Compare the results of such a call with the oracle, and check which results exist and their dtypes."""
        results = tuple(map(executor.get, tupled(found)))
        self.check(op, results, **{name: float(changes[name]) for name in OPS[op].numbers if name in changes})
        assert [came is not None for came in results] == wanted(op, self.given(op) | changes)
        if changes.get("out") is None:
            for name, came in zip(OPS[op].results, results, strict=False):
                asked = changes.get("y_dtype") if name == "y" else None
                dtype = self.result(op, name)[1] if asked is None else np.dtype(asked)
                assert came is None or came.dtype == dtype, f"{name}: {came.dtype}"

    def check_forward(self, *results: Any, **numbers: float) -> None:
        """Compare y, mean and rstd of these arrays with the oracle."""
        self.check(self.family, results, **numbers)

    def check_backward(self, *results: Any) -> None:
        """Compare dx, dgamma and dbeta of these arrays with the oracle. Results that are None are skipped."""
        self.check(f"{self.family}_backward", results)


def flagged(op: str, mask: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a gradient that select its results."""
    return (
        {"output_mask": tuple(mask)[: len(OPS[op].flags)]}
        if "output_mask" in taken(op)
        else dict(zip(FLAGS, mask, strict=True))
    )


def wanted(op: str, given: dict[str, Any]) -> list[bool]:
    """Whether a call with these arguments returns each result or None."""
    if "output_mask" in taken(op):
        return [bool(flag) for flag in given.get("output_mask", (True,) * len(OPS[op].flags))]
    if "input_g" in taken(op):
        inputs, gamma, beta = (bool(given.get(flag, True)) for flag in FLAGS)
        return [inputs, inputs, gamma, beta]
    return [True] * len(OPS[op].results_with([name for name in OPS[op].extras if given.get(name) is not None]))


@dataclass
class GroupArrays(Arrays):
    """Arrays of GroupNorm. Statistics are rounded as a forward call would store them."""

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
    """Random arrays of that shape. The mean of x is about `offset`."""
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
    """Statistics or sums, rounded to the dtype that stores them for tensors of `dtype`."""
    return [each.astype(DTYPES[accumulator(dtype)]) for each in values]


@dataclass
class InstanceArrays(Arrays):
    """Arrays of InstanceNorm. Statistics are rounded as a forward call would store them."""

    family = "instance_norm"

    dy: Any
    x: Any
    mean: Any
    rstd: Any
    gamma: Any
    beta: Any
    data_format: str

    @property
    def options(self) -> dict[str, Any]:
        return {"data_format": self.data_format}

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        N, C = self.saved
        return self.data_format, N, C, self.x.size // max(1, N * C), C or 1

    @property
    def saved(self) -> tuple[int, ...]:
        return len(self.x), self.x.shape[1 if self.data_format == "NCHW" else -1]

    def settle(self) -> None:
        self.mean, self.rstd = _saved(self.dtype, reference.instance_norm(self.x, data_format=self.data_format)[1:])


def instance_arrays(shape: tuple[int, ...] = (2, 8, 3, 3), dtype: str = "float32", **facts: Any) -> InstanceArrays:
    """Random arrays of that shape: those of `group_arrays`, with their own statistics."""
    made = vars(group_arrays(shape, 1, dtype, **facts))
    found = InstanceArrays(**{name: value for name, value in made.items() if name not in ("groups", "activation")})
    found.settle()
    return found


@dataclass
class LayerArrays(Arrays):
    """Arrays of LayerNorm. Statistics are those of x, rounded as a forward call would store them."""

    family = "layer_norm"

    dy: Any
    x: Any
    normalized_shape: Any
    mean: Any
    rstd: Any
    gamma: Any
    beta: Any
    residual: Any = None
    dh: Any = None

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

    def with_extras(self) -> Any:
        """The same arrays with a residual and dh."""
        random = np.random.default_rng(self.x.size + 1)
        residual, dh = (random.standard_normal(self.x.shape).astype(self.x.dtype) for _ in range(2))
        return replace(self, residual=residual, dh=dh)


def layer_arrays(
    shape: tuple[int, ...] = (2, 8, 3, 3),
    normalized_shape: Any = (3, 3),
    dtype: str = "float32",
    *,
    gamma_dtype: str | None = "same",
    seed: int | None = None,
    offset: float = 0.0,
) -> LayerArrays:
    """Random arrays of that shape. The mean of x is about `offset`."""
    random = np.random.default_rng(math.prod(shape) if seed is None else seed)
    made = LayerArrays(*[None] * 2, normalized_shape, *[None] * 4)
    made.x = (random.standard_normal(shape) + offset).astype(DTYPES[dtype])
    made.dy = random.standard_normal(shape).astype(DTYPES[dtype])
    if gamma_dtype is not None:
        given = DTYPES[dtype if gamma_dtype == "same" else gamma_dtype]
        made.gamma, made.beta = (random.standard_normal(made.row).astype(given) for _ in range(2))
    made.settle()
    return made


@dataclass
class RmsArrays(LayerArrays):
    """Arrays of RMSNorm: those of LayerNorm without mean and beta."""

    family = "rms_norm"

    gamma_offset: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "gamma_offset": self.gamma_offset}

    def settle(self) -> None:
        (self.rstd,) = _saved(self.dtype, reference.rms_norm(self.x, self.row)[1:])
        self.mean = self.rstd  # no op of the family takes it


def rms_arrays(shape: tuple[int, ...] = (2, 8, 3, 3), normalized_shape: Any = (3, 3), *args: Any, **named: Any) -> Any:
    """Random arrays, as `layer_arrays` makes them."""
    of_layer = layer_arrays(shape, normalized_shape, *args, **named)
    made = RmsArrays(**vars(of_layer))
    made.settle()
    return made


#: The ops of BatchNorm that take tensors.
BATCH_OPS = ("batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt")


@dataclass
class BatchArrays(Arrays):
    """Arrays of BatchNorm. Statistics and sums are rounded as cunorm stores them."""

    family = "batch_norm"

    dy: Any
    x: Any
    mean: Any
    invstd: Any
    gamma: Any
    beta: Any
    sum_dy: Any
    sum_dy_xmu: Any
    count: Any
    counts: Any = None  # an input of the kernels only: calls pass it as count

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
    """Random arrays of that shape (N, C, *). The mean of x is about `offset`."""
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


#: Memory layouts by name: (namespace, shape, dtype) -> the whole allocation, and the array that is a view of it.
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
    """The same values in that layout. The other elements of the allocation are NaN."""
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
    """Zeros in anonymous memory, whose pages are allocated only when they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), dtype)


def fake_cupy(shape: tuple[int, ...], dtype: Any, *, device: int = 0, address: int = 0x100000) -> Any:
    """A real cupy.ndarray over memory that does not exist. It has a shape, strides and an address; never read it."""
    import cupy

    nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
