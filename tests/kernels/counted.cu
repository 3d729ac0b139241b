// Accesses with known counts. `kind` selects the case, `step` is the distance between lanes. x, y: large float arrays.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    counted(const float* x, float* y, float* workspace, long long kind, long long step) {
    const int thread = threadIdx.x;
    int offset = 0;
    float* shared = shared_array<float>(offset, 32 * Tile::threads);
    float value = 0;
    if (kind == 0) {
        value = load(x, blockIdx.x * 4096 + thread * step);
    }
    if (kind == 1) {
        value = load_whole(x + blockIdx.x * 4096 + thread * 4 * step).get(0);
    }
    if (kind == 2) {  // lanes diverge, each half loads the same elements twice
        for (int i = 0; i < 2; ++i) {
            if (thread % 2 == 0) {
                value += load(x, thread);
            } else {
                value += load(x, 2048 + thread);
            }
        }
    }
    if (kind == 3) {
        shared[thread * step] = 1.0f;
        __syncthreads();
        value = shared[thread * step];
    }
    if (kind == 4) {
        Pack<float>* packs = reinterpret_cast<Pack<float>*>(shared);
        packs[thread * step] = Pack<float>{};
        __syncthreads();
        const Pack<float> read = packs[thread * step];
        value = read.get(0) + read.get(1) + read.get(2) + read.get(3);
    }
    if (kind == 5) {
        for (int i = 0; i < step; ++i) {
            value = __shfl_xor_sync(0xffffffffu, value, 1);
            __syncthreads();
        }
    }
    if (kind == 6) {
        store(workspace, blockIdx.x * Tile::threads + thread, 1.0f);
    }
    if (kind == 7) {  // as many accesses as the lane's index
        for (int i = 0; i < thread % 32; ++i) {
            value += load(x, i * 32 + thread % 32);
        }
    }
    if (value == 12345.0f) {
        store(y, thread, value);
    }
}
