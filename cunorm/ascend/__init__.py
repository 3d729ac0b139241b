"""The Ascend operators for normalisation gradients, and their two-phase calls, under their documented names.

The module serves code and tests that use these interfaces. cunorm's public functions compute every result.
``docs/guide/ascend.md`` lists the extensions, the intended differences, and the changes that ported code needs.
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
