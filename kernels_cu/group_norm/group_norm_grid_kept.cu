// GroupNorm forward, strategy `grid` with keep=shared: a block keeps a piece of x in its shared memory until the
// statistics are known. For channels-last x.
//
//   x, y: (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A slab has `slab_channels` channels: whole groups of one sample. A piece is a chunk of its rows. A slab has `chunks`
//   pieces.
//   Workspace: [slabs, groups of a slab, chunks] moments (moments.cuh) of a group in a piece. From pair `words` on: the
//   ticket and the count of kept_items.cuh, all 0 at launch.
//   Grid: any number of blocks. Best is one resident block per piece.
//   Shared memory: the items drawn; Tile::pack_groups moments per thread; statistics per group of a slab; the packs of a
//   piece. pack_groups: the most groups of which a pack has channels.
//
// With as many blocks as pieces, every byte of x is read once. A thread sums the packs of its column as they arrive, and
// keeps them. Later it normalises the same packs, so that no barrier is needed between. The block of a piece folds the
// moments of all pieces of its slab itself: a separate block would delay all others. An element of y is written by the
// thread that has read the same element of x, after all of x has been read. So y may be the same array as x.
//
// The strategy wins for tensors that fit in the shared memory of all multiprocessors. With all groups of a sample, a
// piece is one run of memory. The rows of a cluster's slab are short, because a cluster cannot hold all groups. Narrow
// rows cost requests to the L2 cache, and sectors that are written in parts.
#include "group_norm/forward_sweep.cuh"
#include "group_norm/kept_sweep.cuh"
#include "partition/kept_items.cuh"

// Calls emit(group, moments of the group) in one lane per group, for the groups of a slab. They are merged from the sets
// set_of(group, at), 0 <= at < sets_of(group), of which the first has elements. `count` is the number of elements of a
// group. As many lanes merge the sets of a group as there are threads for it. A lane holds its first `held` sets in
// registers, and calls set_of twice for the others. The whole block calls.
template <int held, typename SetsOf, typename SetOf, typename Emit>
__device__ __forceinline__ void fold_groups(int groups, acc_t count, SetsOf sets_of, SetOf set_of, Emit emit) {
    int width = 1;  // groups that a warp processes at a time
    while (width < warp_size && width * block_warps < groups) {
        width *= 2;
    }
    const int lane = threadIdx.x % warp_size, step = warp_size / width;
    for (int base = threadIdx.x / warp_size * width; base < groups; base += block_warps * width) {
        const bool live = base + lane % width < groups;  // other lanes only take part in the shuffles
        const int group = live ? base + lane % width : base, sets = sets_of(group), first = lane / width;
        Moments own[held];
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const int at = first + i * step;
            own[i] = set_of(group, at < sets ? at : 0);  // without a branch, so that all loads are in flight together
        }
        const acc_t near = __shfl_sync(whole_warp, own[0].mean, lane % width);  // of set 0
        const Moments whole = merge_sets(count, near, width, [&](auto use) {
#pragma unroll
            for (int i = 0; i < held; ++i) {
                if (first + i * step < sets) {
                    use(own[i]);
                }
            }
#pragma unroll 1
            for (int at = first + held * step; at < sets; at += step) {
                use(set_of(group, at));
            }
        });
        if (live && lane < width) {
            emit(group, whole);
        }
    }
}
// Sets that a lane holds: of the piece, and of all pieces.
constexpr int held_parts = 2, held_pieces = sizeof(acc_t) == sizeof(float) ? 8 : 4;

// Calls emit(group of the slab, moments of the group in the piece) in one lane per group. `found` are those of a
// thread's column. `partials` is in shared memory, Tile::pack_groups moments per thread: those of each group of its
// pack. The whole block calls.
template <typename Emit>
__device__ __forceinline__ void gather_groups(const sweep_t& sweep, const ColumnMoments& found, int groups,
                                              int group_channels, Moments* partials, Emit emit) {
    // Group of the slab that contains the first channel of a column.
    const auto group_of = [&](int column) { return column * pack_size / group_channels; };
    const int past = (group_of(sweep.column) + 1) * group_channels - sweep.column * pack_size;  // slots of the first
    const int parts = sweep.parts, columns = sweep.columns;
    if (sweep.part < parts) {
#pragma unroll 1
        for (int i = 0; i < Tile::pack_groups; ++i) {
            const int begin = i == 0 ? 0 : past + (i - 1) * group_channels, end = past + i * group_channels;
            const bool last = i == Tile::pack_groups - 1;  // it ends with the pack or later: no masks for one group
            partials[(i * parts + sweep.part) * columns + sweep.column] =
                found.over(begin, last || pack_size < end ? pack_size : end);
        }
    }
    __syncthreads();
    const auto first_of = [&](int group) { return group * group_channels / pack_size; };
    const auto width_of = [&](int group) {
        return ((group + 1) * group_channels - 1) / pack_size - first_of(group) + 1;
    };
    fold_groups<held_parts>(
        groups, acc_t(sweep.rows) * acc_t(group_channels), [&](int group) { return parts * width_of(group); },
        [&](int group, int at) {
            const int width = width_of(group), of_part = at / width;
            const int of_column = first_of(group) + at - of_part * width;
            return partials[((group - group_of(of_column)) * parts + of_part) * columns + of_column];
        },
        emit);
}

