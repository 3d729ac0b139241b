// Sums over lanes, warps and blocks. Every order of summation is fixed by indices alone, so the same call gives the
// same bits. A butterfly of xor-shuffles leaves the same bits in every lane, because a + b and b + a round alike.
#include "common/types.cuh"

constexpr int warp_size = 32;
constexpr unsigned whole_warp = 0xffffffffu;

// Two sums that travel together: one barrier, one access to the workspace instead of two.
struct alignas(2 * sizeof(acc_t)) Pair {
    acc_t first;
    acc_t second;
};

__device__ __forceinline__ Pair operator+(Pair a, Pair b) { return Pair{a.first + b.first, a.second + b.second}; }

// Partial results, of packs or of planes, that a thread puts together before they join the rest: two short chains of
// additions lose fewer digits than a long one.
constexpr int chain = 32;

__device__ __forceinline__ acc_t shuffle_xor(acc_t value, int distance) {
    return __shfl_xor_sync(whole_warp, value, distance);
}

__device__ __forceinline__ Pair shuffle_xor(Pair value, int distance) {
    return Pair{shuffle_xor(value.first, distance), shuffle_xor(value.second, distance)};
}

// Sum over each run of `lanes` consecutive lanes (a power of two up to 32), given to all of them. The whole warp calls.
template <typename T>
__device__ __forceinline__ T lanes_sum(T value, int lanes) {
#pragma unroll
    for (int distance = warp_size / 2; distance > 0; distance /= 2) {
        if (distance < lanes) {  // a compile-time choice wherever lanes is a Tile constant
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

// Blocks that make up `threads` resident threads on a multiprocessor: what a launch bound asks for, so that a kernel's
// registers leave room for enough loads in flight. Without it the compiler spends what a lone block may.
constexpr int blocks_of(int threads) { return threads > Tile::threads ? threads / Tile::threads : 1; }

// fold(value) over the warps of a block: fold takes 32 lanes' values into lane 0. The result is right in thread 0.
// `scratch` is shared, block_warps long; a barrier lies between two calls with the same scratch.
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

// Sum over each run of `warps` consecutive warps of the block, given to all their threads, in an order of warps that is
// the same for all of them: every thread adds the same values by the same butterfly. `scratch` is shared, block_warps
// long; a barrier lies between two calls with the same scratch.
template <int warps = block_warps, typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    static_assert(block_warps % warps == 0, "equal runs");
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    value = warp_sum(value);
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    return warp_sum(lane < warps ? scratch[warp / warps * warps + lane] : T{});
}

// Folds partials[row][part][column], which is shared, over its parts into the first, by halves. Thread (part, column)
// does its rows, and neighbours have neighbours of a row, so that no two of a warp meet in a bank; an idle one has
// part >= parts. The whole block calls, behind a barrier; ends with one.
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
