// Rounds every element of `wide` to data_t, and widens every element of `stored`. Uses types.cuh only.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    conversions(const float* wide, data_t* rounded, const data_t* stored, float* widened, long long count) {
    for (long long i = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; i < count;
         i += static_cast<long long>(gridDim.x) * Tile::threads) {
        store(rounded, i, narrow<data_t>(load(wide, i)));
        store(widened, i, widen(load(stored, i)));
    }
}
