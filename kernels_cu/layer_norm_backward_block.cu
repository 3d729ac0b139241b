// LayerNorm backward, strategy `block`: a block per row, held in registers; the block takes every `blocks`-th row.
//
//   dy, x, dx (rows, length); mean, rstd (rows); gamma (length) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   the block holds Tile::packs packs a thread of dy and of x
//   sums: workspace row i of [blocks, length] pairs (dbeta, dgamma), or, for one block, dgamma and dbeta themselves
//   shared memory: two rows of a pair a warp, for a row's sums; the block's sums of every column over all its rows, in
//   float32 (float64 for float64 data), where parameter gradients are wanted
//
// Every byte of dy and x is read once, and before the block writes dx, so dx may be dy or x; one barrier a row. Wins from
// about a thousand elements up to what registers and shared memory hold.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_backward_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                              const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                              long long rows, long long length, long long blocks) {
    const int elements = static_cast<int>(length);
    const ParameterGradients parameters = {workspace, dgamma, dbeta, length};
    const bool wanted = parameters.wanted();
    int offset = 0;
    Team<Tile::threads> team = {Team<Tile::threads>::shared_scratch(offset)};
    const ColumnSums kept(shared_array<Pair>(offset, wanted ? ColumnSums::size(elements) : 0), elements);
    for (long long item = blockIdx.x; item < blocks; item += gridDim.x) {
        for (int at = threadIdx.x; wanted && at < ColumnSums::size(elements); at += Tile::threads) {
            kept.sums[at] = Pair{};
        }
        __syncthreads();
#pragma unroll 1
        for (long long row = item; row < rows; row += blocks) {
            const Run<Tile::threads> run(dy, row, elements, true, true);
            // The next row may have another thread on a column; the barrier of its sum lies between.
            row_gradients(team, run, dy, x, mean, rstd, gamma, dx, row, elements,
                          [&](int, int, int column, Pair terms) {
                              if (wanted) {
                                  kept.of(column) = kept.of(column) + terms;
                              }
                          });
        }
        __syncthreads();
        for (int column = threadIdx.x; wanted && column < elements; column += Tile::threads) {
            parameters.give(item, column, kept.of(column));
        }
        __syncthreads();  // the next item takes over the sums
    }
}
