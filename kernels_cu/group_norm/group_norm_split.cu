// GroupNorm forward, strategy `split`: statistics first, y in a second sweep. Any size, any layout: the fallback.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   workspace [N * chunks, C] moments (moments.cuh) of one channel over one chunk of one sample
//
//   split_moments and split_moments_fold (partition/split_moments.cu)  read x, write mean and rstd
//   group_norm_split_apply  reads x, mean and rstd, writes y
//
// x is read twice, the second time in reverse so that what the first sweep read last is still in the L2 cache. An element
// of y is written by the thread that has read the same element of x: y may be x.
#include "group_norm/forward_sweep.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, const acc_t* mean,
                           const acc_t* rstd, long long N, long long C, long long HxW, long long groups,
                           long long chunk, long long chunks, long long items) {
    const GroupMoments of = {x, gamma, beta, {N, C, HxW, chunk, chunks}, groups};
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        of.apply(sweep_t(x, of.cut, items - 1 - item), mean, rstd, y);
    }
}
