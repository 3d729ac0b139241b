// RMSNorm forward, strategy `split`: sums of squares first, y in a second sweep. It is the fallback: it takes any
// length.
//
//   x, y: (rows, length). gamma: (length) or null. rstd: (rows). row_sums: [rows, strips], in the workspace.
//
//   add_residual          h = x + residual, which the other kernels read as x; only with a residual
//   rms_norm_split_sums   one warp per strip and band of rows (strips.cuh): reads x, writes the sums of squares
//   rms_norm_split_fold   one block per row: rstd from the row's sums
//   rms_norm_split_apply  reads x and rstd, writes y
//
// Without a residual, x is read twice, and y may be the same array as x (forward_strips.cuh). With a residual, x is read
// once and h twice, and h may be the same array as the residual.
#include "partition/forward_strips.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    rms_norm_split_sums(const data_t* x, Single* row_sums, long long rows, long long length, long long bands,
                        long long strips) {
    const Strips cut = {rows, length, bands, strips};
    for (long long item = blockIdx.x; item < cut.items(); item += gridDim.x) {
        const Strip strip(cut, x, item);
#pragma unroll 1
        for (long long row = strip.band; row < rows && strip.live; row += bands) {
            Pack<data_t> held[Tile::packs_per_thread];
            strip.load_from(x, strip.start(cut, row), held);
            const Single sums = warp_sum(sums_of_squares(held));
            if (threadIdx.x % warp_size == 0) {
                store(row_sums, row * cut.strips + strip.strip, sums);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads)
    rms_norm_split_fold(Single* row_sums, acc_t* rstd, long long rows, long long length, long long bands,
                        long long strips, double eps) {
    fold_strips(row_sums, Strips{rows, length, bands, strips}, [&](long long row, Single sums, Single*) {
        store(rstd, row, reciprocal_deviation(sums.second / acc_t(length), acc_t(eps)));
    });
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    rms_norm_split_apply(const data_t* x, const gamma_t* gamma, y_t* y, const acc_t* rstd, long long rows,
                         long long length, long long bands, long long strips, double gamma_offset) {
    const AppliedStrips<WithoutMean> applied = {
        x, gamma, nullptr, y, nullptr, rstd, {rows, length, bands, strips}, acc_t(gamma_offset)};
    applied.run();
}
