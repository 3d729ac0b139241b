// LayerNorm backward, strategy `block`: a block per row, or an even part of one, held in registers; `teams` teams take
// the rows in turn.
//
//   dy, x, dx (rows, length); mean, rstd (rows); gamma (length) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   Tile::teams_per_block teams a block hold Tile::packs_per_thread packs a thread of dy and of x, and the sums of their columns over all
//   their rows, in float32 (float64 for float64 data): in registers where a thread has few enough, else in shared memory
//   sums: workspace row i of [blocks / Tile::cluster, length] pairs (dbeta, dgamma), or, for one row, dgamma and dbeta
//   themselves; the teams of a block have rows of their own, and put their sums together at the end, and then the blocks
//   of a cluster in rank order, so that few rows of data do not become as many rows of sums
//   grid: teams / Tile::teams_per_block, a multiple of Tile::cluster
//   shared memory: two rows of a pair a warp, for a row's sums; the sums of the columns, where they are wanted and do not
//   stay in registers, or as they are handed on; gamma, where several teams share it
//
// Every byte of dy and x is read once, and before the team writes dx, so dx may be dy or x; one barrier a row, which the
// teams of a block pass together. Wins from about a thousand elements up to what registers and shared memory hold. A
// cluster of more than one block takes sm_90.
#include "partition/row_gradients.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    layer_norm_backward_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                              const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                              long long rows, long long length, long long teams) {
    const RowGradients gradients = {
        dy,    x, mean, rstd, gamma, nullptr, dx, {workspace, dgamma, dbeta, length}, rows, static_cast<int>(length),
        teams, 1};
    gradients.run<Tile::threads / Tile::teams_per_block, 1, Tile::cluster>();
}
