"""What the first of two phases prepares and the second runs: a plan, and the caller's arrays as kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm.core.arrays import (
    Array,
    addresses,
    in_one_piece,
    integer,
    namespace,
    overlap,
    plain,
    pointer,
    same_elements,
    same_place,
    span,
    view_as,
)
from cunorm.core.locks import lazy
from cunorm.executors.choose import capturing, executor
from cunorm.runtime.checked_call import CAPTURED, WORKSPACE_ALIGNMENT
from cunorm.runtime.checks import OutputSpec, is_direct
from cunorm.runtime.plans import Plan

#: What of an array may not change between two phases.
_FACTS = ("address", "shape", "strides", "dtype", "writeable")


class NullPointer(ValueError):
    """An array that is needed is None."""


@dataclass(frozen=True, eq=False)
class Operand:
    """An array of the caller, and what cunorm's function is to get in its place.

    Attributes
    ----------
    name : str
    array : array
    shape : tuple of int
        In C order as many elements as the array.
    dtype : numpy.dtype
    axes : tuple of int
        The axes of that shape in the memory order that kernels read.
    """

    name: str
    array: Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]

    @lazy
    def seen(self) -> Array | None:
        """The caller's memory in that shape; None where that takes a copy."""
        return view_as(self.array, self.shape)

    @lazy
    def span(self) -> tuple[int, int]:
        """The addresses that it lies between."""
        return span(self.array)

    @lazy
    def copied(self) -> str | None:
        """Why kernels cannot use it as it lies, or None."""
        if self.array.dtype != self.dtype:
            return f"{self.array.dtype}, needed as {self.dtype}"
        if self.seen is None:
            return f"strides {self.array.strides}, in which shape {self.shape} cannot be seen"
        if is_direct(self.seen, self.axes):
            return None
        if pointer(self.seen) % self.dtype.itemsize:
            return f"at an address that is not a multiple of {self.dtype.itemsize}"
        order = "" if len(self.axes) == 1 else f" in the order of axes {self.axes}, in which input is read"
        return f"strides {self.array.strides}, needed without gaps{order}"

    def source(self) -> Array:
        """What to read: the caller's memory, or a copy of what it holds now."""
        if self.copied is None:
            return self.seen
        return plain(self.array).reshape(self.shape).astype(self.dtype, copy=False)

    def target(self, xp: Any) -> Array:
        """What to write: the caller's memory, or new memory for `store`."""
        if self.copied is None:
            return self.seen
        return OutputSpec(self.name, self.shape, self.dtype, self.axes).allocate(xp)

    def store(self, result: Array) -> None:
        """Bring what was written to the caller's memory, where it is not there."""
        if self.copied is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, as it does in kernels
                plain(self.array)[...] = result.reshape(self.array.shape)

    def overlaps(self, array: Array, span: tuple[int, int]) -> bool:
        """Whether it has a byte in common with an array of that span."""
        return overlap(self.array, self.span, array, span)

    def lies_as(self, other: Operand) -> bool:
        """Whether each element lies exactly where the other's does."""
        if self.seen is not None and other.seen is not None:
            return same_elements(self.seen, other.seen)
        return same_elements(self.array, other.array)


