"""The two-phase calls: the first checks and gives a size of workspace and an executor, the second runs it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cunorm.core.arrays import Array, flag

from . import first_phase
from .acl_op_executor import AclOpExecutor, NullPointer


class AclnnStatus(enum.IntEnum):
    """What the two-phase functions return: the documented names and numbers."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002


Prepared = tuple[AclnnStatus, int, AclOpExecutor | None]

_recent = threading.local()
_strict = False


def aclGetRecentErrMsg() -> str:
    """The sentence of the last failure of a two-phase function in this thread; empty where there was none."""
    message: str = getattr(_recent, "message", "")
    return message


class _Limits(AbstractContextManager[None]):
    """Sets strictness when it is entered, and brings back what was before it was made."""

    def __init__(self, on: bool, before: bool) -> None:
        self._on, self._before = on, before

    def __enter__(self) -> None:
        global _strict
        _strict = self._on

    def __exit__(self, *_: object) -> None:
        global _strict
        _strict = self._before


def strict_limits(on: bool) -> AbstractContextManager[None]:
    """Whether first phases enforce the documented limit of aclnnGroupNormBackward, C / group <= 8000.

    cunorm has no such limit; whoever needs parity gets ACLNN_ERR_PARAM_INVALID from here. It holds for all threads of
    the process from this call on; in a ``with`` statement until its end, where what held before holds again.

    Parameters
    ----------
    on : bool

    Raises
    ------
    TypeError
        If it is no bool.
    """
    limits = _Limits(flag("on", on), _strict)
    limits.__enter__()
    return limits


def aclnnGroupNormBackwardGetWorkspaceSize(
    gradOut: Array,
    input: Array,
    mean: Array,
    rstd: Array,
    gamma: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    outputMask: Sequence[bool],
    gradInput: Array | None,
    gradGammaOut: Array | None,
    gradBetaOut: Array | None,
) -> Prepared:
    """First phase of aclnnGroupNormBackward: checks everything, writes nothing.

    Arrays may have any number of dimensions up to 8 and any strides; only their number of elements is fixed, read in C
    order. What lies without gaps is used in place, the tensors where they all lie as input does, channels-first or
    channels-last. The rest is copied in each run: ``executor.explain()`` says what and why.

    Parameters
    ----------
    gradOut, input : cupy.ndarray or numpy.ndarray
        N * C * HxW elements; float16, bfloat16 or float32, both the same.
    mean, rstd : array
        N * group elements; gradOut's dtype or float32.
    gamma : array or None
        C elements; gradOut's dtype or float32; None stands for ones.
    N, C, HxW : int
        Not negative.
    group : int
        Divides C.
    outputMask : sequence of 3 bools
        Which of gradInput, gradGammaOut, gradBetaOut are wanted. The others are not looked at.
    gradInput : array or None
        Of input's shape and gradOut's dtype; may be exactly gradOut.
    gradGammaOut, gradBetaOut : array or None
        Of gamma's shape, without gamma any of C elements; gradOut's dtype or float32.

    Returns
    -------
    status : AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR: gradOut, input, mean, rstd or an output that is wanted is None.
        ACLNN_ERR_PARAM_INVALID: anything else that is wrong. `aclGetRecentErrMsg` says what.
    workspace_size : int
        Bytes that the second phase needs; 0 after a failure.
    executor : AclOpExecutor or None
        For the second phase, any number of times; None after a failure.
    """
    arrays = gradOut, input, mean, rstd, gamma
    outputs = gradInput, gradGammaOut, gradBetaOut
    return _first(lambda: first_phase.group_norm(*arrays, N, C, HxW, group, outputMask, *outputs, strict=_strict))


def aclnnGroupNormBackward(
    workspace: Array | None, workspaceSize: int, executor: AclOpExecutor | None, stream: Any
) -> AclnnStatus:
    """Second phase of aclnnGroupNormBackward: `cunorm.group_norm_backward` into the outputs of the first.

    Parameters
    ----------
    workspace : array or None
        On the arrays' device, in one piece, of any dtype and content; None where the first phase said 0.
    workspaceSize : int
        Bytes of the workspace; at least as many as the first phase said.
    executor : AclOpExecutor
    stream : cupy.cuda.Stream or None
        Where to launch, without waiting; None is the current stream. The CPU executor ignores it.

    Returns
    -------
    AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR: executor, or a workspace that is needed, is None. ACLNN_ERR_PARAM_INVALID: a workspace
        too small, an executor of another operator or whose arrays were changed in place, a stream of another GPU.

    Raises
    ------
    CompileError
        If a kernel does not compile: no code covers it.
    """
    return _second("aclnnGroupNormBackward", workspace, workspaceSize, executor, stream)


