// gate: sm_90
// Sums of clusters of blocks: each block sums its part, every block adds all parts out of the others' shared memory in
// the same order, and writes the sum where its own number says. Then each tells its right neighbour its rank.
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
    cluster_wait();  // nobody ends while another still reads or writes here
    if (thread == 1) {
        store(neighbours, blockIdx.x, *left);
    }
}
