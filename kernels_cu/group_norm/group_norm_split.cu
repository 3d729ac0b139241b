// GroupNorm forward, strategy `split`: statistics first, y in a second sweep. It is the fallback: it takes any size and
// any layout.
//
//   x, y: (N, C, HxW) or (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   Workspace: [N * chunks, C] moments (moments.cuh) of one channel over one chunk of one sample.
//
//   split_moments, split_moments_fold  read x, write mean and rstd (partition/split_moments.cu)
//   group_norm_split_apply             reads x, mean and rstd, writes y
//
// x is read twice. The second sweep runs in reverse, because the elements that the first sweep read last are still in
// the L2 cache. An element of y is written by the thread that has read the same element of x. So y may be the same
// array as x.
#include "group_norm/forward_sweep.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, const acc_t* mean,
                           const acc_t* rstd, long long N, long long C, long long HxW, long long groups,
                           long long chunk, long long chunks, long long items) {
    const GroupMoments of = {x, gamma, beta, {N, C, HxW, chunk, chunks}, groups};
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        of.apply(sweep_t(x, of.cut, items - 1 - item), mean, rstd, y);
    }
}
