"""Make the arrays of a case, call its op, and compare the results with the oracle. case.py defines a case."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES, NAMES
from cunorm.core.problem import accumulator
from cunorm.ops.registry import OPS
from tests.support import problems
from tests.support.tolerance import assert_within

if TYPE_CHECKING:
    from tests.battery.case import Case

#: Added to x. If x were around 0, zeros that a kernel reads or counts outside a slice would hardly change a result.
OFFSET = 3.0
#: An outlier of this size is no valid shift for the other elements: their squares relative to it cancel.
OUTLIER = 1e5


def placed(values: np.ndarray, shift: int = 0, last: bool = False) -> np.ndarray:
    """Copy into a new allocation that starts `shift` elements before the array and ends at its end.

    ``last`` puts the second axis innermost. The elements before the array are NaN.
    """
    inner = np.moveaxis(values, 1, -1) if last else values
    whole = np.empty(shift + values.size, values.dtype)
    if shift:
        whole[:shift] = np.nan
    view = whole[shift:].reshape(inner.shape)
    view[...] = inner
    return np.moveaxis(view, -1, 1) if last else view


def emptied(shape: tuple[int, ...], dtype: Any, shift: int = 0, last: bool = False) -> np.ndarray:
    """An array for a result, full of NaN."""
    return placed(np.full(shape, np.nan).astype(dtype), shift, last)


class OnGpu:
    """Copies of NumPy arrays on the GPU, at the same places of their allocations."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._copied: list[tuple[np.ndarray, Any]] = []

    def put(self, view: Any) -> Any:
        """The copy of an array. Two views of one allocation are copied to one allocation. None stays None."""
        if not isinstance(view, np.ndarray):
            return view
        whole = view if view.base is None else view.base
        copied = next((copy for seen, copy in self._copied if seen is whole), None)
        if copied is None:
            copied = self.xp.asarray(whole)
            self._copied.append((whole, copied))
        offset = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        return self.xp.ndarray(view.shape, view.dtype, memptr=copied.data + offset, strides=view.strides)

    def get(self) -> None:
        """Copy the contents of all allocations back to the NumPy arrays."""
        for whole, copied in self._copied:
            whole[...] = copied.get()


class InPlace:
    """NumPy arrays as they are, for the CPU executor."""

    def put(self, view: Any) -> Any:
        """The array itself."""
        return view

    def get(self) -> None:
        """Nothing: the calls have changed the arrays themselves."""


def _parameter(case: Case, given: str | None) -> str | None:
    """The dtype of gamma or beta."""
    return case.dtype if given == "same" else given


def _moved(case: Case, made: Any) -> Any:
    """The arrays with OFFSET added to x, and with the values and dtypes of the case. Absent parameters are None."""
    x = (made.x.astype(np.float64) + OFFSET).astype(made.x.dtype)
    if case.constant is not None:
        x[...] = case.constant
    if case.flat:
        x[...] = x[..., :1]
    if case.outlier is not None:
        x[case.outlier] = OUTLIER
    if case.nan is not None:
        x[case.nan] = np.nan
    made = replace(made, x=x)
    if case.infinite:
        made = replace(made, dy=np.abs(made.dy))
    for name, dtype in (("gamma", case.gamma), ("beta", case.beta)):
        wanted = _parameter(case, dtype)
        values = None if wanted is None else getattr(made, name).astype(DTYPES[wanted])
        made = replace(made, **{name: values})
    return made


def _settled(case: Case, made: Any, last: bool = False) -> tuple[Any, np.ndarray]:
    """Copies of the arrays with the shifts of the case, which a kernel may overwrite, and an array for y or dx."""
    if case.infinite:
        made.mean.flat[0] = -np.inf
    names = [name for name in vars(made) if isinstance(getattr(made, name), np.ndarray)]
    copies = {name: placed(getattr(made, name), case.at(name), last and name in ("x", "dy")) for name in names}
    if case.in_place:
        return replace(made, **copies), copies["dy" if "backward" in case.op else "x"]
    dtype = made.x.dtype if case.y_dtype is None else DTYPES[case.y_dtype]
    return replace(made, **copies), emptied(made.x.shape, dtype, case.at("out"), last)


def _made(case: Case) -> Any:
    """The arrays of a case, without the changes of `_moved`."""
    formatted = "NHWC" if case.last else "NCHW"
    if case.op.startswith("instance_norm"):
        return problems.instance_arrays(case.shape, case.dtype, data_format=formatted)
    if case.op.startswith("group_norm"):
        return problems.group_arrays(case.shape, case.groups, case.dtype, data_format=formatted)
    if "normalized_shape" in OPS[case.op].takes:
        of_rows = problems.rms_arrays if case.op.startswith("rms_norm") else problems.layer_arrays
        made = of_rows(case.shape, case.shape[-1], case.dtype)
        return made.with_extras() if case.extra else made
    return problems.batch_arrays(case.shape, case.dtype)


