// Sums over lanes, warps and blocks. Every order of summation is fixed by indices alone, so that the same call gives
// bitwise equal results. A butterfly of xor-shuffles leaves bitwise equal values in every lane, because a + b and b + a
// round alike.
#include "common/types.cuh"

constexpr int warp_size = 32;
constexpr unsigned whole_warp = 0xffffffffu;

// Two sums that are reduced together: one barrier and one access to the workspace instead of two.
struct alignas(2 * sizeof(acc_t)) Pair {
    acc_t first;
    acc_t second;
};

__device__ __forceinline__ Pair operator+(Pair a, Pair b) { return Pair{a.first + b.first, a.second + b.second}; }

// Number of partial results, of packs or of planes, that a thread adds up before it adds them to the rest. Two short
// chains of additions lose fewer digits than one long chain.
constexpr int chain = 32;

__device__ __forceinline__ acc_t shuffle_xor(acc_t value, int distance) {
    return __shfl_xor_sync(whole_warp, value, distance);
}

__device__ __forceinline__ Pair shuffle_xor(Pair value, int distance) {
    return Pair{shuffle_xor(value.first, distance), shuffle_xor(value.second, distance)};
}

// Sum over each run of `lanes` consecutive lanes (a power of two up to 32), returned to all of them. The whole warp
// calls.
template <typename T>
__device__ __forceinline__ T lanes_sum(T value, int lanes) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
        if (distance < lanes) {  // resolved at compile time if lanes is a Tile constant
            value = value + shuffle_xor(value, distance);
        }
    }
    return value;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
    return lanes_sum(value, warp_size);
}

constexpr int block_warps = Tile::threads / warp_size;
static_assert(Tile::threads % warp_size == 0 && block_warps <= warp_size, "whole warps, 1 to 32 of them");

// Number of blocks that make up `threads` resident threads on a multiprocessor, for a launch bound. The bound limits
// the registers of a kernel, so that enough loads are in flight. Without it the compiler uses as many registers as a
// single resident block may use.
constexpr int blocks_of(int threads) { return threads > Tile::threads ? threads / Tile::threads : 1; }

// Folds `value` over the warps of a block. fold(value) reduces the values of 32 lanes to lane 0. The result is valid in
// thread 0. `scratch` is in shared memory, block_warps long. A barrier must separate two calls with the same scratch.
template <typename T, typename Fold>
__device__ __forceinline__ T block_fold(T value, T* scratch, Fold fold) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    value = fold(value);
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    return warp == 0 ? fold(lane < block_warps ? scratch[lane] : T{}) : value;
}

// Most warps whose sums every thread reads and adds. The sums of more warps are read by one lane each and added by a
// butterfly, which waits for a shuffle in every step but needs fewer instructions.
constexpr int most_read_sums = 4;

// Sum of `count` values (a power of two), `step` apart. It adds them in the order of a butterfly.
template <int count, int step = 1, typename T>
__device__ __forceinline__ T sum_by_halves(T* values) {
    if constexpr (count == 1) {
        return values[0];
    } else {
        return sum_by_halves<count / 2, 2 * step>(values) + sum_by_halves<count / 2, 2 * step>(values + step);
    }
}

// Sum over each run of `warps` consecutive warps of the block, returned to all their threads. All threads add the same
// values in the same order. `scratch` is in shared memory, block_warps long. A barrier must separate two calls with the
// same scratch.
template <int warps = block_warps, typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    static_assert(block_warps % warps == 0, "equal runs");
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    value = warp_sum(value);
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    T* const run = scratch + warp / warps * warps;
    if constexpr (warps <= most_read_sums && (warps & (warps - 1)) == 0) {
        return sum_by_halves<warps>(run);
    } else {
        return warp_sum(lane < warps ? run[lane] : T{});
    }
}

// Folds partials[row][part][column], in shared memory, over its parts into part 0, by halves. Thread (part, column)
// folds its entry of each row. Neighbouring threads access neighbouring entries of a row, so that no two lanes of a
// warp have a bank conflict. An idle thread has part >= parts. The whole block calls, after a barrier. Ends with a
// barrier.
template <int rows, typename T, typename Merge>
__device__ __forceinline__ void fold_parts(T* partials, int parts, int columns, int part, int column, Merge merge) {
    int half = 1;
    while (2 * half < parts) {
        half *= 2;
    }
    for (; half > 0; half /= 2) {
        if (part < half && part + half < parts) {
            T* const kept = partials + part * columns + column;
            const T* const other = kept + half * columns;
#pragma unroll 4
            for (int row = 0; row < rows; ++row) {
                const int at = row * parts * columns;
                kept[at] = merge(kept[at], other[at]);
            }
        }
        __syncthreads();
    }
}
