// LayerNorm backward, strategy `block`: a row is held in the registers of a team, which is a block or an even part of a
// block. `teams` teams take the rows in turn.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. x is h if the forward had a residual.
//   mean, rstd: (rows). gamma: (length) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted.
//   A block has Tile::teams_per_block teams. A thread holds Tile::packs_per_thread packs of dy, of x and of dh. A
//   team keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in registers if a
//   thread has few enough columns, otherwise in shared memory.
//   Sums: pairs (dbeta, dgamma), stored to a workspace [blocks / Tile::cluster, length]. If there is one row, the
//   kernel writes dgamma and dbeta themselves. Each team of a block has its own rows. At the end the teams of a block
//   add their sums, then the blocks of a cluster add theirs in rank order. Without that, few rows of data would produce
//   as many rows of sums.
//   Grid: teams / Tile::teams_per_block blocks, a multiple of Tile::cluster.
//   Shared memory: two rows of one pair per warp, for the sums of a row; the sums of the columns, if they are wanted
//   and registers do not hold them, or while teams or blocks add them; gamma, if several teams share it.
//
// Every byte of dy, x and dh is read once, before the team writes dx. So dx may be the same array as dy or x. There is
// one barrier per row, which all teams of the block pass together. The strategy wins from about a thousand elements up to
// the capacity of registers and shared memory. A cluster of more than one block requires sm_90.
#include "partition/backward_rows.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, Tile::resident_blocks)
    layer_norm_backward_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                              const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                              long long rows, long long length, long long teams, const data_t* dh) {
    const ParameterGradients parameters = {workspace, dgamma, dbeta, length};
    const RowArrays arrays = {dy, x, dh, mean, rstd};
    const RowGradients<WithMean> gradients = {arrays, gamma, nullptr, dx, parameters, rows, static_cast<int>(length),
                                              teams,  1,     acc_t(0)};
    gradients.run<Tile::threads / Tile::teams_per_block, 1, Tile::cluster>();
}
