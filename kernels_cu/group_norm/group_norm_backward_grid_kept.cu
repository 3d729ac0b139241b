// GroupNorm backward, strategy `grid` with keep=shared: a block keeps a piece of dy and of x in its shared memory until
// the sums of the groups are known. For channels-last tensors.
//
//   dy, x, dx: (N, HxW, C). mean, rstd: (N, groups). gamma, beta, dgamma, dbeta: (C) or null.
//   A slab has `slab_channels` channels: whole groups of one sample. A piece is a chunk of its rows. A slab has `chunks`
//   pieces.
//   Workspace: [N * chunks, C] pairs (sum g, sum g * xhat) of one channel over one piece, if dgamma or dbeta is wanted.
//   From pair `group_sums_at` on: [slabs, chunks, groups of a slab] the same of a group, weighted with gamma. From pair
//   `words` on: the ticket and the count of kept_items.cuh, all 0 at launch.
//   Grid: any number of blocks. Best is one resident block per piece.
//   Shared memory: the items drawn; pack_size pairs per thread; one pair per channel of a slab; the packs of a piece of
//   dy, and those of x.
//
// With as many blocks as pieces, every byte of dy and x is read once. A thread sums the packs of its column as they
// arrive, and keeps them. Later it computes dx from the same packs, so that no barrier is needed between. The block of a
// piece folds the group sums of its slab itself: a separate block would delay all others. For dgamma and dbeta each item
// folds the channel sums of `fold_channels` channels. A few warps do that before their dx, while the others write theirs.
// An element of dx is written by the thread that has read the same elements of dy and x, after all of them have been
// read. So dx may be the same array as dy or x.
//
// The strategy wins for tensors that fit in the shared memory of all multiprocessors, as in group_norm_grid_kept.cu.
#include "common/fold_columns.cuh"
#include "group_norm/backward_sweep.cuh"
#include "group_norm/kept_sweep.cuh"
#include "partition/kept_items.cuh"
#include "partition/slab.cuh"

// The statistics and parameters of a thread's channels, in registers. Groups after the second one are loaded where they
// are used.
struct HeldChannels {
    GroupGradients from;
    long long group = 0;             // of the first channel
    Statistics own = {}, next = {};  // of this group and of the next one
    ParameterPack<gamma_t> scales = {};
    ParameterPack<beta_t> biases = {};

    __device__ __forceinline__ void load_for(const sweep_t& sweep) {
        const int channel = static_cast<int>(sweep.first_channel), all = sweep.live() ? static_cast<int>(sweep.C) : 0;
        group = sweep.first_channel / from.group_channels();
        own = from.statistics(sweep.n, group, true);
        next = group + 1 < from.groups ? from.statistics(sweep.n, group + 1, true) : Statistics{};
        scales = parameters_of(from.gamma, channel, all, acc_t(1));
        if (!is_identity) {
            biases = parameters_of(from.beta, channel, all, acc_t(0));
        }
    }
    __device__ __forceinline__ Statistics statistics(long long n, long long of, bool) const {
        return of == group ? own : of == group + 1 ? next : from.statistics(n, of, true);
    }
    __device__ __forceinline__ acc_t rstd_of(long long n, long long of) const { return statistics(n, of, true).rstd; }
    __device__ __forceinline__ acc_t scale(int slot, long long) const { return scales.of(slot); }
    __device__ __forceinline__ Affine affine(int slot, long long, Statistics found) const {
        return Affine{found.mean, found.rstd * scales.of(slot), biases.of(slot)};
    }
};

__device__ __forceinline__ Pair plus(Pair a, Pair b) { return a + b; }

