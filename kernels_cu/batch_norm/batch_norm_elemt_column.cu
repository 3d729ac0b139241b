// BatchNorm forward, strategy `column`, for channels-last tensors and for HxW = 1. The statistics are inputs.
//
//   x, y: rows of C channels, several of them a wide row (joined_rows.cuh). mean, invstd, gamma, beta: (C). gamma and
//   beta may be null.
//   Grid: one item per chunk of wide rows and range of columns, then the items of the rows left over. The blocks take
//   the items in turn. A block writes y of its items.
//
// A thread keeps the mean, scale and offset of its channels in registers. The kernel runs from the tensor's end: if a
// kernel has just computed the statistics, it read those elements last, and they are still in the L2 cache. An element
// of y is written by the thread that has read the same element of x. So y may be the same array as x.
#include "batch_norm/channel_affine.cuh"
#include "batch_norm/joined_rows.cuh"
#include "common/text.cuh"

// Threads per multiprocessor. In the generic text the sizes are no constants, and take more registers.
constexpr int column_threads = is_specialised ? 768 : 512;

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(column_threads))
    batch_norm_elemt_column(const data_t* x, const stat_t* mean, const stat_t* invstd, const gamma_t* gamma,
                            const beta_t* beta, y_t* y, long long N, long long columns, long long HxW, long long chunk,
                            long long chunks, long long C, long long left, long long most_columns, long long sweeps,
                            long long items) {
    const Batch batch = {{N, columns, HxW, chunk, chunks, 0, most_columns}, C, left, sweeps, items};
    const ChannelAffine channels = {mean, invstd, gamma, beta};
    for (long long i = blockIdx.x; i < batch.items; i += gridDim.x) {
        const long long item = batch.items - 1 - i;
        if (item >= batch.sweeps) {
            left_over(batch, item, [&](long long at, long long channel) {
                const acc_t value = widen(load(x, batch.swept() + at));
                store(y, batch.swept() + at, narrow<y_t>(normalised(value, channels.of(channel))));
            });
            continue;
        }
        const sweep_t sweep(x, batch.cut, item);
        Affine of[sweep_t::slots] = {};
        each_channel(sweep, C, [&](int slot, long long channel) { of[slot] = channels.of(channel); });
        const data_t* const from[1] = {x};
        sweep_write(sweep, from, y, [&](int slot, const acc_t(&v)[1]) { return normalised(v[0], of[slot]); });
    }
}
