// GroupNorm forward, strategy `grid`: persistent blocks draw tiles by ticket. The moments of a slab are
// computed first. Its y follows while x is still in the L2 cache.
//
//   x, y: (N, C, HxW) or (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A slab has `slab_channels` channels: whole groups of one sample (channels-first: one group). Channels-first, a
//   tile is block_warps chunks of planes, one per warp. Channels-last, a tile is a chunk of rows.
//   Workspace: [N * chunks, C] moments (moments.cuh) of one channel over one chunk of one sample. From pair `words` on:
//   the counters of work_queue.cuh, all 0 at launch.
//   Grid: any number of blocks. prefetch_tiles: the number of tiles by which moments run ahead of outputs.
//   Shared memory: the moments of a channels-last tile; moments per thread and per channel of a slab, for the fold; the
//   three words of take_work.
//
// x is loaded twice, but only once from DRAM. An element of y is written by the thread that has read the same element
// of x, after the statistics are complete. So y may be the same array as x. The strategy wins for groups that are too
// large for the shared memory of a cluster and small relative to the L2 cache. It also wins if there are fewer groups
// than multiprocessors.
#include "common/fold_columns.cuh"
#include "group_norm/forward_sweep.cuh"
#include "partition/work_queue.cuh"

// Fewer threads have more registers each, for the activation of eight channels and two packs of y.
constexpr int resident_threads = is_wide<y_t> && !is_identity && sweep_t::slots > 1 ? 384 : 512;

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(resident_threads))
    group_norm_grid(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                    Pair* workspace, long long N, long long C, long long HxW, long long groups, long long chunk,
                    long long chunks, long long slab_channels, long long tiles, long long slabs,
                    long long prefetch_tiles, long long words, double eps) {
    const GroupMoments of = {x, gamma, beta, {N, C, HxW, chunk, chunks, slab_channels}, groups};
    const WorkQueue queue = {words_at(workspace, words), static_cast<unsigned>(tiles), static_cast<unsigned>(slabs),
                             static_cast<unsigned>(prefetch_tiles)};
    const int channels = static_cast<int>(slab_channels), group_channels = static_cast<int>(C / groups);
    int offset = 0;
    unsigned* drawn = shared_array<unsigned>(offset, drawn_words);
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    Moments* scratch = shared_array<Moments>(offset, Tile::threads);
    Moments* totals = shared_array<Moments>(offset, channels);
    take_work(
        queue, drawn,
        [&](long long own, long long tile) {
            store_sweep_moments(sweep_t(x, of.cut, own, tile), x, of.cut, partials, workspace);
        },
        [&](long long own) {
            const long long n = own / (C / slab_channels),
                            first_channel = (own - n * (C / slab_channels)) * slab_channels;
            fold_wide(
                channels, chunks, scratch,
                [&](long long row, int channel) {
                    return load_moments(workspace, of.cut.part(n, row, first_channel + channel));
                },
                [](Moments a, Moments b) { return merge(a, b); },
                [&](int channel, Moments whole) { totals[channel] = whole; });
            __syncthreads();
            const int lane = threadIdx.x % warp_size;
            for (int group = threadIdx.x / warp_size; group < channels / group_channels; group += block_warps) {
                Moments found = {};
                for (int c = lane; c < group_channels; c += warp_size) {
                    found = merge(found, totals[group * group_channels + c]);
                }
                found = warp_merge(found);
                if (lane == 0) {
                    of.give_statistics(mean, rstd, n, first_channel / group_channels + group, found, acc_t(eps));
                }
            }
        },
        [&](long long own, long long tile) { of.apply(sweep_t(x, of.cut, own, tile), mean, rstd, y); });
}