def aclnnBatchNormReduceBackwardGetWorkspaceSize(
    gradOut: Array,
    input: Array,
    mean: Array,
    invstd: Array,
    weight: Array | None,
    inputG: bool,
    weightG: bool,
    biasG: bool,
    sumDy: Array | None,
    sumDyXmu: Array | None,
    gradWeight: Array | None,
    gradBias: Array | None,
) -> Prepared:
    r"""First phase of aclnnBatchNormReduceBackward: checks everything, writes nothing.

    Parameters
    ----------
    gradOut, input : cupy.ndarray or numpy.ndarray
        (N, C, \*), 2 to 8 dimensions, any strides; float16, bfloat16 or float32; the same shape and dtype.
    mean, invstd : array
        C elements; float16, bfloat16 or float32.
    weight : array or None
        C elements. Its values are not needed; it fixes gradWeight's dtype.
    inputG, weightG, biasG : bool
        Whether sumDy and sumDyXmu, gradWeight, and gradBias are wanted. The others are not looked at.
    sumDy, sumDyXmu, gradBias : array or None
        C elements; float16, bfloat16 or float32. Each sum is rounded once.
    gradWeight : array or None
        C elements; weight's dtype, without weight mean's.

    Returns
    -------
    status : AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR: gradOut, input, mean, invstd or an output that is wanted is None.
        ACLNN_ERR_PARAM_INVALID: anything else that is wrong. `aclGetRecentErrMsg` says what.
    workspace_size, executor
        As of `aclnnGroupNormBackwardGetWorkspaceSize`.
    """
    arrays = gradOut, input, mean, invstd, weight
    outputs = sumDy, sumDyXmu, gradWeight, gradBias
    return _first(lambda: first_phase.batch_norm_reduce(*arrays, inputG, weightG, biasG, *outputs))


def aclnnBatchNormReduceBackward(
    workspace: Array | None, workspaceSize: int, executor: AclOpExecutor | None, stream: Any
) -> AclnnStatus:
    """Second phase of aclnnBatchNormReduceBackward: `cunorm.batch_norm_backward_reduce` into the outputs of the first.

    Sums of nothing are zeros. The same arrays on the same device give the same bits.

    Parameters
    ----------
    workspace, workspaceSize, executor, stream
        As of `aclnnGroupNormBackward`.

    Returns
    -------
    AclnnStatus
        As of `aclnnGroupNormBackward`.

    Raises
    ------
    CompileError
    """
    return _second("aclnnBatchNormReduceBackward", workspace, workspaceSize, executor, stream)


def _first(prepare: Callable[[], AclOpExecutor]) -> Prepared:
    """What a first phase returns for these checks."""
    try:
        executor = prepare()
    except (TypeError, ValueError) as error:
        return _failed(error), 0, None
    return AclnnStatus.ACLNN_SUCCESS, executor.workspace_nbytes, executor


def _second(phase: str, workspace: Any, workspace_size: Any, executor: Any, stream: Any) -> AclnnStatus:
    """What a second phase returns."""
    try:
        if executor is None:
            raise NullPointer(f"executor: None, expected what {phase}GetWorkspaceSize returned")
        if not isinstance(executor, AclOpExecutor):
            raise TypeError(f"executor: {type(executor).__name__}, expected what {phase}GetWorkspaceSize returned")
        executor.run(phase, workspace, workspace_size, stream)
    except (TypeError, ValueError) as error:
        return _failed(error)
    return AclnnStatus.ACLNN_SUCCESS


def _failed(error: Exception) -> AclnnStatus:
    """The code of what was wrong with the arguments, whose sentence this thread remembers."""
    _recent.message = str(error)
    if isinstance(error, NullPointer):
        return AclnnStatus.ACLNN_ERR_PARAM_NULLPTR
    return AclnnStatus.ACLNN_ERR_PARAM_INVALID
