"""Kernels whose time is known without a simulator: a copy, which the DRAM's bandwidth limits, and a sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.machine import Kernel, Launch, Placed
from cunorm.executors.cpu.guarded_arrays import PARAMETER

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


def _placed(*arrays: NDArray[np.float32]) -> list[Placed]:
    """Arrays at addresses that are multiples of 1 MB, as an allocator of GPU memory would place them."""
    found, at = [], 1 << 32
    for number, array in enumerate(arrays):
        found.append(Placed(f"array {number}", at, array.nbytes, PARAMETER, array.ctypes.data))
        at += (array.nbytes + (2 << 20)) >> 20 << 20
    return found


def copy(nbytes: int) -> tuple[Launch, NDArray[np.float32], NDArray[np.float32]]:
    """A launch that copies `nbytes` bytes, one pack per thread, its source and its target, which must be kept."""
    x = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
    y = np.zeros_like(x)
    packs, memory = nbytes // PACK, _placed(x, y)
    arguments = [*(region.address for region in memory), packs]
    return Launch(Kernel.of_text(_TEXT, "copy_packs"), -(-packs // THREADS), THREADS, 0, arguments, memory), x, y


def total(nbytes: int, blocks: int) -> tuple[Launch, NDArray[np.float32], NDArray[np.float32]]:
    """A launch that sums `nbytes` bytes of float32 per block, its source and the sums of the blocks, to be kept."""
    x = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)
    sums = np.zeros(blocks, dtype=np.float32)
    memory = _placed(x, sums)
    arguments = [*(region.address for region in memory), nbytes // PACK]
    return Launch(Kernel.of_text(_TEXT, "sum_packs"), blocks, THREADS, 0, arguments, memory), x, sums
