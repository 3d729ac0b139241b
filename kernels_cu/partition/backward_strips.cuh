// The gradients of LayerNorm and RMSNorm by strips (strips.cuh), for rows of any length: sums first, dx in a second
// sweep.
//
//   dy, x, dh, dx: (rows, length). mean, rstd: (rows). gamma: (length) or null. x is null if only dbeta is wanted.
//   row_sums: [rows, strips], the sums over a strip of a row of weight * dy and of weight * dy * xhat; null if dx is not
//   wanted. Their fold replaces a row's first sums by A / L and B / L.
//   parameters: a row of column sums per band; see ParameterGradients.
//
// dy and x are read twice. The second sweep runs in reverse, because the elements that the first sweep read last are
// still in the L2 cache. An element of dx is written by the thread that has read the same elements of dy and x. So dx
// may be the same array as dy or x.
#include "partition/strips.cuh"

template <typename Norm>
struct StripGradients {
    typedef typename Norm::sums_t sums_t;
    const data_t* dy;
    const data_t* x;
    const stat_t* mean;  // null without a mean
    const stat_t* rstd;
    const gamma_t* gamma;
    Strips cut;
    acc_t gamma_offset;  // 0 with a mean

    __device__ __forceinline__ acc_t mean_of(long long row) const {
        return Norm::has_mean ? acc_t(widen(load(mean, row))) : acc_t(0);
    }

    // The first sweep: the sums of the strips of rows, and of the columns of bands.
    __device__ __forceinline__ void sum(sums_t* row_sums, const typename Norm::results_t& parameters) const {
        for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
            const Strip strip(cut, dy, item);
            ParameterPack<gamma_t> weight[Tile::packs_per_thread];
            strip.parameters(gamma, acc_t(1), weight);
            sums_t kept[Tile::packs_per_thread][pack_size] = {};
#pragma unroll 1
            for (long long row = strip.band; row < cut.rows && strip.live; row += cut.bands) {
                Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
                const long long at = strip.start(cut, row);
                strip.load_from(dy, at, held_dy);
                strip.load_from(x, at, held_x);
                const acc_t mean_of_row = mean_of(row), rstd_of_row = widen(load(rstd, row));
                sums_t sums = {};
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    sums_t of_pack = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        if (strip.holds(k, i)) {
                            const acc_t gradient = widen(held_dy[k].get(i));
                            const acc_t xhat =
                                x == nullptr ? acc_t(0) : (acc_t(widen(held_x[k].get(i))) - mean_of_row) * rstd_of_row;
                            const sums_t terms = Norm::terms(gradient, gradient * xhat);
                            kept[k][i] = kept[k][i] + terms;
                            const acc_t factor = Norm::weight(weight[k].of(i), gamma_offset);
                            of_pack = of_pack + Norm::terms(factor * terms.first, factor * terms.second);
                        }
                    }
                    sums = sums + of_pack;
                }
                if (row_sums != nullptr) {
                    sums = warp_sum(sums);
                    if (threadIdx.x % warp_size == 0) {
                        store(row_sums, row * cut.strips + strip.strip, sums);
                    }
                }
            }
            if (!parameters.wanted()) {
                continue;
            }
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    if (strip.holds(k, i)) {
                        parameters.store_channel(strip.band, strip.column + strip.first(k) + i, kept[k][i]);
                    }
                }
            }
        }
    }

    // The second sweep. dh is null unless Tile::addend.
    __device__ __forceinline__ void apply(data_t* dx, const sums_t* row_sums, const data_t* dh) const {
        for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
            const Strip strip(cut, dy, cut.items() - 1 - item);
            ParameterPack<gamma_t> weight[Tile::packs_per_thread];
            strip.parameters(gamma, acc_t(1), weight);
#pragma unroll 1
            for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= cut.bands) {
                Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
                const long long at = strip.start(cut, row);
                strip.load_from(dy, at, held_dy);
                strip.load_from(x, at, held_x);
                const sums_t means = load(row_sums, row * cut.strips);
                Coefficients of = {acc_t(1), mean_of(row), widen(load(rstd, row)), means.first, means.second};
#pragma unroll
                for (int k = 0; k < Tile::packs_per_thread; ++k) {
                    const Pack<data_t> held_dh =
                        Tile::addend ? load_pack(dh + at, strip.first(k), strip.length) : Pack<data_t>{};
                    Pack<data_t> out = {};
#pragma unroll
                    for (int i = 0; i < pack_size; ++i) {
                        of.gamma = Norm::weight(weight[k].of(i), gamma_offset);
                        acc_t value = input_gradient(widen(held_dy[k].get(i)), widen(held_x[k].get(i)), of);
                        if (Tile::addend) {
                            value = value + acc_t(widen(held_dh.get(i)));
                        }
                        out.set(i, narrow<data_t>(value));
                    }
                    store_pack(dx + at, strip.first(k), strip.length, out);
                }
            }
        }
    }
};
