"""The NVRTC versions with which tests compile, and the mark of these tests."""

from __future__ import annotations

import pytest

from cunorm.jit import nvrtc

#: The oldest and the newest that are installed.
NVRTCS = nvrtc.ends()
needs_nvrtc = pytest.mark.skipif(not NVRTCS, reason=f"needs NVRTC {nvrtc.supported()}: see `cunorm doctor --kernels`")
#: The text of a small kernel.
SMALL = 'extern "C" __global__ void small(float* x) { x[threadIdx.x] = 1; }'
