"""A checked call: the plan for one signature of arrays, and the copies between its arrays and the kernels' arrays.

Shapes, dtypes and places are checked in the first call with a signature. A later call with the same signature looks up
the checked call, reads the addresses, and checks for overlapping arrays, which a signature does not show. It skips the
second check if an earlier call had the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cunorm.core.arrays import (
    Array,
    addresses,
    extent,
    in_range,
    namespace,
    overlap,
    pointer,
    row_stride,
    same_elements,
)
from cunorm.core.problem import accumulator
from cunorm.executors.choose import capturing, on
from cunorm.tiling import problem_trace

from .checks import OutputSpec, dense_copy, is_direct
from .plans import Plan
from .raw_call import WORKSPACE_ALIGNMENT

#: Maximum number of cached signatures per op.
KEPT_CALLS = 4096
#: Maximum number of addresses of arrays that a checked call keeps: layers of one shape share a call.
KEPT_ADDRESSES = 32
MISALIGNED = (
    f"workspace: its address is not a multiple of {WORKSPACE_ALIGNMENT}; pass a whole array, not a slice of one"
)
OVERLAPS = "{}: overlaps {} in memory; pass separate arrays"
CAPTURED = "the stream is being captured into a graph, where nothing may be allocated"


def signature(kind: str, arrays: Sequence[Array | None]) -> tuple[Any, ...]:
    """The facts of arrays on which the checks depend: type, shape, strides, dtype, GPU. Cheap to make and to hash.

    Raises
    ------
    AttributeError
        If one of them is not an array of that kind.
    """
    if kind == "gpu":
        # For a C-contiguous CuPy array, the shape replaces the strides, which take longer to read: it determines those
        # of all axes with two or more elements, and no check reads the others.
        return tuple(
            [
                None if a is None else (a.__class__, a.shape, a._c_contiguous or a.strides, a.dtype, a.data.device_id)
                for a in arrays
            ]
        )
    return tuple([None if a is None else (a.__class__, a.shape, a.strides, a.dtype, a.flags.num) for a in arrays])


def has_direct_rows(array: Array) -> bool:
    """Whether kernels that know the distance between an array's rows can read it without a copy."""
    return row_stride(array) is not None and pointer(array) % array.dtype.itemsize == 0


