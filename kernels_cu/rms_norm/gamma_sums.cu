// Adds up the rows of partial sums that an RMSNorm backward stored in a workspace: dgamma.
//
//   workspace: from sum `from`, [rows, C] sums, each row of a part of the batch; from sum `to`, [slices, C] sums
//   dgamma: (C)
//   grid: slabs of columns x slices of rows (fold_columns.cuh); shared memory: one sum per thread
//
// With one slice the sums are the results. With several slices they are stored in the workspace, from sum `to`, and a
// second launch sums these rows. parameter_sums.cu does the same for two gradients.
#include "common/fold_columns.cuh"
#include "partition/row_norms.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    gamma_sums(Single* workspace, gamma_t* dgamma, long long rows, long long C, long long columns, long long slices,
               long long from, long long to) {
    int offset = 0;
    Single* scratch = shared_array<Single>(offset, Tile::threads);
    const GammaGradient results = {slices > 1 ? workspace + to : nullptr, dgamma, C};
    fold_columns(
        Columns{rows, C, columns, slices}, scratch,
        [&](long long row, long long column) { return load(workspace, from + row * C + column); },
        [](Single a, Single b) { return a + b; },
        [&](long long slice, long long column, Single whole) { results.store_channel(slice, column, whole); });
}
