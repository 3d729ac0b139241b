// The last kernel of BatchNorm statistics that left several rows of moments in a workspace.
//
//   workspace: at item `from`, [rows, C] moments (moments.cuh) of parts of the batch; at item `to`, room for the
//   slices
//   mean, invstd (C)
//   grid: slabs of columns x slices of rows (columns.cuh); shared memory: moments for each thread
//
// With one slice the moments are the results; with several they go to workspace rows that a second launch folds.
#include "batch_norm/moments_out.cuh"
#include "common/columns.cuh"

// Its launch bound leaves registers for a float64 division in four rows at a time.
extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_stats_fold(Pair* workspace, acc_t* mean, acc_t* invstd, long long rows, long long C, long long columns,
                          long long slices, long long from, long long to, double eps) {
    const Columns shape = {rows, C, columns, slices};
    int offset = 0;
    Moments* scratch = shared_array<Moments>(offset, Tile::threads);
    const MomentsOut results = {slices > 1 ? workspace : nullptr, mean, invstd, eps};
    fold_columns(
        shape, scratch,
        [&](long long row, long long column) { return load_moments(workspace, from + row * C + column); },
        [](Moments a, Moments b) { return merge(a, b); },
        [&](long long slice, long long column, Moments whole) {
            results.store_channel(to + slice * C + column, column, whole);
        });
}
