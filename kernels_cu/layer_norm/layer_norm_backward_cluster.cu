// LayerNorm backward, strategy `cluster`: the Tile::cluster blocks of a cluster per row, or an even part of each of them, a
// slice of it in the registers of each; `teams` teams take the rows in turn.
//
//   dy, x, dx (rows, length); mean, rstd (rows); gamma (length) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   each of Tile::teams_per_block teams holds Tile::packs_per_thread packs a thread of dy and of x in a block, and the sums of its columns
//   over all its rows, in float32 (float64 for float64 data): in registers where a thread has few enough, else in shared
//   memory; more than one team take rows that begin alike (length a multiple of pack_size), so that they have slices of
//   the same columns, and put their sums together at the end
//   sums: workspace row i of [clusters, length] pairs (dbeta, dgamma), or, for one cluster, dgamma and dbeta themselves
//   grid: teams / Tile::teams_per_block clusters of Tile::cluster blocks
//   shared memory: two rows of a pair a warp, and two pairs a team that the cluster reads, for a row's sums; the sums of
//   the slice's columns, where they are wanted and do not stay in registers, or as they are handed on; gamma of the
//   slice, where several teams share it
//
// Every byte of dy and x is read once, and before the cluster writes dx, so dx may be dy or x; one barrier of the block and
// one of the cluster a row. Wins from about 16 thousand elements to 128 thousand, and where few rows leave blocks idle.
// sm_90.
#include "partition/row_gradients.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_backward_cluster(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                                long long rows, long long length, long long teams) {
    const RowGradients gradients = {
        dy,    x, mean, rstd, gamma, nullptr, dx, {workspace, dgamma, dbeta, length}, rows, static_cast<int>(length),
        teams, 1};
    gradients.run<Tile::threads / Tile::teams_per_block, Tile::cluster, 1>();
}