// Sums of(row, column) over the rows [0, rows), for any number of columns, without a barrier. A warp sums as many columns
// at a time as fill a sector. Calls emit(column, whole) in one lane per column.
template <typename Of, typename Emit>
__device__ __forceinline__ void sum_by_warps(long long columns, long long rows, Of of, Emit emit) {
    constexpr int sector_bytes = 32, width = sector_bytes / sizeof(Pair), parts = warp_size / width;
    constexpr int rows_at_once = 8;  // as many as fit in registers
    const int lane = threadIdx.x % warp_size, part = lane / width;
    for (long long first = threadIdx.x / warp_size * width; first < columns; first += block_warps * width) {
        const long long column = first + lane % width;
        Pair whole = {};
        for (long long row = part; row < rows; row += rows_at_once * parts) {
            Pair held[rows_at_once] = {};
#pragma unroll
            for (int k = 0; k < rows_at_once; ++k) {
                if (row + k * parts < rows && column < columns) {
                    held[k] = of(row + k * parts, column);
                }
            }
#pragma unroll
            for (int k = 0; k < rows_at_once; ++k) {
                whole = whole + held[k];
            }
        }
        whole = fold_lanes(whole, width, plus);
        if (part == 0 && column < columns) {
            emit(column, whole);
        }
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(gradient_threads))
    group_norm_backward_grid_kept(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                  const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                  gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                  long long groups, long long chunk, long long chunks, long long slab_channels,
                                  long long fold_channels, long long group_sums_at, long long words) {
    const GroupGradients of = {dy, x, mean, rstd, gamma, beta, {N, C, HxW, chunk, chunks, slab_channels}, groups};
    const ParameterGradients parameters = {nullptr, dgamma, dbeta, C};
    const int group_channels = static_cast<int>(C / groups), pieces = static_cast<int>(chunks);
    const int slabs_of_sample = static_cast<int>(C / slab_channels), channels = static_cast<int>(slab_channels);
    const int own_groups = channels / group_channels, columns = ceil_div(channels, pack_size);
    const int piece_packs = static_cast<int>(chunk < HxW ? chunk : HxW) * columns;
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    int offset = 0;
    const DrawnItems drawn(words_at(workspace, words), static_cast<int>(N) * slabs_of_sample * pieces, offset);
    Pair* const partials = shared_array<Pair>(offset, Tile::threads * pack_size);
    Pair* const totals = shared_array<Pair>(offset, channels);
    Pack<data_t>* const kept = shared_array<Pack<data_t>>(offset, 2 * piece_packs);
    Pair* const group_parts = workspace + group_sums_at;
    const auto piece_of = [&](int item) {
        return KeptSweep<2>(sweep_t(dy, of.cut, item / pieces, item % pieces), kept, piece_packs, {dy, x});
    };
    const auto first_channel_of = [&](int item) {
        return static_cast<long long>(item / pieces % slabs_of_sample) * slab_channels;
    };
    HeldChannels known = {of};
    take_items(
        drawn,
        [&](unsigned item, auto signal) {
            const int index = static_cast<int>(item);
            const KeptSweep<2> sweep = piece_of(index);
            const long long first_channel = first_channel_of(index);
            known.load_for(sweep);  // first: after the copies of the piece, these loads would end as late as they do
            const data_t* const from[2] = {dy, x};
            sweep.fetch(from);
            Pair found[pack_size] = {};
            of.thread_sums(sweep, known, found);
            sweep.gather_sets(
                partials, [&](int slot) { return found[slot]; },
                [](int width, Pair, auto each_set) {
                    Pair whole = {};
                    each_set([&](Pair set) { whole = whole + set; });
                    return fold_lanes(whole, width, plus);
                },
                [&](long long channel, Pair whole) {
                    if (parameters.wanted()) {
                        store(workspace, of.cut.part(sweep.n, sweep.chunk, channel), whole);
                    }
                    const acc_t weight = parameter(gamma, channel, acc_t(1));
                    totals[channel - first_channel] = Pair{weight * whole.first, weight * whole.second};
                });
            group_sums(totals, own_groups, group_channels, [&](int group, Pair sums) {
                if (threadIdx.x % warp_size == 0) {
                    store(group_parts, static_cast<long long>(index) * own_groups + group, sums);
                }
            });
            signal();
        },
        [&](unsigned item, bool latest) {
            int index = static_cast<int>(item);
            const long long first_item = index / pieces * pieces;
            fold_wide(
                own_groups, pieces, partials,
                [&](long long piece, int group) {
                    return load(group_parts, (first_item + piece) * own_groups + group);
                },
                plus, [&](int group, Pair sums) { totals[group] = Pair{sums.first / length, sums.second / length}; });
            make_opaque(index);  // nothing of the sweep occupies registers during the fold
            const KeptSweep<2> sweep = piece_of(index);
            const long long first_group = first_channel_of(index) / group_channels;
            LinearGradient linear[pack_size] = {};
            ActivationGrad activation_grad[pack_size] = {};
            if (!latest) {
                known.load_for(sweep);
            }
            of.coefficients(
                sweep, known, [&](long long group) { return totals[group - first_group]; }, linear, activation_grad);
            if (parameters.wanted()) {
                // Few warps have channels to fold. The others go on.
                const long long from = index * fold_channels, left = C - from;
                sum_by_warps(
                    left < fold_channels ? left : fold_channels, N * chunks,
                    [&](long long row, long long channel) { return load(workspace, row * C + from + channel); },
                    [&](long long channel, Pair whole) { parameters.store_channel(0, from + channel, whole); });
            }
            const data_t* const from[2] = {dy, x};
            sweep.write(latest, from, dx, [&](int slot, const acc_t(&v)[2]) {
                return input_gradient(activation_grad[slot](v[0], v[1]), v[1], linear[slot]);
            });
        });
}
