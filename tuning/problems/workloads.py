"""Workloads: named lists of problems that real models run. Default tiles are checked on them; tune and bench run them.

The shapes come from the models' published configurations:

- GroupNorm: Stable Diffusion 1.5 and SDXL UNets (channels 320, 640, 1280; 32 groups), their VAE decoders (128, 256,
  512), ResNet-50 with GroupNorm (Wu and He, 2018), nnU-Net's instance norms (G = C), small multi-layer perceptrons.
- InstanceNorm: the encoder of nnU-Net (Isensee et al., 2021) in three dimensions: patches of 128^3, two per batch. The
  channels double while the side halves, up to 320 channels.
- LayerNorm: hidden sizes of language models (GPT-2 768 to 1600, GPT-3 12288, Llama 4096 to 8192), heads of 64 and 128,
  ConvNeXt and Swin (96 to 1024).
- RMSNorm: hidden sizes of language models (Qwen 3 0.6B 1024, Gemma 2B 2048, Llama 2 7B and Mistral 7B 4096, Llama 2 13B
  and Qwen 2.5 14B 5120, Llama 3 70B and Qwen 2.5 72B 8192, Llama 3 405B 16384), without and with the residual that most
  of these norms add; heads of 64 and 128 (queries and keys, as in Qwen 3).
- BatchNorm: ResNet-50 (He et al., 2016), MobileNets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import OPS, problem_of


def _square(N: int, C: int, size: int, group: int) -> tuple[int, int, int, int]:
    return N, C, size * size, group


#: Workload name -> (samples, channels, positions, groups).
GROUP_NORM: dict[str, tuple[tuple[int, int, int, int], ...]] = {
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
    "video-vae": ((1, 128, 20 * 256 * 256, 32), (1, 512, 8 * 45 * 80, 32)),
    "resnet50-gn": tuple(
        _square(64, C, size, 32) for C, size in ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    ),
    "nnunet": tuple((2, C, size**3, C) for C, size in ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (320, 4))),
    "mlp": ((1024, 512, 1, 8), (65536, 256, 1, 16)),
    "quick": (_square(2, 320, 64, 32), _square(8, 640, 16, 32), (1024, 512, 1, 8)),
}


#: Workload name -> (samples, channels, positions).
INSTANCE_NORM: dict[str, tuple[tuple[int, int, int], ...]] = {
    "nnunet-in": tuple((2, C, size**3) for C, size in ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (320, 4))),
}

#: Workload name -> (rows, length).
LAYER_NORM: dict[str, tuple[tuple[int, int], ...]] = {
    "llm": (
        (512, 768),
        (8192, 768),
        (8192, 1600),
        (2048, 4096),
        (16384, 4096),
        (8192, 8192),
        (4096, 16384),
        (1024, 12288),
        (2048, 65536),
    ),
    "qk-norm": ((131072, 128), (589824, 64)),
    "vision": ((802816, 96), (200704, 192), (50432, 384), (12544, 768), (50432, 1280)),
    "convnext": tuple(
        (64 * size * size, length)
        for size, lengths in ((56, (96, 128)), (28, (192, 256)), (14, (384, 512)), (7, (768, 1024)))
        for length in lengths
    ),
    "quick": ((8192, 768), (2048, 4096), (200704, 96)),
    "odd": ((4005, 4005), (267, 513), (67, 123479), (1024, 33333), (1, 1000), (65536, 1)),
}

#: Most elements of a tensor in `_HIDDEN`. It excludes 65536 rows of more than 4096. With a residual or dh, a call has
#: four tensors: 2 GiB in bfloat16. A GPU of 80 GB then has room for the results that each peer of a bench keeps, and a
#: host for the float64 oracles of several problems.
_MOST = 1 << 28
#: (rows, length) of the hidden states of language models: a batch of tokens at their hidden sizes.
_HIDDEN = tuple(
    (rows, length)
    for rows in (512, 4096, 16384, 65536)
    for length in (1024, 2048, 4096, 5120, 8192, 16384)
    if rows * length <= _MOST
)

#: Workload name -> (rows, length). The rows of lengths 64 and 128 are heads of queries and keys.
RMS_NORM: dict[str, tuple[tuple[int, int], ...]] = {
    "llm-rms": (*_HIDDEN, (131072, 128), (589824, 64)),
    "quick": ((16384, 128),),
}

#: Workload name -> (rows, length) of the norms that get a residual.
RMS_NORM_WITH_RESIDUAL: dict[str, tuple[tuple[int, int], ...]] = {"llm-rms": _HIDDEN, "quick": ((2048, 4096),)}

#: Workload name -> (samples, channels, positions).
BATCH_NORM: dict[str, tuple[tuple[int, int, int], ...]] = {
    "resnet50-bn": tuple(
        (N, C, size * size)
        for N in (32, 256)
        for size, channels in ((112, (64,)), (56, (64, 256)), (28, (128, 512)), (14, (256, 1024)), (7, (512, 2048)))
        for C in channels
    ),
    "mobile-bn": tuple(
        (128, C, size * size) for C, size in ((16, 112), (24, 56), (40, 28), (144, 56), (672, 14), (1152, 7))
    ),
    "segmentation-bn": ((4, 32, 257 * 257), (2, 256, 128 * 256), (2, 2048, 33 * 33)),
    "quick": ((32, 64, 56 * 56), (32, 512, 7 * 7)),
    "bn1d": ((65536, 128, 1), (8192, 1024, 1), (131072, 63, 1)),
}

#: The names of all workloads.
WORKLOADS: tuple[str, ...] = tuple(dict.fromkeys((*GROUP_NORM, *INSTANCE_NORM, *LAYER_NORM, *RMS_NORM, *BATCH_NORM)))

#: Workload shapes, in the order of `OpSpec.sizes`, and the ops that the layers of these workloads call.
_CALLED: tuple[tuple[Mapping[str, Sequence[Any]], tuple[str, ...]], ...] = (
    (GROUP_NORM, ("group_norm", "group_norm_backward")),
    (INSTANCE_NORM, ("instance_norm", "instance_norm_backward")),
    (LAYER_NORM, ("layer_norm", "layer_norm_backward")),
    (RMS_NORM, ("rms_norm", "rms_norm_backward")),
    (
        BATCH_NORM,
        ("batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt"),
    ),
)

#: The same for layers that pass the optional tensors of `OpSpec.extras`: residual to a forward, dh to a backward.
_CALLED_WITH_EXTRAS: tuple[tuple[Mapping[str, Sequence[Any]], tuple[str, ...]], ...] = (
    (RMS_NORM_WITH_RESIDUAL, ("rms_norm", "rms_norm_backward")),
)


def problems(dtype: str = "bfloat16") -> Iterator[tuple[str, Problem]]:
    """Yield (workload name, problem) for all workloads: forward and backward, in each layout of the op."""
    tables = [(*called, False) for called in _CALLED] + [(*called, True) for called in _CALLED_WITH_EXTRAS]
    for shapes_of, ops, extended in tables:
        for name, shapes in shapes_of.items():
            for shape, layout in itertools.product(shapes, OPS[ops[0]].layouts):
                typed = ",".join(map(str, shape))
                for op in ops:
                    extras = ",".join(OPS[op].extras) if extended else None
                    yield name, problem_of(op, **plan_options(op, typed, dtype, layout, extras=extras))
