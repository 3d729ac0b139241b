// BatchNorm input gradient, strategy `column`, for channels-last tensors and for HxW = 1. The sums are inputs.
//
//   dy, x, dx: rows of C channels, several of them a wide row (joined_rows.cuh).
//   mean, invstd, gamma, sum_dy, sum_dy_xmu: (C). gamma may be null.
//   counts: (ranks) elements per channel of each rank, counts_stride apart; or null, then `count` is their total.
//   Grid: one item per chunk of wide rows and range of columns, then the items of the rows left over. The blocks take
//   the items in turn. A block writes dx of its items.
//
// A thread keeps the coefficients of its channels in registers. The kernel runs from the tensor's end: the kernel that
// computed the sums read those elements last, and they are still in the L2 cache. An element of dx is written by the
// thread that has read the same elements of dy and x. So dx may be the same array as dy.
#include "batch_norm/channel_coefficients.cuh"
#include "batch_norm/joined_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(768))
    batch_norm_backward_elemt_column(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                     const gamma_t* gamma, const sum_t* sum_dy, const sum_t* sum_dy_xmu, data_t* dx,
                                     long long N, long long columns, long long HxW, long long chunk, long long chunks,
                                     long long C, long long left, long long most_columns, long long sweeps,
                                     long long items, double count, const count_t* counts, long long ranks,
                                     long long counts_stride) {
    const Batch batch = {{N, columns, HxW, chunk, chunks, 0, most_columns}, C, left, sweeps, items};
    const acc_t inverse = acc_t(1) / acc_t(total_count(counts, ranks, counts_stride, count));
    const ChannelCoefficients channels = {mean, invstd, gamma, sum_dy, sum_dy_xmu, inverse};
    for (long long i = blockIdx.x; i < batch.items; i += gridDim.x) {
        const long long item = batch.items - 1 - i;
        if (item >= batch.sweeps) {
            left_over(batch, item, [&](long long at, long long channel) {
                const acc_t gradient = widen(load(dy, batch.swept() + at));
                const acc_t value = widen(load(x, batch.swept() + at));
                const acc_t found = channels.of(channel).input(gradient, value);
                store(dx, batch.swept() + at, narrow<data_t>(found));
            });
            continue;
        }
        const sweep_t sweep(dy, batch.cut, item);
        ChannelGradient of[sweep_t::slots] = {};
        each_channel(sweep, C, [&](int slot, long long channel) { of[slot] = channels.of(channel); });
        const data_t* const from[2] = {dy, x};
        sweep_write(sweep, from, dx, [&](int slot, const acc_t(&v)[2]) { return of[slot].input(v[0], v[1]); });
    }
}
