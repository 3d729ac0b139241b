"""A problem's arrays in sets to walk through, and its public call on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.core.problem import TENSORS, Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS
from cunorm.traffic.sampling import array_facts

from ..verify.inputs import Inputs, numbers_of
from ..verify.verifier import UNWRITTEN, Guarded, array_bytes, raw

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
        self._buffers: list[dict[str, Guarded]] = []
        for _ in range(count):
            made = {
                name: Guarded(xp, nbytes) for name, nbytes in array_bytes(problem, OPS[problem.op].names, given).items()
            }
            for name in given.keys() & made.keys():
                made[name].fill(xp.asarray(raw(given[name])))
            self._buffers.append(made)
        if kind == "gpu":
            xp.get_default_memory_pool().free_all_blocks()  # what brought the inputs here, and is torch's to have

    def __len__(self) -> int:
        return len(self._buffers)

    def bytes_of(self, index: int) -> dict[str, Any]:
        """The arrays of a set as bytes: NumPy or CuPy arrays of uint8."""
        return {name: buffer.bytes for name, buffer in self._buffers[index].items()}

    def spoil(self, index: int) -> None:
        """Nothing that was written to a set's results counts from now on: they are NaN, in every format."""
        for name, buffer in self._buffers[index].items():
            if name in self.problem.outputs:
                buffer.fill(UNWRITTEN)

    def arrays(self, index: int) -> dict[str, Any]:
        """The arrays of a set as the public functions take them."""
        return {name: _shaped(self.problem, name, flat) for name, flat in self.bytes_of(index).items()}


def _shaped(problem: Problem, name: str, flat: Any) -> Any:
    """An array of the public functions' shape over these bytes."""
    array = flat.view(DTYPES[array_facts(problem, name)[1]])
    N, C, HxW = problem.N, problem.C, problem.HxW
    family = problem.op.split("_norm")[0]
    if name in TENSORS:
        if family == "layer":
            return array.reshape(N, C)
        if problem.layout == "NCHW":
            return array.reshape(N, C, HxW)
        last = array.reshape(N, HxW, C)
        return last if family == "group" else last.transpose(0, 2, 1)  # BatchNorm knows channels-last by its strides
    if name in ("mean", "rstd") and family != "batch":
        return array.reshape(N, problem.group)
    return array


def public_call(
    problem: Problem, arrays: Arrays, tile: Tile | None, workspace: Any = None, into: bool = True
) -> Callable[[], Any]:
    """What a user types for a problem.

    Parameters
    ----------
    problem : Problem
        Of any op but batch_norm_gather_stats.
    arrays : mapping of str to array
        Of `Sets.arrays`.
    tile : Tile or None
        None: the tile that a call chooses by itself.
    workspace : array, optional
        None: the call allocates it.
    into : bool
        Whether with ``out=``; without, the call allocates its results, as the peers' do.
    """
    op = OPS[problem.op]
    out = tuple(arrays.get(name) for name in op.results)
    options: dict[str, Any] = {"tile": tile, "workspace": workspace}
    if into:
        options["out"] = out if len(out) > 1 else out[0]
    family, _, what = problem.op.partition("_norm")
    positional = [arrays.get(name) for name in op.inputs]
    if family == "group":
        options |= {"data_format": problem.layout, "activation": problem.activation}
        if what:
            options |= {"num_groups": problem.group, "beta": positional.pop()}
        else:
            positional.insert(1, problem.group)
    elif family == "layer":
        positional.insert(2 if what else 1, problem.C)
    elif problem.op == "batch_norm_backward_elemt":
        positional.append(numbers_of(problem)["count"])
    if problem.op in ("group_norm_backward", "layer_norm_backward"):
        options["output_mask"] = tuple(name in problem.outputs for name in op.results)
    if problem.op == "batch_norm_backward_reduce":
        flags = zip(("input_g", "gamma_g", "beta_g"), ("sum_dy", "dgamma", "dbeta"), strict=True)
        options |= {flag: name in problem.outputs for flag, name in flags}
    function = getattr(cunorm, problem.op)
    return lambda: function(*positional, **options)
