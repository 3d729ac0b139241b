"""A checked call: the plan of one signature of arrays, and how to bring its arrays to the kernels and back.

All checks of shapes, dtypes and places happen when a signature is first met; a later call with the same signature pays
for a look-up, for the addresses, and for what cannot be known from a signature: whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, addresses, extent, kind_of, namespace, place_of, pointer
from .launch import Plan, executor

__all__ = ["Call", "Calls", "Result", "memory_order", "signature"]

#: Signatures kept for each op.
KEPT_CALLS = 4096
MISALIGNED = "workspace: its address is not a multiple of 16; pass a whole array, not a slice of one"


def signature(arrays: Sequence[Array | None]) -> tuple[Any, ...]:
    """What the checks of a call can see of its arrays: type, shape, strides, dtype, GPU. Cheap to make and to hash."""
    return tuple(
        [
            None
            if a is None
            else (np.ndarray, a.shape, a.strides, a.dtype, a.flags.writeable)
            if a.__class__ is np.ndarray
            else (a.__class__, a.shape, a.strides, a.dtype, a.data.device_id)
            for a in arrays
        ]
    )


def memory_order(rank: int, data_format: str, layout: str) -> tuple[int, ...]:
    """The axes of a (N, C, *) or (N, *, C) tensor in the order in which ``layout`` has them in memory."""
    if data_format == layout:
        return tuple(range(rank))
    return (0, *range(2, rank), 1) if layout == "NHWC" else (0, rank - 1, *range(1, rank - 1))


def _is_direct(array: Array, axes: tuple[int, ...]) -> bool:
    return bool(array.transpose(axes).flags.c_contiguous)


@dataclass(frozen=True)
class Result:
    """An output: its name, shape and dtype, its axes in memory order, what it holds when there are no elements."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[int, ...]
    when_empty: float = 0.0

    def allocate(self, xp: Any) -> Array:
        """A new array whose memory is dense in the order of ``axes``."""
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return xp.empty([self.shape[axis] for axis in self.axes], self.dtype).transpose(inverse)

    def check(self, array: Array) -> None:
        """Check an ``out`` array: TypeError for its dtype, ValueError for its shape or if it cannot be written."""
        if array.dtype != self.dtype:
            raise TypeError(f"out[{self.name}]: dtype {array.dtype}, expected {self.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"out[{self.name}]: shape {array.shape}, expected {self.shape}")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"out[{self.name}]: read-only, expected an array that can be written")
        if any(stride == 0 and size > 1 for stride, size in zip(array.strides, array.shape, strict=True)):
            raise ValueError(f"out[{self.name}]: a broadcast array, expected one whose elements are apart in memory")


class Call:
    """A call whose signature has been checked.

    Parameters
    ----------
    plan : Plan
    inputs : sequence of (name, array or None, axes)
        The arrays in the order of the plan's names, with their axes in the memory order that the kernels read.
    results : sequence of Result or None
        In result order; None where an output is not wanted.
    out : sequence of array or None, optional
        The given outputs, already checked.
    in_place : tuple of str
        (result, input) that may be the same array.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[tuple[str, Array | None, tuple[int, ...]]],
        results: Sequence[Result | None],
        out: Sequence[Array | None] | None,
        in_place: tuple[str, str],
        workspace: Array | None = None,
    ) -> None:
        self.plan = plan
        self.kind = plan.place.kind
        self.results = tuple(results)
        self.names = tuple(name for name, _, _ in inputs)
        self.in_place = in_place
        #: Inputs that the kernels cannot read where they are: (index, axes). Each call copies them once.
        self.copied = tuple(
            (index, axes)
            for index, (_, array, axes) in enumerate(inputs)
            if array is not None and not _is_direct(array, axes)
        )
        given: Sequence[Array | None] = out if out is not None else [None] * len(self.results)
        self.extents = [extent(array) if array is not None else None for _, array, _ in inputs]
        self.out_extents = [
            None if array is None or result is None else extent(array)
            for array, result in zip(given, self.results, strict=True)
        ]
        #: Outputs that the kernels write elsewhere first, and that this call allocates.
        self.staged = tuple(
            index
            for index, (array, result) in enumerate(zip(given, self.results, strict=True))
            if array is not None and result is not None and not _is_direct(array, result.axes)
        )
        self.allocated = tuple(
            index
            for index, (array, result) in enumerate(zip(given, self.results, strict=True))
            if array is None and result is not None
        )
        self.needs = plan.workspace_nbytes
        if workspace is not None:
            self._check_workspace(workspace)
        #: Nothing to allocate, to copy or to leave out: with a workspace, a call is addresses, a sweep and launches.
        self.direct = bool(plan.launches) and not (self.allocated or self.copied or self.staged or None in self.results)
        #: Bytes at each address of a direct call; the same where the output lies on the input that it may lie on.
        self.sizes = [0 if a is None else a.nbytes for a in (*(a for _, a, _ in inputs), *given, workspace)]
        names = [*self.names, *(result.name if result is not None else "" for result in self.results)]
        self.written, self.source = (names.index(name) if name in names else -1 for name in in_place)
        self.sizes_in_place = list(self.sizes)
        if plan.strategy is not None and plan.strategy.in_place:
            self.sizes_in_place[self.written] = 0

    def __call__(
        self,
        inputs: tuple[Array | None, ...],
        out: tuple[Array | None, ...] | None,
        workspace: Array | None,
        numbers: tuple[float, ...] = (),
    ) -> Any:
        """Run on arrays of the checked signature; returns the results in order, None where not wanted."""
        plan = self.plan
        if self.direct and out is not None:
            if workspace is None and self.needs:
                workspace = self._new_workspace()
            values = addresses(self.kind, (*inputs, *out, workspace))
            if values[-1] % 16 and self.needs:
                raise ValueError(MISALIGNED)
            if not self._apart(values):
                self._check_overlap(inputs, out, workspace)
            plan.run((*values, *numbers) if numbers else values)
            return out
        found: list[Array | None] = (
            [None] * len(self.results)
            if out is None
            else [a if r else None for a, r in zip(out, self.results, strict=True)]
        )
        if workspace is not None and self.needs and pointer(workspace) % 16:
            raise ValueError(MISALIGNED)
        if out is not None or workspace is not None:
            self._check_overlap(inputs, found, workspace)
        if self.needs and workspace is None:
            workspace = self._new_workspace()
        if self.allocated or self.copied or self.staged:
            if self.kind == "gpu":
                self._check_capture()
            xp = namespace(self.kind)
            for index in self.allocated:
                found[index] = self.results[index].allocate(xp)  # type: ignore[union-attr]
        if not plan.launches:
            for result, array in zip(self.results, found, strict=True):
                if result is not None and array is not None:
                    array.fill(result.when_empty)
            return tuple(found)
        if self.copied or self.staged:
            self._run_with_copies(inputs, found, workspace, numbers)
        else:
            self._run(inputs, found, workspace, numbers)
        return tuple(found)

    def _new_workspace(self) -> Array:
        if self.kind == "gpu":
            self._check_capture()
        return namespace(self.kind).empty(self.needs, np.uint8)

    def _apart(self, values: tuple[int, ...]) -> bool:
        """Whether no two arrays of a direct call touch; False leaves it to `_check_overlap`, which also words it."""
        sizes = self.sizes if values[self.written] != values[self.source] else self.sizes_in_place
        end = 0
        for start, size in sorted(zip(values, sizes, strict=True)):
            if start < end:
                return False
            end = start + size
        return True

    def _run(
        self, inputs: Sequence[Array | None], found: Sequence[Array | None], workspace: Any, numbers: tuple[float, ...]
    ) -> None:
        self.plan.run((*addresses(self.kind, (*inputs, *found, workspace)), *numbers))

    def _run_with_copies(
        self, inputs: Sequence[Array | None], found: Sequence[Array | None], workspace: Any, numbers: tuple[float, ...]
    ) -> None:
        xp = namespace(self.kind)
        inputs, written = list(inputs), list(found)
        for index, axes in self.copied:
            inputs[index] = xp.ascontiguousarray(inputs[index].transpose(axes))  # type: ignore[union-attr]
        for index in self.staged:
            written[index] = self.results[index].allocate(xp)  # type: ignore[union-attr]
        self._run(inputs, written, workspace, numbers)
        for index in self.staged:
            found[index][...] = written[index]  # type: ignore[index]

    def _check_workspace(self, workspace: Array) -> None:
        kind = kind_of("workspace", workspace)
        place = place_of(workspace)
        if place != (self.kind, self.plan.place.ordinal):
            raise ValueError(f"workspace: on {place}, expected {(self.kind, self.plan.place.ordinal)}")
        if not workspace.flags.c_contiguous or (kind == "cpu" and not workspace.flags.writeable):
            raise ValueError("workspace: expected a contiguous array that can be written")
        if workspace.nbytes < self.needs:
            raise ValueError(f"workspace: {workspace.nbytes} bytes, expected at least {self.needs}")

    def _check_overlap(
        self, inputs: Sequence[Array | None], found: Sequence[Array | None], workspace: Array | None
    ) -> None:
        read = []
        for name, array, extent_ in zip(self.names, inputs, self.extents, strict=True):
            if array is not None and extent_ is not None:
                start = pointer(array)
                read.append((start - extent_[0], start + extent_[1], name, array))
        written = []
        for result, array, extent_ in zip(self.results, found, self.out_extents, strict=True):
            if result is not None and array is not None and extent_ is not None:
                start = pointer(array)
                written.append((start - extent_[0], start + extent_[1], result.name, array))
        if workspace is not None:
            start = pointer(workspace)
            written.append((start, start + workspace.nbytes, "workspace", workspace))
        for position, (low, high, name, array) in enumerate(written):
            for other_low, other_high, other, source in read:
                if low < other_high and other_low < high and not self._same(name, array, other, source):
                    raise ValueError(f"{self._label(name)}: overlaps {other} in memory; pass separate arrays")
            for other_low, other_high, other, _ in written[:position]:
                if low < other_high and other_low < high:
                    raise ValueError(f"{self._label(name)}: overlaps {self._label(other)} in memory")

    @staticmethod
    def _label(name: str) -> str:
        return name if name == "workspace" else f"out[{name}]"

    def _same(self, name: str, array: Array, other: str, source: Array) -> bool:
        """Whether an output may lie on this input: exactly it, and where the strategy allows it."""
        exactly = array.strides == source.strides and pointer(array) == pointer(source)
        allowed = self.plan.strategy is None or self.plan.strategy.in_place
        return (name, other) == self.in_place and exactly and allowed

    def _check_capture(self) -> None:
        if executor("gpu").allocation_forbidden(self.plan.place.ordinal):
            missing = [f"out[{r.name}]" for i, r in enumerate(self.results) if r is not None and i in self.allocated]
            missing += ["workspace"] if self.needs else []
            missing += [f"a contiguous {self.names[index]}" for index, _ in self.copied]
            missing += [f"a contiguous out[{r.name}]" for i, r in enumerate(self.results) if r and i in self.staged]
            raise ValueError(
                f"out: the stream is being captured into a graph, where nothing may be allocated; pass "
                f"{', '.join(missing)} and keep them alive as long as the graph"
            )


class Calls(dict[Any, Call]):
    """The checked calls of one op by signature, bounded."""

    def keep(self, key: Any, call: Call) -> None:
        """Remember a call; forget all when there are too many."""
        if len(self) >= KEPT_CALLS:
            self.clear()
        self[key] = call
