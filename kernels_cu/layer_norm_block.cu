// LayerNorm forward, strategy `block`: a block per row, held in registers.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   the block holds Tile::packs packs a thread: a row has at most threads * packs * pack_size elements
//   grid: `teams` blocks take the rows in turn; a block writes its rows of y and their mean and rstd
//   shared memory: two rows of a pair a warp, for sums
//
// Every byte of x is read once; two barriers a row. Wins from about two thousand elements up to what registers hold.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                     long long rows, long long length, long long teams, double eps) {
    normalise_rows<Tile::threads>(x, gamma, beta, y, mean, rstd, rows, static_cast<int>(length), acc_t(eps), teams);
}
