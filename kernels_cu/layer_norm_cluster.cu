// LayerNorm forward, strategy `cluster`: the Tile::cluster blocks of a cluster per row, a slice of it in the registers of
// each.
//
//   x, y (rows, length); gamma, beta (length) or null; mean, rstd (rows)
//   a block holds Tile::packs packs a thread of its slice
//   grid: `teams` clusters take the rows in turn; a block writes its slices of y, the first one mean and rstd
//   shared memory: two rows of a pair a warp, and two pairs that the cluster reads, for sums
//
// Every byte of x is read once; two barriers of the block and two of the cluster a row. Wins from about 16 thousand
// elements to 128 thousand, and where few rows leave blocks idle. sm_90.
#include "rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_cluster(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                       long long rows, long long length, long long teams, double eps) {
    normalise_rows<Tile::threads, Tile::cluster>(x, gamma, beta, y, mean, rstd, rows, static_cast<int>(length),
                                                 acc_t(eps), teams);
}
