// BatchNorm statistics, strategies `split` (channels-first) and `column` (channels-last, and HxW = 1): a sweep over x.
//
//   x (N, C, HxW), or rows of C channels, several of them a wide row (batch_columns.cuh); mean, invstd (C)
//   workspace [rows, C]: the moments of a channel (batch_moments.cuh) over one chunk of a plane or of wide rows, or in
//   one row left over
//   step, middle, last: which elements a channel's moments are relative to (batch_moments.cuh)
//   grid: chunks, a warp each (channels-first) or a block for each and its columns (channels-last); then rows left over
//   shared memory: channels-last, moments for each thread and element of its pack
//
// x is read once, 16 bytes at a time, by as many blocks as there are chunks, however few the channels. Where there are
// several rows, batch_norm_stats_fold follows; with one row its moments are the results. Moments of what a thread holds
// in registers are taken in two passes and merged by Chan's formula in a fixed order. Takes any size.
#include "batch_columns.cuh"
#include "batch_moments.cuh"
#include "sweep_moments.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_stats_sweep(const data_t* x, Pair* workspace, acc_t* mean, acc_t* invstd, long long N, long long columns,
                           long long HxW, long long chunk, long long chunks, long long C, long long left,
                           long long step, long long middle, long long last, double eps) {
    const Batch batch = {{N, columns, HxW, chunk, chunks}, C, left};
    const Shifts shifts = {x, step, middle, last};
    const GivenMoments results = {workspace, mean, invstd, shifts, eps};
    int offset = 0;
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < batch.items(); item += gridDim.x) {
        if (item >= batch.sweeps()) {
            left_over(batch, item, [&](long long at, long long channel) {
                const acc_t d = acc_t(widen(load(x, batch.swept() + at))) - shifts.of(channel);
                results.give(batch.swept_parts() + at, channel, Moments{acc_t(1), d, d - d});
            });
            continue;
        }
        const sweep_t sweep(x, batch.cut, item);
        acc_t shift[sweep_t::slots] = {};
        each_channel(sweep, C, [&](int slot, long long channel) { shift[slot] = shifts.of(channel); });
        acc_t count = acc_t(0);           // the same for all the thread's columns
        Pair found[sweep_t::slots] = {};  // mean and m2
        sweep_moments(sweep, x, shift, count, found);
        gather_moments(sweep, partials, count, found, [&](long long column, Moments whole) {
            results.give(batch.cut.part(sweep.n, sweep.chunk, column), column, whole);
        });
    }
}
