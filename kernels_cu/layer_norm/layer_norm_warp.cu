// LayerNorm forward, strategy `warp`: a run of `lanes` lanes of a warp per row, held in registers.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane: a row has at most lanes * packs * pack_size elements
//   grid: `teams` teams take the rows in turn, a block's worth each; a team writes its rows of y and their mean and rstd
//   shared memory: gamma and beta, which the teams of a block share
//
// Every byte of x is read once. No barrier but one at the start. Wins for rows up to about two thousand elements.
#include "partition/rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    layer_norm_warp(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                    long long rows, long long length, long long teams, double eps) {
    normalise_rows<Tile::lanes>(x, gamma, beta, y, mean, rstd, rows, static_cast<int>(length), acc_t(eps), teams);
}
