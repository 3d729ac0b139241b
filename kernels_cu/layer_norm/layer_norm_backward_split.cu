// LayerNorm backward, strategy `split`: sums first, dx in a second sweep. It is the fallback: it takes any length.
//
//   dy, x, dx: (rows, length). mean, rstd: (rows). gamma: (length) or null. x is null if only dbeta is wanted.
//   Workspace, if dx is wanted: [rows, strips] pairs, the sums of gamma * dy and of gamma * dy * xhat over a strip of a
//   row.
//   Workspace from pair `bands_at` on, if dgamma or dbeta is wanted: [bands, length] pairs (dbeta, dgamma). If there is
//   one band, the kernel writes dgamma and dbeta themselves instead.
//
//   layer_norm_backward_split_sums   one warp per strip and band of rows (strips.cuh): reads dy and x, writes the
//                                    workspace
//   parameter_sums                   sums the bands; only if dgamma or dbeta is wanted
//   layer_norm_backward_split_fold   one block per row: computes A / L and B / L from the row's strips and stores them
//                                    over the first strip's pair; only if dx is wanted
//   layer_norm_backward_split_input  reads dy, x and those values, writes dx; only if dx is wanted
//
// dy and x are read twice. The second sweep runs in reverse, because the elements that the first sweep read last are
// still in the L2 cache. An element of dx is written by the thread that has read the same elements of dy and x. So dx
// may be the same array as dy or x.
#include "layer_norm/strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_split_sums(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                   const gamma_t* gamma, Pair* row_sums, Pair* workspace, gamma_t* dgamma,
                                   gamma_t* dbeta, long long rows, long long length, long long bands, long long strips,
                                   long long bands_at) {
    const Strips cut = {rows, length, bands, strips};
    const ParameterGradients parameters = {workspace == nullptr ? nullptr : workspace + bands_at, dgamma, dbeta,
                                           length};
    for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
        const Strip strip(cut, dy, item);
        ParameterPack<gamma_t> weight[Tile::packs_per_thread];
        strip.parameters(gamma, acc_t(1), weight);
        Pair kept[Tile::packs_per_thread][pack_size] = {};
#pragma unroll 1
        for (long long row = strip.band; row < rows && strip.live; row += bands) {
            Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
            const long long at = strip.start(cut, row);
            strip.load_from(dy, at, held_dy);
            strip.load_from(x, at, held_x);
            const acc_t mean_of_row = widen(load(mean, row)), rstd_of_row = widen(load(rstd, row));
            Pair sums = {};
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                Pair of_pack = {};
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    if (strip.holds(k, i)) {
                        const acc_t gradient = widen(held_dy[k].get(i));
                        const acc_t xhat =
                            x == nullptr ? acc_t(0) : (acc_t(widen(held_x[k].get(i))) - mean_of_row) * rstd_of_row;
                        const Pair terms = {gradient, gradient * xhat};
                        kept[k][i] = kept[k][i] + terms;
                        of_pack = of_pack + Pair{weight[k].of(i) * terms.first, weight[k].of(i) * terms.second};
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

extern "C" __global__ void __launch_bounds__(Tile::threads)
    layer_norm_backward_split_fold(Pair* row_sums, long long rows, long long length, long long bands,
                                   long long strips) {
    const Strips cut = {rows, length, bands, strips};
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, block_warps);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        Pair* const parts = row_sums + row * cut.strips;
        Pair sums = {};
        for (long long strip = threadIdx.x; strip < cut.strips; strip += Tile::threads) {
            sums = sums + load(parts, strip);
        }
        sums = block_fold(sums, scratch, [](Pair value) { return warp_sum(value); });
        if (threadIdx.x == 0) {  // all threads have loaded their parts before the barrier in block_fold
            store(parts, 0, Pair{sums.first / acc_t(length), sums.second / acc_t(length)});
        }
        __syncthreads();  // the next row reuses scratch
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_split_input(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                    const gamma_t* gamma, data_t* dx, const Pair* row_sums, long long rows,
                                    long long length, long long bands, long long strips) {
    const Strips cut = {rows, length, bands, strips};
    for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
        const Strip strip(cut, dy, cut.items() - 1 - item);
        ParameterPack<gamma_t> weight[Tile::packs_per_thread];
        strip.parameters(gamma, acc_t(1), weight);
#pragma unroll 1
        for (long long row = strip.last_row(cut); row >= 0 && strip.length > 0; row -= bands) {
            Pack<data_t> held_dy[Tile::packs_per_thread], held_x[Tile::packs_per_thread];
            const long long at = strip.start(cut, row);
            strip.load_from(dy, at, held_dy);
            strip.load_from(x, at, held_x);
            const Pair means = load(row_sums, row * cut.strips);
            Coefficients of = {acc_t(1), widen(load(mean, row)), widen(load(rstd, row)), means.first, means.second};
#pragma unroll
            for (int k = 0; k < Tile::packs_per_thread; ++k) {
                Pack<data_t> out = {};
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    of.gamma = weight[k].of(i);
                    out.set(i, narrow<data_t>(input_gradient(widen(held_dy[k].get(i)), widen(held_x[k].get(i)), of)));
                }
                store_pack(dx + at, strip.first(k), strip.length, out);
            }
        }
    }
}
