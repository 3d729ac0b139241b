"""cunorm: normalisation gradients and forwards for NVIDIA GPUs, hand-written CUDA C behind CuPy and NumPy arrays."""

from __future__ import annotations

from pathlib import Path

# An editable install or a bare checkout has kernels_cu and tuning beside this package, a wheel has them inside; with
# the checkout on the package's path, cunorm.tuning is the same module in both.
if not (Path(__path__[0]) / "kernels_cu").is_dir():
    __path__.append(str(Path(__path__[0]).parent))

from .errors import CompileError, KernelFault, UnsupportedTile
from .group_norm import group_norm, group_norm_backward
from .launch import Plan
from .ops import plan
from .strategy import Tile

__all__ = [
    "CompileError",
    "KernelFault",
    "Plan",
    "Tile",
    "UnsupportedTile",
    "group_norm",
    "group_norm_backward",
    "plan",
]

__version__ = "0.1.0"
