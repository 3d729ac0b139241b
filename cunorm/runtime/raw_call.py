"""A plan on memory of another library: the checks of its addresses, their sizes, and the results of empty problems."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from cunorm.core.arrays import DTYPES, said
from cunorm.core.problem import PACK_BYTES
from cunorm.executors.choose import executor

if TYPE_CHECKING:
    from .plans import Plan

#: Alignment of a workspace, bytes: kernels access it in packs.
WORKSPACE_ALIGNMENT = PACK_BYTES
#: Bytes that make up NaN in every supported dtype, and zero.
NAN_BYTE, ZERO_BYTE = 0xFF, 0


def itemsize_of(plan: Plan, name: str) -> int:
    """Bytes of an element of an array of the plan's problem."""
    dtype = plan.problem.dtype_of(name)
    return int(np.dtype(DTYPES.get(dtype, dtype)).itemsize)


class RawCall:
    """What a plan knows about the values of its launches."""

    def __init__(self, plan: Plan) -> None:
        self._plan, problem, spec = plan, plan.problem, plan.problem.spec
        self._at = {name: place for place, name in enumerate(plan.names)}
        # A call may pass or omit updated results in one and the same problem, as it may pass counts of any number.
        known = [name for name in spec.arrays if name not in spec.updated] if plan.launches else []
        needs = {name: problem.has(name) for name in known}
        if plan.launches:
            needs["workspace"] = plan.workspace_nbytes > 0
        self._given = tuple(needs.values())
        self._named = tuple(needs)
        self._arrays = (*(name for name in spec.arrays if name in self._at), "workspace")
        self._types: set[tuple[type, ...]] = set()  # of values that were right
        self._pick = operator.itemgetter(*(self._at[name] for name in needs)) if needs else lambda _: ()
        self._constant: list[int] | None = None
        self._strided = spec.strided
        self._counted = {of.array: name for name, of in spec.measures.items() if not of.is_stride}

    def check(self, pointers: Sequence[int | float]) -> None:
        """Check how many values there are, the addresses, and the workspace's alignment (TypeError, ValueError)."""
        names = self._plan.names
        if not hasattr(pointers, "__len__") or isinstance(pointers, (Mapping, Set, str, bytes)):
            raise TypeError(f"pointers: {said(pointers)}, expected a sequence of {', '.join(names)}")
        if len(pointers) != len(names):
            raise ValueError(f"pointers: {len(pointers)} values, expected {len(names)}: {', '.join(names)}")
        types = tuple(map(type, pointers))
        if types not in self._types:
            self._check_types(pointers)
            self._types.add(types)
        if tuple(map(bool, self._pick(pointers))) != self._given:
            for name, value, given in zip(self._named, self._pick(pointers), self._given, strict=True):
                if bool(value) != given:
                    expected = "its address" if given else "0"
                    raise ValueError(f"pointers: {name} is {value}, expected {expected}{self._why(name, given)}")
        if self._plan.workspace_nbytes and pointers[self._at["workspace"]] % WORKSPACE_ALIGNMENT:
            raise ValueError(f"pointers: workspace is not a multiple of {WORKSPACE_ALIGNMENT}")

    def _check_types(self, pointers: Sequence[object]) -> None:
        """Check that each array has an address, of an integer type, and that other values are numbers (TypeError)."""
        for name, value in zip(self._plan.names, pointers, strict=True):
            if name in self._arrays and not isinstance(value, (int, np.integer)):
                raise TypeError(f"pointers: {name} is {said(value)}, expected its address, an int")
            if not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"pointers: {name} is {said(value)}, expected a number")

    def _why(self, name: str, given: bool) -> str:
        if name == "workspace":
            return f", because the plan needs {self._plan.workspace_nbytes} bytes"
        return "" if given else f", because the plan is for {self._plan.problem.describe()}"

    def sizes(self, pointers: Sequence[int | float]) -> list[int]:
        """Bytes at each address, with which the CPU executor checks bounds. Nothing is checked on a GPU."""
        if self._plan.place.kind != "cpu":
            return []
        if self._constant is not None:
            return self._constant
        found = self._sizes(pointers)
        if not (self._plan.problem.spec.measures or self._plan.problem.spec.updated):
            self._constant = found  # which arrays are absent has been checked
        return found

    def _sizes(self, pointers: Sequence[int | float]) -> list[int]:
        names = self._plan.problem.spec.arrays
        found = [self._nbytes(name, pointers) if name in names else 0 for name in self._plan.names]
        found[self._at["workspace"]] = self._plan.workspace_nbytes
        return found

    def _nbytes(self, name: str, pointers: Sequence[int | float]) -> int:
        if not pointers[self._at[name]]:
            return 0
        shape = self._plan.problem.spec.arrays[name].shape_of(self._plan.problem)
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        if name in self._counted:
            rows = int(pointers[self._at[self._counted[name]]])
        stride = int(pointers[self._at[self._strided[name]]]) if name in self._strided else row
        return ((rows - 1) * stride + row) * itemsize_of(self._plan, name) if rows else 0

    def fill(self, pointers: Sequence[int | float]) -> None:
        """Fill the results of a problem without elements: NaN in a forward, which has no statistics, else zeros."""
        problem, place = self._plan.problem, self._plan.place
        byte = ZERO_BYTE if problem.is_backward else NAN_BYTE
        for name in problem.outputs:
            address, elements = int(pointers[self._at[name]]), problem.elements_of(name)
            if address and elements and name not in problem.spec.updated:
                executor(place.kind).fill(address, byte, elements * itemsize_of(self._plan, name), place.ordinal)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """A context in which a stream is current on the plan's GPU.

        Raises
        ------
        TypeError, ValueError
            If there is no such stream there.
        """
        place = self._plan.place
        if place.kind == "cpu":
            if stream is not None:
                raise ValueError(f"stream: {stream!r}, expected None: the CPU executor has no streams")
            return nullcontext()
        if isinstance(stream, int) and not isinstance(stream, bool):
            stream = executor("gpu").stream_at(stream, place.ordinal)
        current: AbstractContextManager[None] = executor("gpu").on_stream(place.ordinal, stream)
        return current
