"""The two-phase calls. A first phase checks the arguments and returns a workspace size and an executor to run."""

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
    """Status codes of the two-phase functions, with the documented names and numbers."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002


Prepared = tuple[AclnnStatus, int, AclOpExecutor | None]

_recent = threading.local()
_strict = False


def aclGetRecentErrMsg() -> str:
    """Return the message of the last failure of a two-phase function in this thread; empty if there was none.

    Examples
    --------
    >>> from cunorm import ascend
    >>> status = ascend.aclnnGroupNormBackward(None, 0, None, None)
    >>> int(status), ascend.aclGetRecentErrMsg() != ""
    (161001, True)
    """
    message: str = getattr(_recent, "message", "")
    return message


class _Limits(AbstractContextManager[None]):
    """A context that sets strictness on entry, and restores the earlier value on exit."""

    def __init__(self, on: bool, before: bool) -> None:
        self._on, self._before = on, before

    def __enter__(self) -> None:
        global _strict
        _strict = self._on

    def __exit__(self, *_: object) -> None:
        global _strict
        _strict = self._before


def strict_limits(on: bool) -> AbstractContextManager[None]:
    """Set whether first phases enforce the documented limit of aclnnGroupNormBackward, C / group <= 8000.

    cunorm has no such limit. If the limit is enforced, a larger value returns ACLNN_ERR_PARAM_INVALID. The setting
    applies to all threads of the process from this call on. A ``with`` statement restores the earlier setting at its
    end.

    Parameters
    ----------
    on : bool

    Raises
    ------
    TypeError
        If `on` is not a bool.

    Examples
    --------
    >>> from cunorm import ascend
    >>> with ascend.strict_limits(True):
    ...     pass  # calls here refuse more than 8000 channels per group
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
    """First phase of aclnnGroupNormBackward: checks all arguments and writes nothing.

    Arrays may have up to 8 dimensions and any strides. Only the number of elements is prescribed; they are read in C
    order. An array without gaps is used in place; gradOut and gradInput also need the memory order of input, which is
    channels-first or channels-last. Each run copies the other arrays: ``executor.explain()`` lists them with the
    reason.

    Parameters
    ----------
    gradOut, input : cupy.ndarray or numpy.ndarray
        N * C * HxW elements; float16, bfloat16 or float32, both the same.
    mean, rstd : array
        N * group elements; gradOut's dtype or float32.
    gamma : array or None
        C elements; gradOut's dtype or float32. None means ones.
    N, C, HxW : int
        Not negative.
    group : int
        A divisor of C.
    outputMask : sequence of 3 bools
        Which of gradInput, gradGammaOut, gradBetaOut are wanted. The others are ignored.
    gradInput : array or None
        The shape of input and the dtype of gradOut. It may be the same array as gradOut.
    gradGammaOut, gradBetaOut : array or None
        The shape of gamma; without gamma, any shape of C elements. gradOut's dtype or float32.

    Returns
    -------
    status : AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR if gradOut, input, mean, rstd or a wanted output is None.
        ACLNN_ERR_PARAM_INVALID for any other error. `aclGetRecentErrMsg` returns the message.
    workspace_size : int
        Bytes that the second phase needs; 0 after a failure.
    executor : AclOpExecutor or None
        Argument of the second phase, which may run it repeatedly; None after a failure.

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
    >>> int(status)
    0
    """
    arrays = gradOut, input, mean, rstd, gamma
    outputs = gradInput, gradGammaOut, gradBetaOut
    return _first(lambda: first_phase.group_norm(*arrays, N, C, HxW, group, outputMask, *outputs, strict=_strict))


