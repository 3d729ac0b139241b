// GroupNorm backward, strategy `grid`: persistent blocks draw tiles by ticket. The sums of a slab are computed
// first. Its dx follows while dy and x are still in the L2 cache.
//
//   dy, x, dx: (N, C, HxW) or (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   A slab has `slab_channels` channels: whole groups of one sample (channels-first: one group). Channels-first, a
//   tile is block_warps chunks of planes, one per warp. Channels-last, a tile is a chunk of rows.
//   Workspace: [N * chunks, C] pairs (sum g, sum g * xhat) of one channel over one chunk of one sample. From pair
//   `rows` on: [N, C] pairs (dbeta, dgamma), which a second kernel sums. For N = 1 the kernel writes dgamma and dbeta
//   themselves instead. From pair `words` on: the counters of work_queue.cuh, all 0 at launch.
//   Grid: any number of blocks. prefetch_tiles: the number of tiles by which sums run ahead of outputs.
//   Shared memory: the sums of a channels-last tile; one pair per thread and one per channel of a slab, for the fold;
//   the three words of take_work.
//
// dy and x are loaded twice, but only once from DRAM. An element of dx is written by the thread that has read the same
// elements of dy and x, after the sums of the slab are complete. So dx may be the same array as dy or x. The strategy
// wins for groups that are too large for the shared memory of a cluster and small relative to the L2 cache. It also
// wins if there are fewer groups than multiprocessors.
#include "common/fold_columns.cuh"
#include "common/text.cuh"
#include "group_norm/backward_sweep.cuh"
#include "partition/work_queue.cuh"

// Resident threads per multiprocessor that the launch bound requires. Blocks wait at barriers and for the ticket counter,
// so more of them keep a multiprocessor busy, if a thread needs few registers: one channel, 32-bit sums, no activation.
// The generic text keeps its sizes in registers, and would spill.
constexpr bool is_lean = is_identity && sweep_t::slots == 1 && sizeof(acc_t) == sizeof(float) && is_specialised;
constexpr int grid_threads = is_lean ? 768 : gradient_threads;

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(grid_threads))
    group_norm_backward_grid(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                             gamma_t* dbeta, long long N, long long C, long long HxW, long long groups, long long chunk,
                             long long chunks, long long slab_channels, long long tiles, long long slabs,
                             long long prefetch_tiles, long long rows, long long words) {
    const GroupGradients of = {dy, x, mean, rstd, gamma, beta, {N, C, HxW, chunk, chunks, slab_channels}, groups};
    const ParameterGradients parameters = {rows > 0 ? workspace + rows : nullptr, dgamma, dbeta, C};
    const WorkQueue queue = {words_at(workspace, words), static_cast<unsigned>(tiles), static_cast<unsigned>(slabs),
                             static_cast<unsigned>(prefetch_tiles)};
    const int channels = static_cast<int>(slab_channels), group_channels = static_cast<int>(C / groups);
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    int offset = 0;
    unsigned* drawn = shared_array<unsigned>(offset, drawn_words);
    Pair* partials = shared_array<Pair>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    Pair* totals = shared_array<Pair>(offset, channels);
    take_work(
        queue, drawn,
        [&](long long own, long long tile) { of.sums(sweep_t(dy, of.cut, own, tile), partials, workspace); },
        [&](long long own) {
            const long long n = own / (C / slab_channels),
                            first_channel = (own - n * (C / slab_channels)) * slab_channels;
            fold_wide(
                channels, chunks, scratch,
                [&](long long row, int channel) {
                    return load(workspace, of.cut.part(n, row, first_channel + channel));
                },
                [](Pair a, Pair b) { return a + b; },
                [&](int channel, Pair whole) {
                    parameters.store_channel(n, first_channel + channel, whole);
                    const acc_t weight = parameter(gamma, first_channel + channel, acc_t(1));
                    totals[channel] = Pair{weight * whole.first, weight * whole.second};
                });
            __syncthreads();
            group_sums(totals, channels / group_channels, group_channels, [&](int group, Pair sums) {
                if (threadIdx.x % warp_size == 0) {
                    store(workspace, of.means_of(n, first_channel / group_channels + group),
                          Pair{sums.first / length, sums.second / length});
                }
            });
        },
        [&](long long own, long long tile) { of.input(sweep_t(dy, of.cut, own, tile), workspace, dx); });
}
