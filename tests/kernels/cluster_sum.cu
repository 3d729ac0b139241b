// gate: sm_90
// Sums per cluster. Each block sums its part, then adds the parts of all blocks of the cluster, in the same order in
// every block, and stores the sum at its own index. Then each block writes its rank to the shared memory of its right
// neighbour.
#include "common/async.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads)
    cluster_sum(const float* x, float* sums, float* neighbours, long long length) {
    int offset = 0;
    float* parts = shared_array<float>(offset, Tile::threads);
    float* sum = shared_array<float>(offset, 1);
    float* left = shared_array<float>(offset, 1);
    const int thread = threadIdx.x;
    const unsigned rank = cluster_rank();
    float mine = 0;
    for (long long i = thread; i < length; i += Tile::threads) {
        mine += load(x, blockIdx.x * length + i);
    }
    parts[thread] = mine;
    __syncthreads();
    if (thread == 0) {
        float total = 0;
        for (int i = 0; i < Tile::threads; ++i) {
            total += parts[i];
        }
        *sum = total;
    }
    cluster_arrive();
    cluster_wait();
    if (thread == 0) {
        float total = 0;
        for (unsigned r = 0; r < Tile::cluster; ++r) {
            total += *cluster_map(sum, r);
        }
        store(sums, blockIdx.x, total);
        *cluster_map(left, (rank + 1) % Tile::cluster) = static_cast<float>(rank);
    }
    cluster_arrive();
    cluster_wait();  // no block ends while another one accesses its shared memory
    if (thread == 1) {
        store(neighbours, blockIdx.x, *left);
    }
}
