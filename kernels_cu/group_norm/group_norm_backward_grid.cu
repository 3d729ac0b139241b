// GroupNorm backward, strategy `grid`: persistent blocks take tiles by ticket, the sums of a team of tiles first, dx
// while dy and x are still in the L2 cache.
//
//   dy, x, dx (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups); gamma, beta (C) or null
//   a team: `team` channels, whole groups of one sample (channels-first: one group); its tiles: block_warps chunks of
//   planes of a block of warps (channels-first), or a chunk of rows (channels-last)
//   workspace: [N * chunks, C] pairs: sum g and sum g * xhat of one channel over one chunk of one sample; from pair
//   `rows` [N, C] pairs (dbeta, dgamma) that a second kernel sums, but for N = 1, whose are the results dgamma and dbeta;
//   from pair `words` the counters of work_queue.cuh, all 0
//   grid: any number of blocks; prefetch_tiles: tiles that sums run ahead of outputs
//   shared memory: sums of a channels-last tile; of a team a pair a thread and a channel; take_work's three words
//
// dy and x are asked for twice and come from DRAM once. An element of dx is written by the thread that has read the same
// elements of dy and x, when their sums are complete: dx may be dy or x. Wins where a group is too large for the shared
// memory of a cluster and small against the L2 cache, and where groups are fewer than multiprocessors.
#include "common/columns.cuh"
#include "group_norm/backward_sweep.cuh"
#include "partition/work_queue.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(gradient_threads))
    group_norm_backward_grid(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                             gamma_t* dbeta, long long N, long long C, long long HxW, long long groups, long long chunk,
                             long long chunks, long long team, long long tiles, long long teams,
                             long long prefetch_tiles, long long rows, long long words) {
    const GroupGradients of = {dy, x, mean, rstd, gamma, beta, {N, C, HxW, chunk, chunks, team}, groups};
    const ParameterGradients parameters = {rows > 0 ? workspace + rows : nullptr, dgamma, dbeta, C};
    const WorkQueue queue = {words_at(workspace, words), static_cast<unsigned>(tiles), static_cast<unsigned>(teams),
                             static_cast<unsigned>(prefetch_tiles)};
    const int channels = static_cast<int>(team), group_channels = static_cast<int>(C / groups);
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    int offset = 0;
    unsigned* drawn = shared_array<unsigned>(offset, 4);
    Pair* partials = shared_array<Pair>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    Pair* totals = shared_array<Pair>(offset, channels);
    take_work(
        queue, drawn,
        [&](long long own, long long tile) { of.sums(sweep_t(dy, of.cut, own, tile), partials, workspace); },
        [&](long long own) {
            const long long n = own / (C / team), first_channel = (own - n * (C / team)) * team;
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
