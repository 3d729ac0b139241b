"""The executor that a first phase returns and a second phase runs: a plan, and the caller's arrays for its kernels."""

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
from cunorm.runtime.checked_call import CAPTURED
from cunorm.runtime.checks import OutputSpec, is_direct
from cunorm.runtime.plans import Plan
from cunorm.runtime.raw_call import WORKSPACE_ALIGNMENT

#: The properties of an array that must not change between the two phases.
_FACTS = ("address", "shape", "strides", "dtype", "writeable")


class NullPointer(ValueError):
    """A required array is None."""


@dataclass(frozen=True, eq=False)
class Operand:
    """An array of the caller, and the shape, dtype and memory order in which cunorm's function needs it.

    Attributes
    ----------
    name : str
    array : array
    shape : tuple of int
        The required shape. It has as many elements as the array, in C order.
    dtype : numpy.dtype
        The required dtype.
    axes : tuple of int
        The axes of `shape` in the memory order that the kernels read.
    """

    name: str
    array: Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]

    @lazy
    def seen(self) -> Array | None:
        """A view of the array in the required shape; None if that needs a copy."""
        return view_as(self.array, self.shape)

    @lazy
    def span(self) -> tuple[int, int]:
        """The first and the last address of the array."""
        return span(self.array)

    @lazy
    def copied(self) -> str | None:
        """Why the kernels cannot use the array in place, or None."""
        if self.array.dtype != self.dtype:
            return f"{self.array.dtype}, needed as {self.dtype}"
        if self.seen is None:
            return f"strides {self.array.strides}, which allow no view of shape {self.shape}"
        if is_direct(self.seen, self.axes):
            return None
        if pointer(self.seen) % self.dtype.itemsize:
            return f"at an address that is not a multiple of {self.dtype.itemsize}"
        order = "" if len(self.axes) == 1 else f" in the order of axes {self.axes}, input's memory order"
        return f"strides {self.array.strides}, needed without gaps{order}"

    def source(self) -> Array:
        """Return the array to read: a view of the caller's array, or a copy of its present contents."""
        if self.copied is None:
            return self.seen
        return plain(self.array).reshape(self.shape).astype(self.dtype, copy=False)

    def target(self, xp: Any) -> Array:
        """Return the array to write: a view of the caller's array, or a new array for `store`."""
        if self.copied is None:
            return self.seen
        return OutputSpec(self.name, self.shape, self.dtype, self.axes).allocate(xp)

    def store(self, result: Array) -> None:
        """Copy a result into the caller's array, if the kernels did not write there."""
        if self.copied is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # values that overflow become infinite, as in kernels
                plain(self.array)[...] = result.reshape(self.array.shape)

    def overlaps(self, array: Array, span: tuple[int, int]) -> bool:
        """Whether the array shares a byte with an array of the given span."""
        return overlap(self.array, self.span, array, span)

    def lies_as(self, other: Operand) -> bool:
        """Whether both arrays have the same elements at the same addresses."""
        if self.seen is not None and other.seen is not None:
            return same_elements(self.seen, other.seen)
        return same_elements(self.array, other.array)


class AclOpExecutor:
    """A prepared two-phase call. It is opaque; a first phase returns it, and its second phase may run it repeatedly.

    Each run reads the arrays, so their contents may change between runs. Their addresses, shapes, strides and dtypes
    must not change. The executor keeps references to the arrays.

    Parameters
    ----------
    phase : str
        The name of the second phase's function.
    plan : Plan
    call : callable
        cunorm's public function with all arguments bound except the arrays, `out` and `workspace`.
    inputs, outputs : sequence of Operand or None
        In the order of that function; None for an absent array or a result that is not wanted.
    beside : sequence of Operand
        Arrays of the caller that are not read. The workspace must not overlap them either.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import ascend
    >>> x = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    >>> dy, mean, rstd = np.ones_like(x), np.array([[1.5, 5.5]], np.float32), np.full((1, 2), 0.894, np.float32)
    >>> dx, dgamma, dbeta = np.empty_like(x), np.empty(4, np.float32), np.empty(4, np.float32)
    >>> status, nbytes, executor = ascend.aclnnGroupNormBackwardGetWorkspaceSize(
    ...     dy, x, mean, rstd, None, 1, 4, 2, 2, (True, True, True), dx, dgamma, dbeta
    ... )
    >>> executor.workspace_nbytes == nbytes
    True
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
        #: Whether no result is wanted. Then a run does nothing and copies nothing.
        self._idle = all(each is None for each in self._outputs)
        self._copied = () if self._idle else tuple(each for each in used if each.copied is not None)
        self._found = self._state()

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of workspace that a run needs, including padding for any start address; 0 for none."""
        needs = self._plan.workspace_nbytes
        return needs + WORKSPACE_ALIGNMENT - 1 if needs else 0

    def explain(self) -> str:
        """Return a text with the plan and its reason, and the arrays that each run copies and why."""
        copies = [f"copied     {each.name}, in each run: {each.copied}" for each in self._copied]
        size = f"requested  {self.workspace_nbytes} bytes: the workspace and the padding that aligns any start address"
        return "\n".join([self._plan.explain(), *([size] if self.workspace_nbytes else []), *copies])

    def __repr__(self) -> str:
        return f"<executor of {self._phase}: {self._plan.problem.describe()}>"

    def run(self, phase: str, workspace: Array | None, workspace_size: object, stream: object) -> None:
        """Run the call on a stream. Errors in the arguments are found before anything is written.

        Raises
        ------
        NullPointer
            If a workspace is required and is None.
        TypeError, ValueError
            If the executor belongs to another operator, arrays have changed, or the workspace or stream is invalid.
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
        """The properties in `_FACTS` of each array."""
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
        """Check a workspace; return the aligned part of it that is passed to the kernels."""
        same_place([(self._all[0].name, self._all[0].array), ("workspace", workspace)])
        if workspace.nbytes < self.workspace_nbytes:
            raise ValueError(f"workspace: {workspace.nbytes} bytes, expected at least {self.workspace_nbytes}")
        if workspace.dtype.hasobject:
            raise TypeError(f"workspace: dtype {workspace.dtype}, expected a dtype without Python objects")
        if isinstance(workspace, np.ndarray) and not workspace.flags.writeable:
            raise ValueError("workspace: read-only, expected an array that can be written")
        if (everything := in_one_piece(workspace)) is None:
            raise ValueError(f"workspace: strides {workspace.strides}, expected memory without gaps")
        where = span(everything)
        for each in self._all:
            if each.overlaps(everything, where):
                raise ValueError(f"workspace: overlaps {each.name} in memory; pass an array of its own")
        start = -where[0] % WORKSPACE_ALIGNMENT
        return everything[start : start + self._plan.workspace_nbytes]

    def _on(self, stream: object) -> AbstractContextManager[Any]:
        """Return a context that selects the arrays' GPU and the stream."""
        place = self._plan.place
        if place.kind == "cpu":
            return nullcontext()
        where: AbstractContextManager[Any] = executor("gpu").on_stream(place.ordinal, stream)
        return where

    def _check_capture(self) -> None:
        place = self._plan.place
        if self._copied and capturing(place.kind, place.ordinal):
            needs = "; ".join(f"{each.name}: {each.copied}" for each in self._copied)
            raise ValueError(f"{self._copied[0].name}: {CAPTURED}, but these arrays need a copy: {needs}")