def measured(plan: Plan, arrays: Mapping[str, Array | None]) -> tuple[int, ...]:
    """The numbers that a call reads off its arrays. An array that the call copies has adjacent rows."""
    found = []
    for name, is_stride in plan.problem.spec.measures.values():
        array = arrays[name]
        if array is None:
            found.append(0)
        elif is_stride:
            stride = row_stride(array) if has_direct_rows(array) else None
            rows = array.shape[0] if array.ndim else 1
            found.append(array.size // max(1, rows) if stride is None else stride)
        else:
            found.append(array.size)
    return tuple(found)


def spanned(array: Array | None) -> int:
    """Bytes from the first element of an array to its end; 0 for an absent array."""
    return 0 if array is None else extent(array)[1]


class Call:
    """A call whose signature has been checked.

    Parameters
    ----------
    plan : Plan
    inputs : sequence of (name, array or None, axes)
        The arrays in the order of the plan's names, with their axes in the memory order that the kernels read.
    results : sequence of OutputSpec or None
        The results in result order; None for an output that is not requested.
    out : sequence of array or None, optional
        The checked outputs that the user passed.
    in_place : mapping of str to str
        Results, and for each the input that may be the same array.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[tuple[str, Array | None, tuple[int, ...]]],
        results: Sequence[OutputSpec | None],
        out: Sequence[Array | None] | None,
        in_place: Mapping[str, str],
        workspace: Array | None = None,
    ) -> None:
        self.plan = plan
        self.kind = plan.place.kind
        self.results = tuple(results)
        self.names = tuple(name for name, _, _ in inputs)
        self.in_place = in_place
        strided = plan.problem.spec.strided
        #: Inputs that the kernels cannot read without a copy: (index, axes). Each call copies them once.
        self.copied = tuple(
            (index, axes)
            for index, (name, array, axes) in enumerate(inputs)
            if array is not None and not (has_direct_rows(array) if name in strided else is_direct(array, axes))
        )
        self.measured = measured(plan, {name: array for name, array, _ in inputs})
        given: Sequence[Array | None] = out if out is not None else [None] * len(self.results)
        wanted = [(index, result, given[index]) for index, result in enumerate(self.results) if result is not None]
        self.extents = [extent(array) if array is not None else None for _, array, _ in inputs]
        self.out_extents = [
            None if array is None or result is None else extent(array)
            for array, result in zip(given, self.results, strict=True)
        ]
        #: Outputs for which the kernels write temporary arrays (staged), and outputs that this call allocates.
        self.staged = tuple(i for i, result, array in wanted if array is not None and not is_direct(array, result.axes))
        self.allocated = tuple(i for i, _, array in wanted if array is None)
        self.needs = plan.workspace_nbytes
        if workspace is not None:
            self._check_workspace(workspace)
        unused = any(r is None and array is not None for r, array in zip(self.results, given, strict=True))
        #: No allocation, no copy, no array for an omitted result. With a workspace, such a call only reads addresses,
        #: tests for overlaps and launches.
        self.direct = bool(plan.launches) and not (self.allocated or self.copied or self.staged or unused)
        #: Bytes at each address of a direct call.
        self.sizes = [spanned(a) for a in (*(a for _, a, _ in inputs), *given, workspace)]
        #: Bytes that kernels may access at each address.
        self.touched = (*self.sizes[:-1], self.needs)
        #: The places of a result and of the input that it may be, for each such result.
        self.pairs: list[tuple[int, int]] = []
        if self.direct and plan.strategy is not None and plan.strategy.in_place:
            names = [*self.names, *(None if result is None else result.name for result in self.results)]
            self.pairs = [(names.index(to), names.index(of)) for to, of in in_place.items() if to in names]
        #: Numbers that were checked last. Those of an op without numbers are.
        self._fitting: tuple[float, ...] = ()
        #: The addresses of direct calls that were checked, and whether specialised kernels may run on them.
        self._seen: dict[tuple[int, ...], bool] = {}

    def __call__(
        self,
        inputs: tuple[Array | None, ...],
        out: tuple[Array | None, ...] | None,
        workspace: Array | None,
        numbers: tuple[float, ...] = (),
    ) -> Any:
        """Run on arrays of the checked signature; return the results in order, None for those not requested."""
        if numbers != self._fitting:
            self._check_numbers(numbers)
        if not self.direct or out is None:
            return self._general(inputs, out, workspace, numbers)
        values = addresses(self.kind, (*inputs, *out, workspace))
        assumed = self._seen.get(values)
        if assumed is None:
            assumed = self._check_addresses(values, inputs, out, workspace)
        if self.needs and workspace is None:
            workspace = self._new_workspace()
            values, assumed = values[:-1] + addresses(self.kind, (workspace,)), None
        if numbers or self.measured:
            values = (*values, *numbers, *self.measured)  # type: ignore[arg-type]
        self.plan.run(values, self.touched, assumed)
        return out

    def _check_numbers(self, numbers: tuple[float, ...]) -> None:
        """Check that the kernels' arithmetic represents the numbers of a call (ValueError). Most calls repeat them."""
        problem = self.plan.problem
        for (name, number), value in zip(problem.spec.numbers.items(), numbers, strict=True):
            if number.rounded:
                in_range(name, value, accumulator(problem.dtype), f", in which {problem.dtype} is computed")
        self._fitting = numbers

    def _check_addresses(
        self,
        values: tuple[int, ...],
        inputs: tuple[Array | None, ...],
        out: tuple[Array | None, ...],
        workspace: Array | None,
    ) -> bool:
        """Check the addresses of a direct call, once: with the signature, they determine which arrays overlap.

        Returns whether specialised kernels may run on arrays there.
        """
        if not self._apart(values):
            self._check_overlap(inputs, out, workspace)
        if self.needs and workspace is not None and values[-1] % WORKSPACE_ALIGNMENT:
            raise ValueError(MISALIGNED)
        if len(self._seen) >= KEPT_ADDRESSES:
            self._seen.clear()
        self._seen[values] = assumed = self.plan.assumes(values)
        return assumed

    def _general(
        self,
        inputs: tuple[Array | None, ...],
        out: tuple[Array | None, ...] | None,
        workspace: Array | None,
        numbers: tuple[float, ...],
    ) -> tuple[Array | None, ...]:
        """Run a call that allocates, copies, omits results, or has no launches."""
        given = out if out is not None else (None,) * len(self.results)
        found = [array if result else None for array, result in zip(given, self.results, strict=True)]
        if workspace is not None and self.needs and pointer(workspace) % WORKSPACE_ALIGNMENT:
            raise ValueError(MISALIGNED)
        if out is not None or workspace is not None:
            self._check_overlap(inputs, found, workspace)
        xp = namespace(self.kind)
        with self._device():
            if self.allocated or self.copied or self.staged:
                self._check_capture(workspace)
            if self.needs and workspace is None:
                workspace = self._new_workspace()
            for index in self.allocated:
                found[index] = self.results[index].allocate(xp)  # type: ignore[union-attr]
            if not self.plan.launches:
                self._fill(found)
                return tuple(found)
            read, written = list(inputs), self._stage(found, xp)
            for index, axes in self.copied:
                read[index] = dense_copy(inputs[index], axes, xp)
            sizes: list[int] = []
            if self.kind == "cpu":  # the CPU executor checks bounds with them
                sizes = [spanned(array) for array in (*read, *written)] + [self.needs]
            self.plan.run((*addresses(self.kind, (*read, *written, workspace)), *numbers, *self.measured), sizes)
            for index in self.staged:
                found[index][...] = written[index]  # type: ignore[index]
        return tuple(found)

    def _fill(self, found: Sequence[Array | None]) -> None:
        """Fill the results with their values for an empty problem."""
        for result, array in zip(self.results, found, strict=True):
            if result is not None and array is not None and not result.updated:
                array.fill(result.when_empty)

    def _stage(self, found: Sequence[Array | None], xp: Any) -> list[Array | None]:
        """The arrays that kernels write: the results, or temporary arrays that are copied to the results afterwards."""
        written = list(found)
        for index in self.staged:
            result = self.results[index]
            assert result is not None
            written[index] = result.allocate(xp)
            if result.updated:
                written[index][...] = found[index]  # type: ignore[index]
        return written

    def _device(self) -> AbstractContextManager[Any]:
        """A context in which the GPU of the arrays is current, for allocations, copies and fills."""
        return on(self.kind, self.plan.place.ordinal)

    def _new_workspace(self) -> Array:
        with self._device():
            self._check_capture(None)
            return namespace(self.kind).empty(self.needs, np.uint8)

    def _apart(self, values: tuple[int, ...]) -> bool:
        """Whether no two arrays of a direct call overlap. If False, `_check_overlap` decides and raises the error."""
        sizes = list(self.sizes)
        for written, source in self.pairs:
            if values[written] == values[source]:
                sizes[written] = 0
        end = 0
        for start, size in sorted(zip(values, sizes)):  # noqa: B905  # equal lengths; strict costs time here
            if start < end:
                return False
            end = start + size
        return True

    def _check_workspace(self, workspace: Array) -> None:
        if workspace.dtype.hasobject:
            raise TypeError("workspace: an array of objects, expected an array of numbers: the kernels overwrite it")
        if not workspace.flags.c_contiguous:
            raise ValueError("workspace: not contiguous, expected a contiguous array that can be written")
        if self.kind == "cpu" and not workspace.flags.writeable:
            raise ValueError("workspace: read-only, expected a contiguous array that can be written")
        if workspace.nbytes < self.needs:
            raise ValueError(f"workspace: {workspace.nbytes} bytes, expected at least {self.needs}")

    def _check_overlap(
        self, inputs: Sequence[Array | None], found: Sequence[Array | None], workspace: Array | None
    ) -> None:
        read = []
        for name, array, extent_ in zip(self.names, inputs, self.extents, strict=True):
            if array is not None and extent_ is not None:
                start = pointer(array)
                read.append(((start - extent_[0], start + extent_[1]), name, array))
        written = []
        for result, array, extent_ in zip(self.results, found, self.out_extents, strict=True):
            if result is not None and array is not None and extent_ is not None:
                start = pointer(array)
                written.append(((start - extent_[0], start + extent_[1]), result.name, array))
        if workspace is not None:
            start = pointer(workspace)
            written.append(((start, start + workspace.nbytes), "workspace", workspace))
        for position, (span, name, array) in enumerate(written):
            for other_span, other, source in read:
                if overlap(array, span, source, other_span) and not self._in_place(name, array, other, source):
                    raise ValueError(OVERLAPS.format(self._labels[name], other))
            for other_span, other, target in written[:position]:
                if overlap(array, span, target, other_span):
                    raise ValueError(OVERLAPS.format(self._labels[name], self._labels[other]))

    @property
    def _labels(self) -> dict[str, str]:
        """The user-facing names of the written arrays, by their names in launches."""
        return {"workspace": "workspace", **{r.name: r.label for r in self.results if r is not None}}

    def _in_place(self, name: str, array: Array, other: str, source: Array) -> bool:
        """Whether an output is the same array as the input that it may be, and the strategy allows that."""
        allowed = self.plan.strategy is None or self.plan.strategy.in_place
        return self.in_place.get(name) == other and allowed and same_elements(array, source)

    def _check_capture(self, workspace: Array | None) -> None:
        if capturing(self.kind, self.plan.place.ordinal):
            missing = [r.label for i, r in enumerate(self.results) if r is not None and i in self.allocated]
            missing += ["workspace"] if self.needs and workspace is None else []
            missing += [f"a contiguous {self.names[index]}" for index, _ in self.copied]
            missing += [f"a contiguous {r.label}" for i, r in enumerate(self.results) if r and i in self.staged]
            raise ValueError(f"out: {CAPTURED}; pass {', '.join(missing)} and keep them alive as long as the graph")


class Calls(dict[Any, Call]):
    """A bounded cache of the checked calls of one op, by signature. It stays empty while problems are traced."""

    def __init__(self) -> None:
        super().__init__()
        problem_trace.on_begin.append(self.clear)

    def keep(self, key: Any, call: Call) -> None:
        """Add a call; if the cache is full, clear it first."""
        if problem_trace.active():
            return
        if len(self) >= KEPT_CALLS:
            self.clear()
        self[key] = call
