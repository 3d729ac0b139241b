// LayerNorm forward, strategy `split`: statistics first, y in a second sweep. It is the fallback: it takes any length.
//
//   x, y: (rows, length). gamma, beta: (length) or null. mean, rstd: (rows).
//
//   add_residual            h = x + residual, which the other kernels read as x; only with a residual
//   split_moments           moments of the chunks of each row, with a row as a sample of one channel
//                           (partition/split_moments.cu)
//   split_moments_fold      mean and rstd of each row
//   layer_norm_split_apply  reads x, mean and rstd, writes y
//
// Without a residual, x is read twice, and y may be the same array as x (forward_strips.cuh). With a residual, x is read
// once and h twice, and h may be the same array as the residual.
#include "partition/forward_strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, const acc_t* mean,
                           const acc_t* rstd, long long rows, long long length, long long bands, long long strips) {
    const AppliedStrips<WithMean> applied = {x, gamma, beta, y, mean, rstd, {rows, length, bands, strips}, acc_t(0)};
    applied.run();
}
