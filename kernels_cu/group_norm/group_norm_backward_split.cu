// GroupNorm backward, strategy `split`: sums first, dx in a second sweep. It is the fallback: it takes any size and any
// layout.
//
//   dy, x, dx: (N, C, HxW) or (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   x is null if only dbeta is wanted and there is no activation.
//   Workspace: [N * chunks, C] pairs (sum g, sum g * xhat) of one channel over one chunk of one sample.
//
//   group_norm_backward_split_sums   reads dy and x, writes the workspace
//   parameter_sums                   sums the rows of the workspace; only if dgamma or dbeta is wanted
//   group_norm_backward_split_fold   one block per (n, group): computes A / L and B / L from the group's parts and
//                                    stores them over the group's first part; only if dx is wanted
//   group_norm_backward_split_input  reads dy, x and those values, writes dx; only if dx is wanted
//
// dy and x are read twice. The second sweep runs in reverse, because the elements that the first sweep read last are
// still in the L2 cache. An element of dx is written by the thread that has read the same elements of dy and x. So dx
// may be the same array as dy or x.
#include "group_norm/backward_sweep.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(gradient_threads))
    group_norm_backward_split_sums(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                   const gamma_t* gamma, const beta_t* beta, Pair* workspace, long long N, long long C,
                                   long long HxW, long long groups, long long chunk, long long chunks,
                                   long long items) {
    const GroupGradients of = {dy, x, mean, rstd, gamma, beta, {N, C, HxW, chunk, chunks}, groups};
    int offset = 0;
    Pair* partials = shared_array<Pair>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        of.sums(sweep_t(dy, of.cut, item), partials, workspace);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_backward_split_fold(const gamma_t* gamma, Pair* workspace, long long N, long long C, long long HxW,
                                   long long groups, long long chunks) {
    const long long group_channels = C / groups;
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, block_warps);
    for (long long item = blockIdx.x; item < N * groups; item += gridDim.x) {
        const long long n = item / groups, first_channel = (item - n * groups) * group_channels;
        Pair* const parts = workspace + n * chunks * C + first_channel;
        Pair sums = {};
        each_part(chunks, group_channels, [&](long long row, long long channel) {
            const Pair part = load(parts, row * C + channel);
            const acc_t weight = parameter(gamma, first_channel + channel, acc_t(1));
            sums = sums + Pair{weight * part.first, weight * part.second};
        });
        sums = block_fold(sums, scratch, [](Pair value) { return warp_sum(value); });
        if (threadIdx.x == 0) {  // all threads have loaded their parts before the barrier in block_fold
            store(parts, 0, Pair{sums.first / length, sums.second / length});
        }
        __syncthreads();  // the next group reuses scratch
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(gradient_threads))
    group_norm_backward_split_input(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                    const gamma_t* gamma, const beta_t* beta, data_t* dx, const Pair* workspace,
                                    long long N, long long C, long long HxW, long long groups, long long chunk,
                                    long long chunks, long long items) {
    const GroupGradients of = {dy, x, mean, rstd, gamma, beta, {N, C, HxW, chunk, chunks}, groups};
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        of.input(sweep_t(dy, of.cut, items - 1 - item), workspace, dx);
    }
}