class AclOpExecutor:
    """A prepared two-phase call: opaque, made by a first phase, run by its second, any number of times.

    Arrays are read when it runs, so their contents may change between runs; where and how they lie may not.
    It holds on to them.

    Parameters
    ----------
    phase : str
        The name of the function that runs it.
    plan : Plan
    call : callable
        cunorm's public function, but for its arrays, out and workspace.
    inputs, outputs : sequence of Operand or None
        In that function's order; None for an array that is absent, or a result that is not wanted.
    beside : sequence of Operand
        Arrays of the caller that are not read, and no more to be overwritten than those that are.
    """

    def __init__(
        self,
        phase: str,
        plan: Plan,
        call: Callable[..., Any],
        inputs: Sequence[Operand | None],
        outputs: Sequence[Operand | None],
        beside: Sequence[Operand] = (),
    ) -> None:
        self._phase = phase
        self._plan = plan
        self._call = call
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        used = [each for each in (*self._inputs, *self._outputs) if each is not None]
        self._all = (*used, *beside)
        #: Without results there is nothing to do, and nothing to copy for it.
        self._idle = all(each is None for each in self._outputs)
        self._copied = () if self._idle else tuple(each for each in used if each.copied is not None)
        self._found = self._state()

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of workspace that a run needs, wherever it begins; 0 for none."""
        needs = self._plan.workspace_nbytes
        return needs + WORKSPACE_ALIGNMENT - 1 if needs else 0

    def explain(self) -> str:
        """What will run, and why, for people; and what each run copies, and why."""
        copies = [f"copied     {each.name}, in each run: {each.copied}" for each in self._copied]
        size = f"asked for  {self.workspace_nbytes} bytes, that workspace and what aligns it wherever it begins"
        return "\n".join([self._plan.explain(), *([size] if self.workspace_nbytes else []), *copies])

    def __repr__(self) -> str:
        return f"<executor of {self._phase}: {self._plan.problem.describe()}>"

    def run(self, phase: str, workspace: Array | None, workspace_size: object, stream: object) -> None:
        """Run it on a stream; what is wrong is found before anything is written.

        Raises
        ------
        NullPointer
            If there is no workspace where one is needed.
        TypeError, ValueError
            For an executor of another operator, arrays that have changed, a workspace or a stream that will not do.
        """
        if phase != self._phase:
            raise ValueError(f"executor: made for {self._phase}, expected one for {phase}")
        needs = self.workspace_nbytes
        if needs and workspace is None:
            raise NullPointer(f"workspace: None, expected an array of at least {needs} bytes")
        if integer("workspaceSize", workspace_size, 0) < needs:
            raise ValueError(f"workspaceSize: {workspace_size}, expected at least {needs}")
        self._check_arrays()
        scratch = self._scratch(workspace) if needs else None
        if self._idle:
            return
        with self._on(stream):
            self._check_capture()
            xp = namespace(self._plan.place.kind)
            arrays = [None if each is None else each.source() for each in self._inputs]
            out = tuple([None if each is None else each.target(xp) for each in self._outputs])
            self._call(*arrays, out=out, workspace=scratch)
            for each, result in zip(self._outputs, out, strict=True):
                if each is not None:
                    each.store(result)

    def _state(self) -> list[tuple[Any, ...]]:
        """Of each array what `_FACTS` names."""
        arrays = [each.array for each in self._all]
        starts = addresses(self._plan.place.kind, arrays)
        return [
            (start, each.array.shape, each.array.strides, each.array.dtype)
            + ((each.array.flags.writeable,) if each in self._outputs and isinstance(each.array, np.ndarray) else ())
            for start, each in zip(starts, self._all, strict=True)
        ]

    def _check_arrays(self) -> None:
        now = self._state()
        if now == self._found:
            return
        for each, *facts in zip(self._all, self._found, now, strict=True):
            for what, before, after in zip(_FACTS, *facts, strict=False):
                if before != after:
                    raise ValueError(
                        f"{each.name}: {what} {after}, expected {before}, as in the first phase; "
                        f"call {self._phase}GetWorkspaceSize again"
                    )

    def _scratch(self, workspace: Array) -> Array:
        """The bytes of a workspace that the kernels get."""
        same_place([(self._all[0].name, self._all[0].array), ("workspace", workspace)])
        if workspace.nbytes < self.workspace_nbytes:
            raise ValueError(f"workspace: {workspace.nbytes} bytes, expected at least {self.workspace_nbytes}")
        if workspace.dtype.hasobject:
            raise TypeError(f"workspace: dtype {workspace.dtype}, expected one of plain bytes")
        if isinstance(workspace, np.ndarray) and not workspace.flags.writeable:
            raise ValueError("workspace: read-only, expected an array that can be written")
        if (everything := in_one_piece(workspace)) is None:
            raise ValueError(f"workspace: strides {workspace.strides}, expected memory in one piece")
        where = span(everything)
        for each in self._all:
            if each.overlaps(everything, where):
                raise ValueError(f"workspace: overlaps {each.name} in memory; pass an array of its own")
        start = -where[0] % WORKSPACE_ALIGNMENT
        return everything[start : start + self._plan.workspace_nbytes]

    def _on(self, stream: object) -> AbstractContextManager[Any]:
        """Where it runs: the arrays' GPU, and there that stream."""
        place = self._plan.place
        if place.kind == "cpu":
            return nullcontext()
        where: AbstractContextManager[Any] = executor("gpu").on_stream(place.ordinal, stream)
        return where

    def _check_capture(self) -> None:
        place = self._plan.place
        if self._copied and capturing(place.kind, place.ordinal):
            needs = "; ".join(f"{each.name}: {each.copied}" for each in self._copied)
            raise ValueError(f"{self._copied[0].name}: {CAPTURED}, but a copy is needed of {needs}")
