// gate: sm_80
// A running total over blocks. A block draws a ticket and waits for the block with the preceding ticket. Each thread
// adds that block's last total to its own element and stores the sum. A block waits only for an earlier ticket, so any
// number of resident blocks suffices.
#include "common/async.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    ticket_wait(const float* x, float* totals, float* workspace, unsigned* ticket, unsigned* flags) {
    int offset = 0;
    unsigned* drawn = shared_array<unsigned>(offset, 1);
    float* before = shared_array<float>(offset, 1);
    const int thread = threadIdx.x;
    if (thread == 0) {
        *drawn = atomicAdd(ticket, 1u);
    }
    __syncthreads();
    const unsigned mine = *drawn;
    if (thread == 0) {
        *before = 0;
        if (mine > 0) {
            while (load_acquire(flags + (mine - 1)) == 0) {
            }
            *before = load(workspace, (mine - 1) * Tile::threads + Tile::threads - 1);
        }
    }
    __syncthreads();
    const float total = *before + load(x, mine * Tile::threads + thread);
    store(workspace, mine * Tile::threads + thread, total);
    store(totals, mine * Tile::threads + thread, total);
    __syncthreads();
    if (thread == 0) {
        store_release(flags + mine, 1u);
    }
}
