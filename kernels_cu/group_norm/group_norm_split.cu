// GroupNorm forward, strategy `split`: statistics first, y in a second sweep. Any size, any layout: the fallback.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   workspace [N * chunks, C] moments (moments.cuh) of one channel over one chunk of one sample
//
//   group_norm_split_moments  reads x, writes the workspace
//   group_norm_split_fold     a block per (n, group) merges the group's parts, writes mean and rstd
//   group_norm_split_apply    reads x, mean and rstd, writes y
//
// x is read twice, the second time in reverse so that what the first sweep read last is still in the L2 cache. Moments
// of what a thread holds in registers are taken in two passes and merged by Chan's formula in a fixed order. An element
// of y is written by the thread that has read the same element of x: y may be x.
#include "group_norm/forward_sweep.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_moments(const data_t* x, Pair* workspace, long long N, long long C, long long HxW,
                             long long groups, long long chunk, long long chunks) {
    const GroupMoments of = {x, nullptr, nullptr, {N, C, HxW, chunk, chunks}, groups};
    int offset = 0;
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < sweep_t::items(of.cut); item += gridDim.x) {
        of.moments(sweep_t(x, of.cut, item), partials, workspace);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_fold(const Pair* workspace, acc_t* mean, acc_t* rstd, long long N, long long C, long long HxW,
                          long long groups, long long chunk, long long chunks, double eps) {
    const GroupMoments of = {nullptr, nullptr, nullptr, {N, C, HxW, chunk, chunks}, groups};
    int offset = 0;
    Moments* scratch = shared_array<Moments>(offset, block_warps);
    for (long long item = blockIdx.x; item < N * groups; item += gridDim.x) {
        const long long n = item / groups, group = item - n * groups;
        Moments found = {};
        each_part(chunks, of.group_channels(), [&](long long row, long long channel) {
            found = merge(found, load_moments(workspace, of.cut.part(n, row, group * of.group_channels() + channel)));
        });
        found = block_fold(found, scratch, [](Moments value) { return lanes_merge(value, warp_size); });
        if (threadIdx.x == 0) {
            of.give_statistics(mean, rstd, n, group, found, acc_t(eps));
        }
        __syncthreads();  // scratch is taken over by the next group
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, const acc_t* mean,
                           const acc_t* rstd, long long N, long long C, long long HxW, long long groups,
                           long long chunk, long long chunks) {
    const GroupMoments of = {x, gamma, beta, {N, C, HxW, chunk, chunks}, groups};
    const long long items = sweep_t::items(of.cut);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        of.apply(sweep_t(x, of.cut, items - 1 - item), mean, rstd, y);
    }
}
