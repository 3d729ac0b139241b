// Channels-last slabs in registers, forward and backward: the columns of packs of a slab, and the sums of its groups.
// Shared by the strategies `block` (a slab of groups per block) and `cluster` (a slab per cluster, each block with some
// of its rows).
//
// A slab is Tile::slab_groups neighbouring groups of one sample: HxW rows of whole packs, C elements apart. A thread
// holds packs of one column of it, so that the channels of its elements, and their parameters, are the same in every
// row. The host ensures that a group has at least pack_size channels. A pack has then channels of at most two groups.
#include "common/parameters.cuh"
#include "common/text.cuh"
#include "partition/team.cuh"

// Sums of the groups of a slab, which are reduced together.
struct SlabSums {
    Pair of[Tile::slab_groups];

    // Those of one group, which lies in the slab. It is no index of an array, which would not stay in registers.
    __device__ __forceinline__ Pair group(int number) const {
        Pair found = of[0];
#pragma unroll
        for (int g = 1; g < Tile::slab_groups; ++g) {
            found = g == number ? of[g] : found;
        }
        return found;
    }
};

__device__ __forceinline__ SlabSums operator+(const SlabSums& a, const SlabSums& b) {
    SlabSums sums;
#pragma unroll
    for (int g = 0; g < Tile::slab_groups; ++g) {
        sums.of[g] = a.of[g] + b.of[g];
    }
    return sums;
}

// Adds up the groups over a warp. In each of the first steps, a lane passes half of its groups to another lane and keeps
// the other half; a butterfly would pass all of them in every step. Lane l ends with the sum of group l * groups / 32 in
// of[0].
template <int groups>
__device__ __forceinline__ void sum_by_groups(Pair (&of)[groups], int distance) {
    static_assert((groups & (groups - 1)) == 0, "each step halves the groups");
    if constexpr (groups > 1) {
        const bool upper = (threadIdx.x & distance) != 0;
        Pair kept[groups / 2];
#pragma unroll
        for (int g = 0; g < groups / 2; ++g) {
            const Pair low = of[g], high = of[g + groups / 2];
            const Pair passed = shuffle_xor(upper ? low : high, distance);
            kept[g] = (upper ? high : low) + passed;
        }
        sum_by_groups(kept, distance / 2);
        of[0] = kept[0];
    } else {
        for (; distance > 0; distance /= 2) {
            of[0] = of[0] + shuffle_xor(of[0], distance);
        }
    }
}

// The sums over a warp, returned to all lanes. All lanes read a group's sum from the same lane.
__device__ __forceinline__ SlabSums warp_sum(SlabSums value) {
    constexpr int lanes = warp_size / Tile::slab_groups;  // that end with the same group
    sum_by_groups(value.of, warp_size / 2);
    const Pair kept = value.of[0];
#pragma unroll
    for (int g = 0; g < Tile::slab_groups; ++g) {
        value.of[g] =
            Pair{__shfl_sync(whole_warp, kept.first, g * lanes), __shfl_sync(whole_warp, kept.second, g * lanes)};
    }
    return value;
}

template <int lanes>  // of a block of one warp
__device__ __forceinline__ SlabSums sum_of_lanes(const SlabSums& value) {
    return warp_sum(value);
}

// The groups of a column's channels: `first`, and from slot `past` on the next one. If groups are whole packs, there is
// no next one.
struct ColumnGroups {
    int first;
    int past;
    int step;  // the second group begins at a multiple of it
    bool two;  // whether any column has two groups: a constant if the size of a group is

    __device__ __forceinline__ ColumnGroups(int channel, int group_channels) {
        first = channel / group_channels;
        past = (first + 1) * group_channels - channel;
        // Slots of one step select alike, so that the compiler selects once. It must know the size of a group for that.
        step = !is_specialised || group_channels % 2 != 0 ? 1 : group_channels % 4 != 0 ? 2 : 4;
        two = group_channels % pack_size != 0;
    }
    // The second group, or the first again if there is no second.
    __device__ __forceinline__ int second() const { return two && past < pack_size ? first + 1 : first; }
    template <typename T>
    __device__ __forceinline__ T of_slot(int slot, T of_first, T of_second) const {
        return !two || slot / step * step < past ? of_first : of_second;
    }
    // The sums of this column's groups, from the sums of its slots; zero for the slab's other groups.
    __device__ __forceinline__ SlabSums sums_of(const Pair (&slots)[pack_size]) const {
        Pair a = {}, b = {};
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            a = a + of_slot(slot, slots[slot], Pair{});
            b = b + of_slot(slot, Pair{}, slots[slot]);
        }
        SlabSums sums;
#pragma unroll
        for (int g = 0; g < Tile::slab_groups; ++g) {
            sums.of[g] = g == first ? a : two && g == first + 1 ? b : Pair{};
        }
        return sums;
    }
};

// The column of a slab whose packs a thread holds: those in the rows part, part + parts, ... of the block's piece.
struct SlabColumn {
    int channels;  // of the slab
    int columns;   // of the slab
    int part;      // parts, if the thread has no column: it loads, adds and stores nothing
    int parts;     // threads per column
    int from;      // first channel of the column in the slab
    int begin;     // first row of the piece
    int rows;      // of the piece
    ColumnGroups own;

    __device__ __forceinline__ SlabColumn(int group_channels, int HxW, int pieces, int piece)
        : channels(Tile::slab_groups * group_channels),
          columns(channels / pack_size),
          part(threadIdx.x / columns),
          parts(Tile::threads / columns),
          from((threadIdx.x - part * columns) * pack_size),
          begin(piece * ceil_div(HxW, pieces)),
          rows(HxW - begin < ceil_div(HxW, pieces) ? HxW - begin : ceil_div(HxW, pieces)),
          own(from, group_channels) {}
    __device__ __forceinline__ bool live() const { return part < parts; }
    // Whether the column has a row for the k-th pack. It is a constant for all but the last pack if HxW is.
    __device__ __forceinline__ bool has(int k) const { return (k + 1) * parts <= rows || part + k * parts < rows; }
    // Elements from the thread's first row to that of its k-th pack. Rows are `pitch` elements apart.
    __device__ __forceinline__ long long step(int k, long long pitch) const {
        return static_cast<long long>(k * parts) * pitch;
    }
};

// The statistics of a column's groups.
struct ColumnStatistics {
    Statistics first;
    Statistics second;
};
