// LayerNorm forward, strategy `block`: a block per row, or an even part of one, held in registers.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   Tile::teams_per_block teams a block hold Tile::packs_per_thread packs a thread: a row has at most that many elements of a team
//   grid: `teams` teams take the rows in turn; a team writes its rows of y and their mean and rstd
//   shared memory: two rows of a pair a warp, for sums; gamma and beta, where several teams share them
//
// Every byte of x is read once; two barriers a row, which the teams of a block pass together. Wins from about two
// thousand elements up to what registers hold; with several teams a block where a team has few rows to one of gamma and
// beta.
#include "partition/rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                     long long rows, long long length, long long teams, double eps) {
    normalise_rows<Tile::threads / Tile::teams_per_block>(x, gamma, beta, y, mean, rstd, rows, static_cast<int>(length),
                                                          acc_t(eps), teams);
}
