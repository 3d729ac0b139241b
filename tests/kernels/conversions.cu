// Rounds every element of `wide` to data_t, and widens every element of `stored`. If narrow_two does not round two
// elements as narrow does, a result is wrong. Uses types.cuh only.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    conversions(const float* wide, data_t* rounded, const data_t* stored, float* widened, long long count) {
    for (long long i = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; i < count;
         i += static_cast<long long>(gridDim.x) * Tile::threads) {
        const float value = load(wide, i), other = load(wide, count - 1 - i);
        data_t one = narrow<data_t>(value);
        const unsigned two = one.bits | static_cast<unsigned>(narrow<data_t>(other).bits) << 16;
        if (narrow_two<data_t>(value, other) != two) {
            one.bits ^= 0x7fffu;
        }
        store(rounded, i, one);
        store(widened, i, widen(load(stored, i)));
    }
}
