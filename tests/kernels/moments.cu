// Merges pairs of sets of elements: thread i stores the merge of a[i] and b[i]. A set is four numbers.
#include "common/moments.cuh"

__device__ __forceinline__ Moments load_set(const float* from, long long set) {
    return Moments{load(from, 4 * set), load(from, 4 * set + 1), load(from, 4 * set + 2), load(from, 4 * set + 3)};
}

extern "C" __global__ void __launch_bounds__(Tile::threads)
    moments(const float* a, const float* b, float* merged, long long sets) {
    const long long set = blockIdx.x * static_cast<long long>(Tile::threads) + threadIdx.x;
    if (set < sets) {
        const Moments both = merge(load_set(a, set), load_set(b, set));
        store(merged, 4 * set, both.count);
        store(merged, 4 * set + 1, both.mean);
        store(merged, 4 * set + 2, both.rest);
        store(merged, 4 * set + 3, both.m2);
    }
}
