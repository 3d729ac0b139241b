// BatchNorm statistics, strategies `split` (channels-first) and `column` (channels-last, and HxW = 1): a sweep over x.
//
//   x: (N, C, HxW), or rows of C channels, several of them a wide row (joined_rows.cuh). mean, invstd: (C).
//   Workspace: [rows, C] moments (moments.cuh) of a channel over one chunk of a plane or of wide rows, or in one row
//   left over.
//   Grid: channels-first, one warp per chunk. Channels-last, one item per chunk and range of columns, then the items of
//   the rows left over. The blocks take the items in turn.
//   Shared memory: channels-last, moments for each thread and element of its pack.
//
// x is read once, 16 bytes at a time, by as many blocks as there are chunks, however few channels there are. If there
// are several rows, batch_norm_stats_fold folds the workspace. With one row the kernel writes the results. A thread
// sums its packs about a centre that moves (sweep_moments.cuh). The moments that the threads of a warp or block have of
// a channel are merged at once, in a fixed order. The kernel takes any size.
#include "batch_norm/joined_rows.cuh"
#include "batch_norm/moments_out.cuh"
#include "partition/sweep_moments.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_stats_sweep(const data_t* x, Pair* workspace, acc_t* mean, acc_t* invstd, long long N, long long columns,
                           long long HxW, long long chunk, long long chunks, long long C, long long left,
                           long long most_columns, long long sweeps, long long items, double eps) {
    const Batch batch = {{N, columns, HxW, chunk, chunks, 0, most_columns}, C, left, sweeps, items};
    const MomentsOut results = {workspace, mean, invstd, eps};
    int offset = 0;
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {
        if (item >= batch.sweeps) {
            left_over(batch, item, [&](long long at, long long channel) {
                const acc_t value = widen(load(x, batch.swept() + at)), shift = usable_shift(value);
                const acc_t d = value - shift;  // 0, or `value` if that is not finite
                results.store_channel(batch.swept_parts() + at, channel, Moments{acc_t(1), shift, d, d - d});
            });
            continue;
        }
        const sweep_t sweep(x, batch.cut, item);
        gather_moments(sweep, x, partials, [&](long long column, Moments whole) {
            results.store_channel(batch.cut.part(sweep.n, sweep.chunk, column), column, whole);
        });
    }
}
