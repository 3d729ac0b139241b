// Adds up the rows of partial sums that a GroupNorm or LayerNorm backward stored in a workspace: dgamma and dbeta.
//
//   workspace: from pair `from`, [rows, C] pairs (dbeta, dgamma), each row of a part of the batch; from pair `to`,
//   [slices, C] pairs
//   dgamma, dbeta (C), null if not wanted
//   grid: slabs of columns x slices of rows (fold_columns.cuh); shared memory: one pair per thread
//
// With one slice the sums are the results. With several slices they are stored in the workspace, from pair `to`, and a
// second launch sums these rows.
#include "common/fold_columns.cuh"
#include "common/parameters.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    parameter_sums(Pair* workspace, gamma_t* dgamma, gamma_t* dbeta, long long rows, long long C, long long columns,
                   long long slices, long long from, long long to) {
    const Columns shape = {rows, C, columns, slices};
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    const ParameterGradients results = {slices > 1 ? workspace + to : nullptr, dgamma, dbeta, C};
    fold_columns(
        shape, scratch, [&](long long row, long long column) { return load(workspace, from + row * C + column); },
        [](Pair a, Pair b) { return a + b; },
        [&](long long slice, long long column, Pair whole) { results.store_channel(slice, column, whole); });
}
