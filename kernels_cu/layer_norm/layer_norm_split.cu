// LayerNorm forward, strategy `split`, the second sweep: y from the statistics. It is the fallback: it takes any
// length.
//
//   x, y: (rows, length). gamma, beta: (length) or null. mean, rstd: (rows).
//
//   split_moments           moments of the chunks of each row, with a row as a sample of one channel
//                           (partition/split_moments.cu)
//   split_moments_fold      mean and rstd of each row
//   layer_norm_split_apply  reads x, mean and rstd, writes y
//
// x is read twice. The second sweep runs in reverse, because the elements that the first sweep read last are still in
// the L2 cache. An element of y is written by the thread that has read the same element of x. So y may be the same
// array as x.
#include "layer_norm/strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, const acc_t* mean,
                           const acc_t* rstd, long long rows, long long length, long long bands, long long strips) {
    const Strips cut = {rows, length, bands, strips};
    for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
        const Strip strip(cut, x, cut.items() - 1 - item);
        ParameterPack<gamma_t> scale[Tile::packs_per_thread];
        ParameterPack<beta_t> offset_of[Tile::packs_per_thread];
        strip.parameters(gamma, acc_t(1), scale);
        strip.parameters(beta, acc_t(0), offset_of);
#pragma unroll 1
        for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= bands) {
            Pack<data_t> held[Tile::packs_per_thread];
            const long long at = strip.start(cut, row);
            strip.load_from(x, at, held);
            const acc_t mean_of_row = load(mean, row), rstd_of_row = load(rstd, row);
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                Pack<data_t> out = {};
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    const Affine affine = {mean_of_row, rstd_of_row * scale[k].of(i), offset_of[k].of(i)};
                    out.set(i, narrow<data_t>(normalised(widen(held[k].get(i)), affine)));
                }
                store_pack(y + at, strip.first(k), strip.length, out);
            }
        }
    }
}
