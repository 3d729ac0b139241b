// y of LayerNorm and RMSNorm from the statistics of the rows, by strips (strips.cuh): the last sweep of `split`.
//
// The sweep runs in reverse, because the elements that an earlier sweep read last are still in the L2 cache. An element
// of y is written by the thread that has read the same element of x. So y may be the same array as x.
#include "partition/strips.cuh"

template <typename Norm>
struct AppliedStrips {
    const data_t* x;
    const gamma_t* gamma;
    const beta_t* beta;  // null without a mean
    y_t* y;
    const acc_t* mean;  // null without a mean
    const acc_t* rstd;
    Strips cut;
    acc_t gamma_offset;  // 0 with a mean

    __device__ __forceinline__ void run() const {
        for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
            const Strip strip(cut, x, cut.items() - 1 - item);
            ParameterPack<gamma_t> scale[Tile::packs_per_thread];
            ParameterPack<beta_t> offset_of[Tile::packs_per_thread];
            strip.parameters(gamma, acc_t(1), scale);
            strip.parameters(beta, acc_t(0), offset_of);
#pragma unroll 1
            for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= cut.bands) {
                Pack<data_t> held[Tile::packs_per_thread];
                const long long at = strip.start(cut, row);
                strip.load_from(x, at, held);
                const acc_t mean_of_row = Norm::has_mean ? load(mean, row) : acc_t(0), rstd_of_row = load(rstd, row);
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    Outputs<y_t> out = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        const acc_t weight = Norm::weight(scale[k].of(i), gamma_offset);
                        const Affine affine = {mean_of_row, rstd_of_row * weight, offset_of[k].of(i)};
                        out.set(i, narrow<y_t>(normalised(widen(held[k].get(i)), affine)));
                    }
                    store_pack(y + at, strip.first(k), strip.length, out);
                }
            }
        }
    }
};
