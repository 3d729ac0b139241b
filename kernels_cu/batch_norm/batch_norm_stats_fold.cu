// BatchNorm statistics: the last kernel, if the previous one stored several rows of moments to a workspace.
//
//   Workspace: at item `from`, [rows, C] moments (moments.cuh) of parts of the batch; at item `to`, room for the
//   slices.
//   mean, invstd: (C).
//   Grid: slabs of columns x slices of rows (fold_columns.cuh). Shared memory: moments for each thread.
//
// With one slice the kernel writes the results. With several slices it stores their moments to workspace rows, which a
// second launch folds.
#include "batch_norm/moments_out.cuh"
#include "common/fold_columns.cuh"

// The launch bound leaves enough registers for the float64 divisions of four rows at a time.
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
