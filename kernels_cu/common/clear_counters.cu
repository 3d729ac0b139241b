// Zeroes the counters of a `grid` kernel's blocks: `count` 4-byte words, from pair `from` of the workspace.
#include "common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    clear_counters(Pair* workspace, long long from, long long count) {
    unsigned* words = words_at(workspace, from);
    for (long long i = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; i < count;
         i += static_cast<long long>(gridDim.x) * Tile::threads) {
        store(words, i, 0u);
    }
}