def aclnnGroupNormBackward(
    workspace: Array | None, workspaceSize: int, executor: AclOpExecutor | None, stream: Any
) -> AclnnStatus:
    """Second phase of aclnnGroupNormBackward: runs `cunorm.group_norm_backward` into the outputs of the first phase.

    Parameters
    ----------
    workspace : array or None
        Contiguous memory on the arrays' device, with any contents and any dtype but object. None if the first phase
        returned size 0.
    workspaceSize : int
        Bytes of the workspace: at least the size that the first phase returned.
    executor : AclOpExecutor
    stream : cupy.cuda.Stream or None
        The stream of the launches; None for the current stream. The function does not synchronise. The CPU executor
        ignores the stream.

    Returns
    -------
    AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR if executor or a required workspace is None. ACLNN_ERR_PARAM_INVALID for a workspace
        that is too small, an executor of another operator, arrays whose address, shape, strides or dtype changed, or a
        stream of another GPU.

    Raises
    ------
    CompileError
        If a kernel does not compile. No status code covers this error.

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
    >>> workspace = np.empty(nbytes, np.uint8) if nbytes else None
    >>> int(ascend.aclnnGroupNormBackward(workspace, nbytes, executor, None))
    0
    >>> dbeta
    array([2., 2., 2., 2.], dtype=float32)
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
    r"""First phase of aclnnBatchNormReduceBackward: checks all arguments and writes nothing.

    Parameters
    ----------
    gradOut, input : cupy.ndarray or numpy.ndarray
        (N, C, \*), 2 to 8 dimensions, any strides; float16, bfloat16 or float32; the same shape and dtype.
    mean, invstd : array
        C elements; float16, bfloat16 or float32.
    weight : array or None
        C elements. Its values are not read; its dtype is the dtype of gradWeight.
    inputG, weightG, biasG : bool
        inputG: whether sumDy and sumDyXmu are wanted; weightG: gradWeight; biasG: gradBias. Other outputs are ignored.
    sumDy, sumDyXmu, gradBias : array or None
        C elements; float16, bfloat16 or float32. Each sum is rounded once.
    gradWeight : array or None
        C elements; the dtype of weight or, without weight, of mean.

    Returns
    -------
    status : AclnnStatus
        ACLNN_ERR_PARAM_NULLPTR if gradOut, input, mean, invstd or a wanted output is None.
        ACLNN_ERR_PARAM_INVALID for any other error. `aclGetRecentErrMsg` returns the message.
    workspace_size, executor
        See `aclnnGroupNormBackwardGetWorkspaceSize`.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import ascend
    >>> dy, x = np.ones((4, 2), np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)
    >>> mean = invstd = weight = np.ones(2, np.float32)
    >>> sums = [np.empty(2, np.float32) for _ in range(4)]
    >>> status, nbytes, executor = ascend.aclnnBatchNormReduceBackwardGetWorkspaceSize(
    ...     dy, x, mean, invstd, weight, True, True, True, *sums
    ... )
    >>> int(status)
    0
    """
    arrays = gradOut, input, mean, invstd, weight
    outputs = sumDy, sumDyXmu, gradWeight, gradBias
    return _first(lambda: first_phase.batch_norm_reduce(*arrays, inputG, weightG, biasG, *outputs))


def aclnnBatchNormReduceBackward(
    workspace: Array | None, workspaceSize: int, executor: AclOpExecutor | None, stream: Any
) -> AclnnStatus:
    """Second phase of aclnnBatchNormReduceBackward: runs `cunorm.batch_norm_backward_reduce` into the outputs.

    Sums over no elements are zeros. Results are deterministic.

    Parameters
    ----------
    workspace, workspaceSize, executor, stream
        See `aclnnGroupNormBackward`.

    Returns
    -------
    AclnnStatus
        See `aclnnGroupNormBackward`.

    Raises
    ------
    CompileError

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import ascend
    >>> dy, x = np.ones((4, 2), np.float32), np.arange(8, dtype=np.float32).reshape(4, 2)
    >>> mean = invstd = weight = np.ones(2, np.float32)
    >>> sums = [np.empty(2, np.float32) for _ in range(4)]
    >>> status, nbytes, executor = ascend.aclnnBatchNormReduceBackwardGetWorkspaceSize(
    ...     dy, x, mean, invstd, weight, True, True, True, *sums
    ... )
    >>> workspace = np.empty(nbytes, np.uint8) if nbytes else None
    >>> int(ascend.aclnnBatchNormReduceBackward(workspace, nbytes, executor, None))
    0
    >>> sums[0], sums[1]
    (array([4., 4.], dtype=float32), array([ 8., 12.], dtype=float32))
    """
    return _second("aclnnBatchNormReduceBackward", workspace, workspaceSize, executor, stream)


def _first(prepare: Callable[[], AclOpExecutor]) -> Prepared:
    """Run the checks of a first phase and return its results."""
    try:
        executor = prepare()
    except (TypeError, ValueError) as error:
        return _failed(error), 0, None
    return AclnnStatus.ACLNN_SUCCESS, executor.workspace_nbytes, executor


def _second(phase: str, workspace: Any, workspace_size: Any, executor: Any, stream: Any) -> AclnnStatus:
    """Run a second phase and return its status."""
    try:
        if executor is None:
            raise NullPointer(f"executor: None, expected the executor of {phase}GetWorkspaceSize")
        if not isinstance(executor, AclOpExecutor):
            raise TypeError(f"executor: {type(executor).__name__}, expected the executor of {phase}GetWorkspaceSize")
        executor.run(phase, workspace, workspace_size, stream)
    except (TypeError, ValueError) as error:
        return _failed(error)
    return AclnnStatus.ACLNN_SUCCESS


def _failed(error: Exception) -> AclnnStatus:
    """Return the status code of an error, and store its message for this thread."""
    _recent.message = str(error)
    if isinstance(error, NullPointer):
        return AclnnStatus.ACLNN_ERR_PARAM_NULLPTR
    return AclnnStatus.ACLNN_ERR_PARAM_INVALID
