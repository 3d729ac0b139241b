"""Kernels whose time is known without a simulator: a copy, which the DRAM's bandwidth limits, and a sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.machine import Kernel, Launch
from cunorm.executors.cpu.guarded_arrays import Region

_TEXT = r"""
extern "C" __global__ void __launch_bounds__(256) copy_packs(const float4* x, float4* y, long long packs) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < packs; k += stride) y[k] = x[k];
}

extern "C" __global__ void __launch_bounds__(256) sum_packs(const float4* x, float* sums, long long packs) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    float sum = 0;
    #pragma unroll 4
    for (long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x; k < packs; k += stride) {
        const float4 pack = x[k];
        sum += pack.x + pack.y + (pack.z + pack.w);
    }
    __shared__ float of_warp[8];
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int k = 1; k < 8; ++k) sum += of_warp[k];
        sums[blockIdx.x] = sum;
    }
}
"""
THREADS, PACK = 256, 16


def copy(nbytes: int) -> tuple[Launch, NDArray[np.float32], NDArray[np.float32]]:
    """A launch that copies `nbytes` bytes, one pack per thread, its source and its target."""
    x = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
    y = np.zeros_like(x)
    packs = nbytes // PACK
    memory = [Region("x", x.ctypes.data, x.nbytes, "in"), Region("y", y.ctypes.data, y.nbytes, "out")]
    kernel = Kernel.of_text(_TEXT, "copy_packs")
    return Launch(kernel, -(-packs // THREADS), THREADS, 0, [x.ctypes.data, y.ctypes.data, packs], memory), x, y


def total(nbytes: int, blocks: int) -> tuple[Launch, NDArray[np.float32], NDArray[np.float32]]:
    """A launch that sums `nbytes` bytes of float32 per block, its source and the sums of the blocks."""
    x = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
    sums = np.zeros(blocks, dtype=np.float32)
    memory = [Region("x", x.ctypes.data, x.nbytes, "in"), Region("sums", sums.ctypes.data, sums.nbytes, "out")]
    kernel = Kernel.of_text(_TEXT, "sum_packs")
    return Launch(kernel, blocks, THREADS, 0, [x.ctypes.data, sums.ctypes.data, nbytes // PACK], memory), x, sums
