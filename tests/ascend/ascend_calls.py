"""Correct calls of the two-phase functions, which tests change into wrong ones, and the two-phase flow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm import ascend
from cunorm.ascend import AclnnStatus
from tests.support.problems import SENTINEL, BatchArrays, GroupArrays, batch_arrays, group_arrays

SUCCESS, NULLPTR, INVALID = (
    AclnnStatus.ACLNN_SUCCESS,
    AclnnStatus.ACLNN_ERR_PARAM_NULLPTR,
    AclnnStatus.ACLNN_ERR_PARAM_INVALID,
)
Arguments = dict[str, Any]

GROUP_OUTPUTS = ("gradInput", "gradGammaOut", "gradBetaOut")
BATCH_OUTPUTS = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")


@dataclass
class Face:
    """One of the two two-phase operators: its functions, a correct call and the names of its outputs."""

    name: str
    outputs: tuple[str, ...]

    def first(self, given: Arguments) -> tuple[Any, int, Any]:
        return getattr(ascend, f"{self.name}GetWorkspaceSize")(**given)

    def second(self, workspace: Any, size: Any, executor: Any, stream: Any = None) -> Any:
        return getattr(ascend, self.name)(workspace, size, executor, stream)

    def made(self, dtype: str = "float32") -> Any:
        """Arrays of a problem of the operator, with methods that compare results with the oracle."""
        return group_arrays(dtype=dtype) if self is GROUP else batch_arrays(dtype=dtype)

    def made_with_workspace(self) -> Any:
        """Arrays of a problem whose call needs a workspace."""
        return group_arrays((3, 8, 3, 3)) if self is GROUP else batch_arrays((70, 8, 3, 3))

    def call(self, made: Any) -> Arguments:
        """The arguments of a correct call with these arrays."""
        return group_call(made) if self is GROUP else batch_call(made)

    def right(self) -> Arguments:
        return self.call(self.made())

    def compare(self, made: Any, results: Any) -> None:
        """Compare results with the oracle. Results that are not wanted are None. Vectors may have any shape."""
        dense = [None if result is None else np.asarray(result) for result in results]
        if self is GROUP:
            dx, *vectors = dense
            made.check_backward(None if dx is None else dx.reshape(made.x.shape), *map(_flat, vectors))
        else:
            made.check("batch_norm_backward_reduce", tuple(map(_flat, dense)))

    def walk(self, given: Arguments, xp: Any = np, stream: Any = None) -> tuple[Any, ...]:
        """Run both phases, which must succeed, and return the outputs."""
        status, size, executor = self.first(given)
        assert status == SUCCESS, ascend.aclGetRecentErrMsg()
        workspace = None
        if size:
            workspace = xp.full(size, 0xFF, np.uint8)
        assert self.second(workspace, size, executor, stream) == SUCCESS, ascend.aclGetRecentErrMsg()
        return tuple(given[name] for name in self.outputs)


GROUP = Face("aclnnGroupNormBackward", GROUP_OUTPUTS)
BATCH = Face("aclnnBatchNormReduceBackward", BATCH_OUTPUTS)
FACES = (GROUP, BATCH)


def _flat(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.reshape(-1)


def _filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, SENTINEL).astype(dtype)


def group_call(made: GroupArrays | None = None) -> Arguments:
    """The arguments of a correct call with these NCHW arrays. The outputs are filled with SENTINEL."""
    made = GROUP.made() if made is None else made
    N, C = made.x.shape[:2]
    vector = (C,)
    dtype = made.mean.dtype if made.gamma is None else made.gamma.dtype
    return {
        "gradOut": made.dy,
        "input": made.x,
        "mean": made.mean,
        "rstd": made.rstd,
        "gamma": made.gamma,
        "N": N,
        "C": C,
        "HxW": math.prod(made.x.shape[2:]),
        "group": made.groups,
        "outputMask": (True, True, True),
        "gradInput": _filled(made.x.shape, made.x.dtype),
        "gradGammaOut": _filled(vector, dtype),
        "gradBetaOut": _filled(vector, dtype),
    }


def batch_call(made: BatchArrays | None = None) -> Arguments:
    """See `group_call`, for BatchNorm."""
    made = BATCH.made() if made is None else made
    vector = (made.x.shape[1],)
    return {
        "gradOut": made.dy,
        "input": made.x,
        "mean": made.mean,
        "invstd": made.invstd,
        "weight": made.gamma,
        "inputG": True,
        "weightG": True,
        "biasG": True,
        "sumDy": _filled(vector, made.mean.dtype),
        "sumDyXmu": _filled(vector, made.mean.dtype),
        "gradWeight": _filled(vector, made.gamma.dtype),
        "gradBias": _filled(vector, made.gamma.dtype),
    }


def read_only(array: np.ndarray) -> np.ndarray:
    made = array.copy()
    made.flags.writeable = False
    return made


def untouched(face: Face, given: Arguments, before: Arguments) -> bool:
    """Whether the outputs of a call are equal to those in an earlier copy."""
    return all(
        np.array_equal(np.asarray(given[name]), before[name])
        for name in face.outputs
        if isinstance(given[name], np.ndarray)
    )
