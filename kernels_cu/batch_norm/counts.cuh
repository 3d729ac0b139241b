// Elements per channel of each rank, and their total.
#include "common/reduce.cuh"

__device__ __forceinline__ double as_double(int count) { return count; }
__device__ __forceinline__ double as_double(long long count) { return static_cast<double>(count); }
__device__ __forceinline__ double as_double(float count) { return count; }
__device__ __forceinline__ double as_double(double count) { return count; }

// Elements per channel in the whole batch: the sum of the counts, or `count` if `counts` is null. In float64, where sums
// of integers are exact up to 2^53. The whole warp calls.
__device__ __forceinline__ double total_count(const count_t* counts, long long ranks, long long stride, double count) {
    if (counts == nullptr) {
        return count;
    }
    double sum = 0.0;
    for (long long rank = threadIdx.x % warp_size; rank < ranks; rank += warp_size) {
        sum += as_double(load(counts, rank * stride));
    }
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(whole_warp, sum, distance);
    }
    return sum;
}
