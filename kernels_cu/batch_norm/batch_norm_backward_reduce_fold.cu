// BatchNorm backward sums: the last kernel, if the previous one stored several rows of sums to a workspace.
//
//   Workspace: at pair `from`, [rows, C] pairs of parts of the batch; at pair `to`, room for the slices.
//   invstd: (C). sum_dy, sum_dy_xmu, dgamma, dbeta: (C), null if not wanted.
//   Grid: slabs of columns x slices of rows (fold_columns.cuh). Shared memory: one pair per thread.
//
// With one slice the kernel writes the results. With several slices it stores their sums to workspace rows, which a
// second launch sums.
#include "batch_norm/sums_out.cuh"
#include "common/fold_columns.cuh"

// Without a number of blocks in the launch bound, NVRTC 12.8 keeps to 32 registers and spills.
extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_backward_reduce_fold(const stat_t* invstd, Pair* workspace, sum_dy_t* sum_dy, sum_dy_xmu_t* sum_dy_xmu,
                                    dgamma_t* dgamma, dbeta_t* dbeta, long long rows, long long C, long long columns,
                                    long long slices, long long from, long long to) {
    const Columns shape = {rows, C, columns, slices};
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    const SumsOut results = {slices > 1 ? workspace : nullptr, invstd, sum_dy, sum_dy_xmu, dgamma, dbeta};
    fold_columns(
        shape, scratch, [&](long long row, long long column) { return load(workspace, from + row * C + column); },
        [](Pair a, Pair b) { return a + b; }, [&](long long column) { return results.ahead(column); },
        [&](long long slice, long long column, Pair whole, acc_t rstd) {
            results.store_channel(to + slice * C + column, column, whole, rstd);
        });
}
