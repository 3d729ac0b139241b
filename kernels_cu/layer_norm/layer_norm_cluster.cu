// LayerNorm forward, strategy `cluster`: a row is held in the registers of a team, which spans the Tile::cluster blocks
// of a cluster. In each block the team is the whole block or an even part of it, and holds a slice of the row.
//
//   x, residual, y, h: (rows, length); residual and h are null unless Tile::addend. gamma, beta: (length) or null.
//   mean, rstd: (rows).
//   A cluster has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs of its team's row. Several
//   teams require length to be a multiple of pack_size: then all rows have the same alignment, and the teams' slices
//   have the same columns.
//   Grid: `teams` teams take the rows in turn, Tile::teams_per_block teams per cluster. A block writes y and h of its
//   parts. The first block of the cluster writes mean and rstd.
//   Shared memory: two rows of one pair per warp, and two pairs per team that the cluster reads, for sums; gamma and
//   beta of the slice, if several teams share them.
//
// Every byte of x and residual is read once. There are two barriers of the block and two of the cluster per row. The
// strategy wins from about 16 thousand to 128 thousand elements. It also wins if few rows would leave blocks idle.
// Requires sm_90.
#include "partition/forward_rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, resident_blocks(Tile::cluster))
    layer_norm_cluster(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                       long long rows, long long length, long long teams, double eps, const data_t* residual,
                       data_t* h) {
    const NormalisedRows<WithMean> normalised = {
        x, residual, gamma, beta, y, h, mean, rstd, rows, static_cast<int>(length), teams, 1, acc_t(eps), acc_t(0)};
    normalised.run<Tile::threads / Tile::teams_per_block, Tile::cluster>();
}
