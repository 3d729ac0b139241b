"""Named lists of problems that real models run: what defaults are checked on, and later tuned and measured on.

The shapes are those of the models' published configurations: Stable Diffusion 1.5 and SDXL UNets (channels 320, 640,
1280; 32 groups), their VAE decoders (128, 256, 512), ResNet-50 with GroupNorm (Wu and He, 2018), nnU-Net's instance
norms (G = C), and small multi-layer perceptrons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cunorm.problem import Problem, accumulator

__all__ = ["GROUP_NORM", "GroupNormShape", "problems"]


@dataclass(frozen=True)
class GroupNormShape:
    """Samples, channels, spatial sizes and groups of one GroupNorm call."""

    N: int
    C: int
    spatial: tuple[int, ...]
    group: int

    @property
    def HxW(self) -> int:
        """Positions in a channel."""
        return math.prod(self.spatial)


def _square(N: int, C: int, size: int, group: int) -> GroupNormShape:
    return GroupNormShape(N, C, (size, size), group)


#: Workload name -> shapes.
GROUP_NORM: dict[str, tuple[GroupNormShape, ...]] = {
    "sd15-unet": tuple(
        _square(N, C, size, 32)
        for N in (2, 8)
        for size, channels in (
            (64, (320, 640, 960)),
            (32, (320, 640, 960, 1280, 1920)),
            (16, (640, 1280, 1920, 2560)),
            (8, (1280, 2560)),
        )
        for C in channels
    ),
    "sdxl-unet": tuple(
        _square(4, C, size, 32)
        for size, channels in ((128, (320, 640, 960)), (64, (320, 640, 1280, 1920)), (32, (640, 1280, 2560)))
        for C in channels
    ),
    "vae": tuple(
        _square(1, C, size, 32)
        for size, channels in ((1024, (128, 256)), (512, (128, 256, 512)), (256, (512,)), (128, (512,)), (64, (512,)))
        for C in channels
    ),
    "video-vae": (GroupNormShape(1, 128, (20, 256, 256), 32), GroupNormShape(1, 512, (8, 45, 80), 32)),
    "resnet50-gn": tuple(
        _square(64, C, size, 32) for C, size in ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    ),
    "nnunet": tuple(
        GroupNormShape(2, C, (size,) * 3, C)
        for C, size in ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (320, 4))
    ),
    "mlp": (GroupNormShape(1024, 512, (), 8), GroupNormShape(65536, 256, (), 16)),
}


def problems(dtype: str = "bfloat16") -> Iterator[tuple[str, Problem]]:
    """Every workload's forward and backward problems in both layouts, by workload name."""
    sums = accumulator(dtype)
    for name, shapes in GROUP_NORM.items():
        for shape in shapes:
            for layout in ("NCHW", "NHWC"):
                sizes = (layout, shape.N, shape.C, shape.HxW, shape.group)
                forward = Problem("group_norm", dtype, dtype, dtype, sums, *sizes, ("y", "mean", "rstd"))
                yield name, forward.canonical()
                outputs = ("dx", "dgamma", "dbeta")
                backward = Problem("group_norm_backward", dtype, dtype, None, sums, *sizes, outputs)
                yield name, backward.canonical()
