// GroupNorm forward of channels-last groups in registers. Shared by the strategies `block` (a slab of groups per block)
// and `cluster` (a slab per cluster, each block with some of its rows). x, y: (N, HxW, C). gamma, beta: (C) or null.
// mean, rstd: (N, groups).
//
// A slab is Tile::slab_groups neighbouring groups of one sample: HxW rows of whole packs, C elements apart. A thread
// holds packs of one column of it, so that the channels of its elements, and their parameters, are the same in every
// row. The host ensures that a group has at least pack_size channels. A pack has then channels of at most two groups.
#include "common/activation.cuh"
#include "common/parameters.cuh"
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

__device__ __forceinline__ SlabSums shuffle_xor(const SlabSums& value, int distance) {
    SlabSums sums;
#pragma unroll
    for (int g = 0; g < Tile::slab_groups; ++g) {
        sums.of[g] = shuffle_xor(value.of[g], distance);
    }
    return sums;
}

template <int lanes>
__device__ __forceinline__ SlabSums sum_of_lanes(const SlabSums& value) {
    return lanes_sum(value, lanes);
}

// The groups of a column's channels: `first`, and from slot `past` on the next one. If groups are whole packs, there is
// no next one.
struct ColumnGroups {
    int first;
    int past;
    bool two;  // whether any column has two groups: a constant if the size of a group is

    __device__ __forceinline__ ColumnGroups(int channel, int group_channels) {
        first = channel / group_channels;
        past = (first + 1) * group_channels - channel;
        two = group_channels % pack_size != 0;
    }
    // The second group, or the first again if there is no second.
    __device__ __forceinline__ int second() const { return two && past < pack_size ? first + 1 : first; }
    template <typename T>
    __device__ __forceinline__ T of_slot(int slot, T of_first, T of_second) const {
        return !two || slot < past ? of_first : of_second;
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

// The statistics of a column's groups.
struct ColumnStatistics {
    Statistics first;
    Statistics second;
};

// The packs of x that a thread holds: those of its column in the rows part, part + parts, ... of the block's piece.
struct HeldColumn {
    ColumnGroups own;
    int part;   // parts, if the thread has no column: it loads, adds and stores nothing
    int parts;  // threads per column
    int rows;   // of the piece
    Pack<data_t> packs[Tile::packs_per_thread];

    __device__ __forceinline__ bool live() const { return part < parts; }
    // Whether the column has a row for the k-th pack. It is a constant for all but the last pack if HxW is.
    __device__ __forceinline__ bool has(int k) const { return (k + 1) * parts <= rows || part + k * parts < rows; }
    // Elements from the thread's first row to that of its k-th pack. Rows are `pitch` elements apart.
    __device__ __forceinline__ long long step(int k, long long pitch) const {
        return static_cast<long long>(k * parts) * pitch;
    }
    // The sums of d and of d^2 over the slab's groups in the block or cluster, for the distances d of elements from the
    // centre of their group.
    template <typename T>
    __device__ __forceinline__ SlabSums sums(T& team, acc_t centre_of_first, acc_t centre_of_second) const {
        Pair slots[pack_size] = {};
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (has(k)) {
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    const acc_t centre = own.of_slot(slot, centre_of_first, centre_of_second);
                    const acc_t d = acc_t(widen(packs[k].get(slot))) - centre;
                    slots[slot] = with_product(slots[slot], d, d);
                }
            }
        }
        return team.sum(live() ? own.sums_of(slots) : SlabSums{});
    }
    // Mean and rstd of the column's groups, as run_statistics() in team.cuh. The shifts are elements of the groups, the
    // same in all threads. `length` is the number of elements of a group.
    template <typename T>
    __device__ __forceinline__ ColumnStatistics statistics(T& team, acc_t shift_of_first, acc_t shift_of_second,
                                                           acc_t length, acc_t eps) {
        SlabSums all = sums(team, shift_of_first, shift_of_second);
        const auto centre_of = [&](acc_t shift, int group) {
            // Squares of single d: threads have different numbers of rows, so that no number of d is that of all sums.
            return second_centre(shift, all.group(group), acc_t(1) / length, 1);
        };
        const acc_t centre_of_first = centre_of(shift_of_first, own.first);
        const acc_t centre_of_second = centre_of(shift_of_second, own.second());
        between_passes(packs);
        all = sums(team, centre_of_first, centre_of_second);
        between_passes(packs);
        return ColumnStatistics{corrected_statistics(centre_of_first, all.group(own.first), length, eps),
                                corrected_statistics(centre_of_second, all.group(own.second()), length, eps)};
    }
};

