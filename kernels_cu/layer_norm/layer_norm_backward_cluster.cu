// LayerNorm backward, strategy `cluster`: a row is held in the registers of a team, which spans the Tile::cluster
// blocks of a cluster. In each block the team is the whole block or an even part of it, and holds a slice of the row.
// `teams` teams take the rows in turn.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. x is h if the forward had a residual.
//   mean, rstd: (rows). gamma: (length) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted.
//   A cluster has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs of dy, of x and of dh. A team
//   keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in registers if a thread has
//   few enough columns, otherwise in shared memory. Several teams require length to be a multiple of pack_size: then all
//   rows have the same alignment, and the teams' slices have the same columns. At the end the teams add their sums.
//   Sums: pairs (dbeta, dgamma), stored to a workspace [clusters, length]. If there is one cluster, the kernel writes
//   dgamma and dbeta themselves.
//   Grid: teams / Tile::teams_per_block clusters of Tile::cluster blocks.
//   Shared memory: two rows of one pair per warp, and two pairs per team that the cluster reads, for the sums of a row;
//   the sums of the slice's columns, if they are wanted and registers do not hold them, or while teams add them; gamma
//   of the slice, if several teams share it.
//
// Every byte of dy, x and dh is read once, before the cluster writes dx. So dx may be the same array as dy or x. There is
// one barrier of the block and one of the cluster per row. The strategy wins from about 16 thousand to 128 thousand
// elements. It also wins if few rows would leave blocks idle. Requires sm_90.
#include "partition/backward_rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, Tile::resident_blocks)
    layer_norm_backward_cluster(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                                long long rows, long long length, long long teams, const data_t* dh) {
    const ParameterGradients parameters = {workspace, dgamma, dbeta, length};
    const RowArrays arrays = {dy, x, dh, mean, rstd};
    const RowGradients<WithMean> gradients = {arrays, gamma, nullptr, dx, parameters, rows, static_cast<int>(length),
                                              teams,  1,     acc_t(0)};
    gradients.run<Tile::threads / Tile::teams_per_block, Tile::cluster, 1>();
}
