// RMSNorm backward, strategy `split`: sums first, dx in a second sweep (backward_strips.cuh). It is the fallback: it
// takes any length.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. x is h if the forward had a residual. rstd: (rows).
//   gamma: (length) or null. dx and dgamma are null if they are not wanted.
//   Workspace, if dx is wanted: [rows, strips] sums of weight * dy * xhat over a strip of a row.
//   Workspace from sum `bands_at` on, if dgamma is wanted: [bands, length] sums of dgamma. If there is one band, the
//   kernel writes dgamma itself instead.
//
//   rms_norm_backward_split_sums   one warp per strip and band of rows: reads dy and x, writes the workspace
//   gamma_sums                     sums the bands; only if dgamma is wanted
//   rms_norm_backward_split_fold   one block per row: computes B / L from the row's strips and stores it over the first
//                                  strip's sum; only if dx is wanted
//   rms_norm_backward_split_input  reads dy, x, dh and those values, writes dx; only if dx is wanted
#include "partition/backward_strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    rms_norm_backward_split_sums(const data_t* dy, const data_t* x, const stat_t* rstd, const gamma_t* gamma,
                                 Single* row_sums, Single* workspace, gamma_t* dgamma, long long rows, long long length,
                                 long long bands, long long strips, long long bands_at, double gamma_offset) {
    const StripGradients<WithoutMean> gradients = {
        dy, x, nullptr, rstd, gamma, {rows, length, bands, strips}, acc_t(gamma_offset)};
    gradients.sum(row_sums, {workspace == nullptr ? nullptr : workspace + bands_at, dgamma, length});
}

extern "C" __global__ void __launch_bounds__(Tile::threads)
    rms_norm_backward_split_fold(Single* row_sums, long long rows, long long length, long long bands,
                                 long long strips) {
    fold_strips(row_sums, Strips{rows, length, bands, strips},
                [&](long long, Single sums, Single* parts) { store(parts, 0, Single{sums.second / acc_t(length)}); });
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    rms_norm_backward_split_input(const data_t* dy, const data_t* x, const stat_t* rstd, const gamma_t* gamma,
                                  data_t* dx, const Single* row_sums, long long rows, long long length, long long bands,
                                  long long strips, const data_t* dh, double gamma_offset) {
    const StripGradients<WithoutMean> gradients = {
        dy, x, nullptr, rstd, gamma, {rows, length, bands, strips}, acc_t(gamma_offset)};
    gradients.apply(dx, row_sums, dh);
}