// Every byte of x is read once, before the block or cluster writes y. So y may be the same array as x.
// `pieces` is the number of blocks of a slab's cluster, 1 if there is no cluster.
template <int pieces = 1>
__device__ __forceinline__ void normalise_columns(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y,
                                                  acc_t* mean, acc_t* rstd, long long N, long long C, long long HxW,
                                                  long long groups, acc_t eps) {
    typedef Team<Tile::threads, pieces, SlabSums> team_t;
    const int group_channels = static_cast<int>(C / groups), channels = Tile::slab_groups * group_channels;
    const int columns = channels / pack_size, parts = Tile::threads / columns;
    const int part = threadIdx.x / columns, from = (threadIdx.x - part * columns) * pack_size;
    const ColumnGroups own(from, group_channels);
    int offset = 0;
    team_t team = {team_t::shared_scratch(offset)};
    const int piece_rows = ceil_div(static_cast<int>(HxW), pieces), begin = team.rank() * piece_rows;
    const int rows = static_cast<int>(HxW) - begin < piece_rows ? static_cast<int>(HxW) - begin : piece_rows;
    const bool plain_x = in_whole_packs(x, channels), plain_y = in_whole_packs(y, channels);
    const long long slabs = groups / Tile::slab_groups;
    for (long long item = blockIdx.x / pieces; item < N * slabs; item += gridDim.x / pieces) {
        const long long n = item / slabs, slab = item - n * slabs;
        const long long head = n * HxW * C + slab * channels, start = head + (begin + part) * C;
        HeldColumn held = {own, part, parts, rows, {}};
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held.packs[k] = held.live() && held.has(k)
                                ? load_pack_of(x, start + held.step(k, C), from, channels, plain_x)
                                : Pack<data_t>{};
        }
        // The shift of a group's first sum: its first element in the sample, the same in all blocks of a cluster.
        const data_t shift_of_first = load(x, head + own.first * group_channels);
        const data_t shift_of_second = load(x, head + own.second() * group_channels);
        const auto scale = parameters_of(from_index(gamma, slab * channels), from, channels, acc_t(1));
        const auto bias = parameters_of(from_index(beta, slab * channels), from, channels, acc_t(0));
        const ColumnStatistics found =
            held.statistics(team, usable_shift(widen(shift_of_first)), usable_shift(widen(shift_of_second)),
                            acc_t(group_channels) * acc_t(HxW), eps);
        // The thread whose first pack has a group's first channel stores the statistics of that group.
        if (team.rank() == 0 && part == 0) {
            const long long at = n * groups + slab * Tile::slab_groups + own.first;
            if (own.first * group_channels == from) {
                store(mean, at, found.first.mean);
                store(rstd, at, found.first.rstd);
            }
            if (own.second() > own.first) {
                store(mean, at + 1, found.second.mean);
                store(rstd, at + 1, found.second.rstd);
            }
        }
        Affine known[pack_size];
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            const Statistics of = own.of_slot(slot, found.first, found.second);
            known[slot] = Affine{of.mean, of.rstd * scale.of(slot), bias.of(slot)};
        }
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (held.live() && held.has(k)) {
                acc_t out[pack_size];
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    out[i] = activation_t::apply(normalised(widen(held.packs[k].get(i)), known[i]));
                }
                store_pack_of(y, start + held.step(k, C), from, channels, narrow_pack<y_t>(out), plain_y);
            }
        }
    }
    team.leave();
}
