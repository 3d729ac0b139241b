"""cunorm: forwards and gradients of normalisation for NVIDIA GPUs, as hand-written CUDA C for CuPy and NumPy arrays."""

from __future__ import annotations

from pathlib import Path

# In an editable install or a bare checkout, kernels_cu and tuning are beside this package. In a wheel they are inside.
# With the checkout on the package's path, cunorm.tuning is the same module in both.
if not (Path(__path__[0]) / "kernels_cu").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

from . import ascend, distributed, reference
from .core.errors import CacheWarning, CompileError, KernelFault, TableError, TableWarning, TraceError, UnsupportedTile
from .core.strategy import Tile
from .ops.batch_norm.api import (
    batch_norm_backward_elemt,
    batch_norm_backward_reduce,
    batch_norm_elemt,
    batch_norm_gather_stats,
    batch_norm_stats,
)
from .ops.group_norm.api import group_norm, group_norm_backward
from .ops.instance_norm.api import instance_norm, instance_norm_backward
from .ops.layer_norm.api import layer_norm, layer_norm_backward
from .ops.registry import plan
from .ops.rms_norm.api import rms_norm, rms_norm_backward
from .runtime.plans import Plan
from .tiling.problem_trace import trace

__all__ = [
    "CacheWarning",
    "CompileError",
    "KernelFault",
    "Plan",
    "TableError",
    "TableWarning",
    "Tile",
    "TraceError",
    "UnsupportedTile",
    "ascend",
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_elemt",
    "batch_norm_gather_stats",
    "batch_norm_stats",
    "distributed",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "plan",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "trace",
]

__version__ = "0.1.0"
