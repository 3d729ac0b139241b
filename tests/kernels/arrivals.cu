// gate: sm_80
// Every block stores its threads' values to the workspace and counts itself in. It waits until all blocks are counted,
// and then adds the values of all blocks. All blocks must be resident.
#include "common/async.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    arrivals(const float* x, float* totals, unsigned* before, float* workspace, unsigned* counter) {
    const int thread = threadIdx.x;
    store(workspace, blockIdx.x * Tile::threads + thread, load(x, blockIdx.x * Tile::threads + thread));
    __syncthreads();
    if (thread == 0) {
        store(before, blockIdx.x, add_release_acquire(counter, 1u));
        wait_above(counter, gridDim.x - 1);
    }
    __syncthreads();
    float total = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) {
        total += load(workspace, i * Tile::threads + thread);
    }
    store(totals, blockIdx.x * Tile::threads + thread, total);
}
