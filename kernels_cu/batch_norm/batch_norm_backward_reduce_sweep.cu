// BatchNorm backward sums, strategies `split` (channels-first) and `column` (channels-last, and HxW = 1): a sweep.
//
//   dy, x: (N, C, HxW), or rows of C channels, several of them a wide row (joined_rows.cuh). mean, invstd: (C).
//   x is null if only dbeta is wanted.
//   Workspace: [rows, C] pairs (sum dy, sum dy * (x - mean)) over one chunk of a plane or of wide rows, or of one row
//   left over.
//   sum_dy, sum_dy_xmu, dgamma, dbeta: (C), null if not wanted.
//   Grid: channels-first, one warp per chunk. Channels-last, one item per chunk and range of columns, then the items of
//   the rows left over. The blocks take the items in turn.
//   Shared memory: channels-last, one pair per thread and element of its pack.
//
// dy and x are read once, 16 bytes at a time, by as many blocks as there are chunks, however few channels there are. If
// there are several rows, batch_norm_backward_reduce_fold folds the workspace. With one row the kernel writes the
// results. The kernel takes any size.
#include "batch_norm/joined_rows.cuh"
#include "batch_norm/sums_out.cuh"
#include "common/text.cuh"

// Threads per multiprocessor. In double the sums and their places take more registers than 768 threads leave, and so do
// the sizes that are no constants in the generic text.
constexpr int sweep_threads = is_specialised && sizeof(acc_t) == sizeof(float) ? 768 : 512;

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(sweep_threads))
    batch_norm_backward_reduce_sweep(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                     Pair* workspace, sum_dy_t* sum_dy, sum_dy_xmu_t* sum_dy_xmu, dgamma_t* dgamma,
                                     dbeta_t* dbeta, long long N, long long columns, long long HxW, long long chunk,
                                     long long chunks, long long C, long long left, long long most_columns,
                                     long long sweeps, long long items) {
    const Batch batch = {{N, columns, HxW, chunk, chunks, 0, most_columns}, C, left, sweeps, items};
    const SumsOut results = {workspace, invstd, sum_dy, sum_dy_xmu, dgamma, dbeta};
    int offset = 0;
    Pair* partials = shared_array<Pair>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < batch.items; item += gridDim.x) {
        if (item >= batch.sweeps) {
            left_over(batch, item, [&](long long at, long long channel) {
                const acc_t gradient = widen(load(dy, batch.swept() + at));
                const acc_t value = x == nullptr ? acc_t(0) : acc_t(widen(load(x, batch.swept() + at)));
                const acc_t deviation = value - acc_t(widen(load(mean, channel)));
                results.store_channel(batch.swept_parts() + at, channel, Pair{gradient, gradient * deviation});
            });
            continue;
        }
        const sweep_t sweep(dy, batch.cut, item);
        acc_t mean_of[sweep_t::slots] = {};
        each_channel(sweep, C, [&](int slot, long long channel) { mean_of[slot] = widen(load(mean, channel)); });
        Pair sums[sweep_t::slots] = {};
        sweep_gradient_sums(sweep, dy, x, mean_of, sums);
        gather_sums(sweep, partials, sums, [&](long long column, Pair whole) {
            results.store_channel(batch.cut.part(sweep.n, sweep.chunk, column), column, whole);
        });
    }
}