// Fewer threads have more registers each, for the activation of eight channels.
constexpr int resident_threads = is_identity ? 512 : 384;

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(resident_threads))
    group_norm_grid_kept(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                         Pair* workspace, long long N, long long C, long long HxW, long long groups, long long chunk,
                         long long chunks, long long slab_channels, long long words, double eps) {
    const GroupMoments of = {x, gamma, beta, {N, C, HxW, chunk, chunks, slab_channels}, groups};
    const int group_channels = static_cast<int>(of.group_channels()), pieces = static_cast<int>(chunks);
    const int slabs_of_sample = static_cast<int>(C / slab_channels);
    const int own_groups = static_cast<int>(slab_channels) / group_channels;
    const int columns = ceil_div(static_cast<int>(slab_channels), pack_size);
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    int offset = 0;
    const DrawnItems drawn(words_at(workspace, words), static_cast<int>(N) * slabs_of_sample * pieces, offset);
    Moments* const partials = shared_array<Moments>(offset, Tile::threads * Tile::pack_groups);
    Statistics* const known = shared_array<Statistics>(offset, own_groups);
    Pack<data_t>* const kept =
        shared_array<Pack<data_t>>(offset, static_cast<int>(chunk < HxW ? chunk : HxW) * columns);
    const auto part = [&](int slab, int group, int piece) {
        return (static_cast<long long>(slab) * own_groups + group) * pieces + piece;
    };
    const auto piece_of = [&](int item) {
        return KeptSweep<1>(sweep_t(x, of.cut, item / pieces, item % pieces), kept, 0, {x});
    };
    take_items(
        drawn,
        [&](unsigned item, auto signal) {
            int index = static_cast<int>(item);
            const KeptSweep<1> kept_sweep = piece_of(index);
            const data_t* const from[1] = {x};
            kept_sweep.fetch(from);
            const ColumnMoments found = column_moments(kept_sweep, x);
            make_opaque(index);  // the members that only gather_groups uses would occupy registers meanwhile
            const KeptSweep<1> sweep = piece_of(index);
            gather_groups(sweep, found, own_groups, group_channels, partials, [&](int group, Moments whole) {
                store_moments(workspace, part(index / pieces, group, index % pieces), whole);
            });
            signal();
        },
        [&](unsigned item, bool latest) {
            int index = static_cast<int>(item);
            const int slab = index / pieces, piece = index - slab * pieces;
            const int n = slab / slabs_of_sample, first_group = (slab - n * slabs_of_sample) * own_groups;
            fold_groups<held_pieces>(
                own_groups, length, [&](int) { return pieces; },
                [&](int group, int other) { return load_moments(workspace, part(slab, group, other)); },
                [&](int group, Moments whole) {
                    const Statistics found = whole.statistics(acc_t(eps));
                    known[group] = found;
                    if (piece == 0) {
                        store(mean, n * groups + first_group + group, found.mean);
                        store(rstd, n * groups + first_group + group, found.rstd);
                    }
                });
            make_opaque(index);  // nothing of the sweep occupies registers during the fold
            const KeptSweep<1> sweep = piece_of(index);
            const int channel = static_cast<int>(sweep.first_channel), all = sweep.live() ? static_cast<int>(C) : 0;
            const auto scale = parameters_of(gamma, channel, all, acc_t(1));
            const auto bias = parameters_of(beta, channel, all, acc_t(0));
            __syncthreads();
            Affine affine[sweep_t::slots] = {};
            each_slot(
                sweep, group_channels, [&](long long group) { return known[group - first_group]; },
                [&](int slot, long long, Statistics found) {
                    affine[slot] = Affine{found.mean, found.rstd * scale.of(slot), bias.of(slot)};
                });
            const data_t* const from[1] = {x};
            sweep.write(latest, from, y, [&](int slot, const acc_t(&v)[1]) {
                return activation_t::apply(normalised(v[0], affine[slot]));
            });
        });
}
