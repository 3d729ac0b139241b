"""Ascend's names for cunorm's gradients: operators, and two-phase calls that return the documented status codes.

For code and tests that were written to these interfaces; everything is computed by cunorm's public functions.
``docs/ascend.md`` says what is wider here, what differs on purpose, and what a porter has to change.
"""

from .acl_op_executor import AclOpExecutor
from .operators import GroupNormGrad, LayerNormGrad
from .two_phase import (
    AclnnStatus,
    aclGetRecentErrMsg,
    aclnnBatchNormReduceBackward,
    aclnnBatchNormReduceBackwardGetWorkspaceSize,
    aclnnGroupNormBackward,
    aclnnGroupNormBackwardGetWorkspaceSize,
    strict_limits,
)

__all__ = [
    "AclOpExecutor",
    "AclnnStatus",
    "GroupNormGrad",
    "LayerNormGrad",
    "aclGetRecentErrMsg",
    "aclnnBatchNormReduceBackward",
    "aclnnBatchNormReduceBackwardGetWorkspaceSize",
    "aclnnGroupNormBackward",
    "aclnnGroupNormBackwardGetWorkspaceSize",
    "strict_limits",
]
