// RMSNorm forward, strategy `cluster`: a row is held in the registers of a team, which spans the Tile::cluster blocks of
// a cluster. In each block the team is the whole block or an even part of it, and holds a slice of the row.
//
//   x, residual, y, h: (rows, length). residual and h are null unless Tile::addend: then h = x + residual is normalised,
//   rounded to data_t and stored. gamma: (length) or null. rstd: (rows).
//   A cluster has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs of its team's row. Several
//   teams require length to be a multiple of pack_size: then all rows have the same alignment, and the teams' slices
//   have the same columns.
//   Grid: `teams` teams take the rows in turn, Tile::teams_per_block teams per cluster. A block writes y and h of its
//   slices. The first block of the cluster writes rstd.
//   Shared memory: two rows of one sum per warp, and two sums per team that the cluster reads; gamma of the slice, if
//   several teams share it.
//
// Every byte of x and residual is read once, before the team writes: y may be x, and h may be the residual. There is one
// barrier of the block and one of the cluster per row. The strategy wins from about 16 thousand to 128 thousand
// elements. It also wins if few rows would leave blocks idle. Requires sm_90.
#include "partition/forward_rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, resident_blocks(Tile::cluster))
    rms_norm_cluster(const data_t* x, const gamma_t* gamma, const data_t* residual, y_t* y, acc_t* rstd, data_t* h,
                     long long rows, long long length, long long teams, double eps, double gamma_offset) {
    const NormalisedRows<WithoutMean> normalised = {
        x,          residual,           gamma, nullptr, y, h, nullptr, rstd, rows, static_cast<int>(length), teams, 1,
        acc_t(eps), acc_t(gamma_offset)};
    normalised.run<Tile::threads / Tile::teams_per_block, Tile::cluster>();
}
