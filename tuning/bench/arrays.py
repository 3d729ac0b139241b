"""Sets of a problem's arrays to walk through, and the public call on the arrays of a set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS

from ..verify.inputs import Inputs
from ..verify.verifier import UNWRITTEN, array_bytes, filled_buffers

Arrays = Mapping[str, Any]


class Sets:
    """Sets of a problem's arrays on one device, all with the same inputs.

    Parameters
    ----------
    problem : Problem
    given : Inputs
    kind : {"cpu", "gpu"}
    count : int
    """

    def __init__(self, problem: Problem, given: Inputs, kind: str, count: int) -> None:
        self.problem, self.kind = problem, kind
        xp: Any = np if kind == "cpu" else executor("gpu").cupy
        needed = array_bytes(problem, OPS[problem.op].names, given)
        self._buffers = [filled_buffers(xp, needed, given) for _ in range(count)]
        if kind == "gpu":
            xp.get_default_memory_pool().free_all_blocks()  # temporary copies of the inputs: torch needs the memory

    def __len__(self) -> int:
        return len(self._buffers)

    def bytes_of(self, index: int) -> dict[str, Any]:
        """The arrays of a set as bytes: NumPy or CuPy arrays of uint8."""
        return {name: buffer.bytes for name, buffer in self._buffers[index].items()}

    def spoil(self, index: int) -> None:
        """Fill the results of a set with NaN (in every floating-point format)."""
        for name, buffer in self._buffers[index].items():
            if name in self.problem.outputs:
                buffer.fill(UNWRITTEN)

    def arrays(self, index: int) -> dict[str, Any]:
        """The arrays of a set with the shapes and dtypes that the public functions take."""
        return {name: _shaped(self.problem, name, flat) for name, flat in self.bytes_of(index).items()}


def _shaped(problem: Problem, name: str, flat: Any) -> Any:
    """A view of the bytes with the shape and dtype that the public functions take."""
    array = flat.view(DTYPES[problem.dtype_of(name)])
    shape = problem.spec.arrays[name].shape_of(problem)
    if name not in problem.spec.tensors or problem.layout == "NCHW":
        return array.reshape(shape)
    N, C, HxW = shape
    last = array.reshape(N, HxW, C)
    # Functions without the argument data_format detect channels-last data by its strides.
    return last if "data_format" in _parameters(problem) else last.transpose(0, 2, 1)


def _parameters(problem: Problem) -> Mapping[str, inspect.Parameter]:
    """The parameters of a problem's public function."""
    return inspect.signature(getattr(cunorm, problem.op)).parameters


def public_call(
    problem: Problem, arrays: Arrays, tile: Tile | None, workspace: Any = None, into: bool = True
) -> Callable[[], Any]:
    """A function without arguments that calls the public function for a problem.

    Parameters
    ----------
    problem : Problem
    arrays : mapping of str to array
        Result of `Sets.arrays`.
    tile : Tile or None
        None: the call chooses the tile.
    workspace : array, optional
        None: the call allocates it.
    into : bool
        Whether ``out=`` is passed. Without it the call allocates its results, as the calls of peers do.
    """
    spec = problem.spec
    out = tuple(arrays.get(name) for name in spec.results_with(problem.extras))
    given: dict[str, Any] = {
        **{"num_groups": problem.group, "normalized_shape": problem.C, "data_format": problem.layout},
        **{"activation": problem.activation, "tile": tile, "workspace": workspace},
        "y_dtype": dict(problem.others).get("y_t"),
        **{name: one.of(problem) for name, one in spec.numbers.items() if one.default is None},
        **{flag: results[0] in problem.outputs for flag, results in spec.flags.items()},
        **{name: arrays.get(name) for name in (*spec.inputs, *spec.updated)},
        "output_mask": tuple(results[0] in problem.outputs for results in spec.flags.values()),
    }
    if into:
        given["out"] = out if len(out) > 1 else out[0]
    found = {name: one for name, one in _parameters(problem).items() if name in given}
    positional = [given[name] for name, one in found.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = {name: given[name] for name, one in found.items() if one.kind is one.KEYWORD_ONLY}
    function = getattr(cunorm, problem.op)
    return lambda: function(*positional, **named)
