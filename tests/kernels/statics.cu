// Reverses the order of every block's values through static shared memory, then copies them through a second variable.
#include "common/types.cuh"

extern "C" __global__ void statics(const float* x, float* y) {
    __shared__ float turned[64];
    __shared__ float again[64];
    const int thread = threadIdx.x;
    turned[63 - thread] = load(x, blockIdx.x * 64 + thread);
    __syncthreads();
    again[thread] = turned[thread] + 1;
    __syncthreads();
    store(y, blockIdx.x * 64 + thread, again[thread]);
}
