// gate: sm_90
// Rounds in which a thread per block reads that block's value, as partition/team.cuh does. Only the thread that
// publishes a value executes a fence.
#include "common/async.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads)
    cluster_exchange(const float* x, float* y, long long rounds) {
    int offset = 0;
    float* shared = shared_array<float>(offset, 1);
    const int thread = threadIdx.x;
    for (long long round = 0; round < rounds; ++round) {
        const long long block = round * gridDim.x + blockIdx.x;
        if (thread == 0) {
            *shared = load(x, block);
            cluster_fence();
        }
        cluster_arrive_relaxed();
        cluster_wait();
        const float other = thread < Tile::cluster ? *cluster_map(shared, thread) : 0.0f;
        store(y, block * Tile::threads + thread, other);
        cluster_arrive_relaxed();
        cluster_wait();  // no block overwrites its value, or ends, while another one reads it
    }
}
