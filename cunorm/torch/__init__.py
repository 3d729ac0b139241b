"""cunorm for PyTorch: the norms as functions and modules on tensors, and `replace`, which puts them into a model."""

from . import functional
from .modules import GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, LayerNorm, RMSNorm
from .replacement import Replaced, replace
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
    "Replaced",
    "SyncBatchNorm",
    "functional",
    "replace",
]