def _run(case: Case, place: OnGpu | InPlace, workspace: Any, **options: Any) -> list[np.ndarray | None]:
    made = _moved(case, _made(case))
    if case.gamma_offset:
        made = replace(made, gamma_offset=case.gamma_offset)
    made.settle()
    given, first = _settled(case, made, case.last and case.op.startswith("batch_norm"))
    backward = "dy" in OPS[case.op].inputs
    flags = problems.flagged(case.op, case.mask) if OPS[case.op].flags else {}
    if case.y_dtype is not None:
        flags["y_dtype"] = case.y_dtype
    outs: list[Any] = []
    for index, name in enumerate(case.results):
        shape, dtype = made.result(case.op, name)
        if name == "h":
            outs.append(given.residual if case.in_place else emptied(shape, dtype, case.at("h")))
        else:
            kept = DTYPES[case.sums[index]] if case.sums else dtype
            outs.append(first if name in ("y", "dx") else emptied(shape, kept))
    outs = [
        out if flag else None
        for out, flag in zip(outs, problems.wanted(case.op, made.given(case.op) | flags), strict=True)
    ]
    # A gradient needs beta only with an activation.
    arguments = {name: value for name, value in given.given(case.op).items() if name != "beta" or not backward}
    if case.ranks:
        arguments["count"] = _counts(made.count, case.ranks)
    there = tuple(map(place.put, outs))
    getattr(cunorm, case.op)(
        **{name: place.put(value) for name, value in arguments.items()},
        **flags,
        out=there if len(there) > 1 else there[0],
        workspace=place.put(workspace),
        **options,
    )
    place.get()
    made.check(case.op, tuple(outs))
    return outs


def _counts(total: int, ranks: int) -> np.ndarray:
    """The counts of ranks, whose sum is the total, in a column of an array. The elements between them are -1."""
    whole = np.full((ranks, 3), -1)
    whole[:, 0] = np.diff(np.linspace(0, total, ranks + 1).astype(int))
    return whole[:, 0]


def _packed(means: np.ndarray, invstds: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """The same arrays as columns of one buffer, each row of which ends in a count of 8 bytes."""
    world, C = means.shape
    words = 8 // means.itemsize
    whole = np.full((world, (2 * C + 1 + words) // words * words + words), np.nan, means.dtype)
    whole[:, :C], whole[:, C : 2 * C] = means, invstds
    kept = whole[:, -words:].view(np.int64)[:, 0]
    kept[...] = counts
    return [whole[:, :C], whole[:, C : 2 * C], kept]


def _gather(case: Case, place: OnGpu | InPlace, workspace: Any, **options: Any) -> list[np.ndarray | None]:
    world, C = case.shape
    random = np.random.default_rng(0)
    sums = DTYPES[accumulator(case.dtype)]
    means = placed((random.standard_normal((world, C)) + OFFSET).astype(DTYPES[case.dtype]), case.at("x"))
    invstds = placed((0.1 + random.random((world, C))).astype(DTYPES[case.dtype]), case.at("x"))
    counts = placed(random.integers(1, 1000, world))
    if world > 1:
        counts[1], means[1] = 0, np.nan  # an absent rank, whose values must not matter
    outs = [emptied((C,), sums) for _ in range(2)]
    running = [placed(np.full(C, v).astype(DTYPES[one])) for v, one in zip((1, 2), case.sums, strict=False)]
    kept = dict(zip(("running_mean", "running_var"), (a.astype(np.float64) for a in running), strict=False))
    exact = reference.batch_norm_gather_stats(means, invstds, counts, **kept)
    named = dict(zip(("running_mean", "running_var"), running, strict=False))
    arrays = _packed(means, invstds, counts) if case.packed else [means, invstds, counts]
    given = map(place.put, arrays)
    there = {name: place.put(array) for name, array in named.items()}
    out = tuple(map(place.put, outs))
    cunorm.batch_norm_gather_stats(*given, out=out, workspace=place.put(workspace), **there, **options)
    place.get()
    for index, came in enumerate((*outs, *running)):
        want = np.asarray(exact[index])
        assert_within(f"{case.op}[{index}]", came, want, 1e-13 * np.abs(want) + 1e-13, NAMES[came.dtype])
    return [*outs, *running]


#: Function per op: (case, place, workspace, options of the call) -> the results, as NumPy arrays.
RUNS = {op: _gather if op == "batch_norm_gather_stats" else _run for op in OPS}
