// GroupNorm forward of channels-last slabs in registers. x, y: (N, HxW, C). gamma, beta: (C) or null. mean, rstd:
// (N, groups).
#include "common/activation.cuh"
#include "group_norm/slab_columns.cuh"

// The packs of x that a thread holds.
struct HeldColumn {
    SlabColumn at;
    Pack<data_t> packs[Tile::packs_per_thread];

    // The sums of d and of d^2 over the slab's groups in the block or cluster, for the distances d of elements from the
    // centre of their group.
    template <typename T>
    __device__ __forceinline__ SlabSums sums(T& team, acc_t centre_of_first, acc_t centre_of_second) const {
        Pair slots[pack_size] = {};
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            if (at.has(k)) {
#pragma unroll
                for (int slot = 0; slot < pack_size; ++slot) {
                    const acc_t centre = at.own.of_slot(slot, centre_of_first, centre_of_second);
                    const acc_t d = acc_t(widen(packs[k].get(slot))) - centre;
                    slots[slot] = with_product(slots[slot], d, d);
                }
            }
        }
        return team.sum(at.live() ? at.own.sums_of(slots) : SlabSums{});
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
        const acc_t centre_of_first = centre_of(shift_of_first, at.own.first);
        const acc_t centre_of_second = centre_of(shift_of_second, at.own.second());
        between_passes(packs);
        all = sums(team, centre_of_first, centre_of_second);
        between_passes(packs);
        return ColumnStatistics{corrected_statistics(centre_of_first, all.group(at.own.first), length, eps),
                                corrected_statistics(centre_of_second, all.group(at.own.second()), length, eps)};
    }
};

// Every byte of x is read once, before the block or cluster writes y. So y may be the same array as x.
// `pieces` is the number of blocks of a slab's cluster, 1 if there is no cluster.
template <int pieces = 1>
__device__ __forceinline__ void normalise_columns(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y,
                                                  acc_t* mean, acc_t* rstd, long long N, long long C, long long HxW,
                                                  long long groups, acc_t eps) {
    typedef Team<Tile::threads, pieces, SlabSums> team_t;
    const int group_channels = static_cast<int>(C / groups);
    int offset = 0;
    team_t team = {team_t::shared_scratch(offset)};
    const SlabColumn column(group_channels, static_cast<int>(HxW), pieces, team.rank());
    const ColumnGroups& own = column.own;
    const int channels = column.channels, from = column.from;
    const bool plain_x = in_whole_packs(x, channels), plain_y = in_whole_packs(y, channels);
    const long long slabs = groups / Tile::slab_groups;
    for (long long item = blockIdx.x / pieces; item < N * slabs; item += gridDim.x / pieces) {
        const long long n = item / slabs, slab = item - n * slabs;
        const long long head = n * HxW * C + slab * channels, start = head + (column.begin + column.part) * C;
        HeldColumn held = {column, {}};
#pragma unroll
        for (int k = 0; k < Tile::packs_per_thread; ++k) {
            held.packs[k] = column.live() && column.has(k)
                                ? load_pack_of(x, start + column.step(k, C), from, channels, plain_x)
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
        if (team.rank() == 0 && column.part == 0) {
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
            if (column.live() && column.has(k)) {
                acc_t out[pack_size];
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    out[i] = activation_t::apply(normalised(widen(held.packs[k].get(i)), known[i]));
                }
                store_pack_of(y, start + column.step(k, C), from, channels, narrow_pack<y_t>(out), plain_y);
            }
        }
    }
    team.leave();
}
