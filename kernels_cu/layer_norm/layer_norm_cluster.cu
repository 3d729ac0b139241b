// LayerNorm forward, strategy `cluster`: the Tile::cluster blocks of a cluster per row, or an even part of each of them, a
// slice of it in the registers of each.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   each of Tile::teams_per_block teams holds Tile::packs_per_thread packs a thread of its row's slice in a block; more than one take
//   rows that begin alike (length a multiple of pack_size), so that they have slices of the same columns
//   grid: `teams` teams take the rows in turn, Tile::teams_per_block of them a cluster; a block writes its slices of y, the
//   first one mean and rstd
//   shared memory: two rows of a pair a warp, and two pairs a team that the cluster reads, for sums; gamma and beta of the
//   slice, where several teams share them
//
// Every byte of x is read once; two barriers of the block and two of the cluster a row. Wins from about 16 thousand
// elements to 128 thousand, and where few rows leave blocks idle. sm_90.
#include "partition/rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_cluster(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                       long long rows, long long length, long long teams, double eps) {
    normalise_rows<Tile::threads / Tile::teams_per_block, Tile::cluster>(x, gamma, beta, y, mean, rstd, rows,
                                                                         static_cast<int>(length), acc_t(eps), teams);
}
