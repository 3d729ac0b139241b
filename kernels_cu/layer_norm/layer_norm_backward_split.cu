// LayerNorm backward, strategy `split`: sums first, dx in a second sweep. It is the fallback: it takes any length.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. mean, rstd: (rows). gamma: (length) or null.
//   x is null if only dbeta is wanted.
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
//   layer_norm_backward_split_input  reads dy, x, dh and those values, writes dx; only if dx is wanted
#include "partition/backward_strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_split_sums(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                   const gamma_t* gamma, Pair* row_sums, Pair* workspace, gamma_t* dgamma,
                                   gamma_t* dbeta, long long rows, long long length, long long bands, long long strips,
                                   long long bands_at) {
    const StripGradients<WithMean> gradients = {dy, x, mean, rstd, gamma, {rows, length, bands, strips}, acc_t(0)};
    gradients.sum(row_sums, {workspace == nullptr ? nullptr : workspace + bands_at, dgamma, dbeta, length});
}

extern "C" __global__ void __launch_bounds__(Tile::threads)
    layer_norm_backward_split_fold(Pair* row_sums, long long rows, long long length, long long bands,
                                   long long strips) {
    fold_strips(row_sums, Strips{rows, length, bands, strips}, [&](long long, Pair sums, Pair* parts) {
        store(parts, 0, Pair{sums.first / acc_t(length), sums.second / acc_t(length)});
    });
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_backward_split_input(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                    const gamma_t* gamma, data_t* dx, const Pair* row_sums, long long rows,
                                    long long length, long long bands, long long strips, const data_t* dh) {
    const StripGradients<WithMean> gradients = {dy, x, mean, rstd, gamma, {rows, length, bands, strips}, acc_t(0)};
    gradients.apply(dx, row_sums, dh);
}
