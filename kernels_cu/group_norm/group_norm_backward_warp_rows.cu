// GroupNorm backward, strategy `warp`, where a channel is one element: LayerNorm's rows (row_gradients.cuh), of one group
// each.
//
//   dy, x, dx (N, C), also (N, 1, C); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane of dy and of x, and the sums of its channels over all its
//   samples, in float32 (float64 for float64 data): in registers where a lane has few enough, else in shared memory
//   sums: workspace row i of [rows, C] pairs (dbeta, dgamma), or, for one row, dgamma and dbeta themselves; where a
//   block's teams are a multiple of the groups, those of one group put their sums together, and a block has a row; else
//   each team that has a sample has its part of row i of at most teams / groups
//   grid: `teams` teams, a multiple of `groups`, a block's worth each; a team takes a group of every teams / groups-th
//   sample, and asks for its part of gamma (with an activation, of beta) once
//   shared memory: the sums of the channels as they are handed on, or where they do not stay in registers
//
// Every byte of dy and x is read once, and before the team writes dx, so dx may be dy or x. No barrier but for the sums at
// the end. Wins for groups up to about two thousand channels.
#include "partition/row_gradients.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_backward_warp_rows(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                  const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                  gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                  long long groups, long long teams) {
    const RowGradients gradients = {dy,         x,
                                    mean,       rstd,
                                    gamma,      beta,
                                    dx,         {workspace, dgamma, dbeta, C},
                                    N * groups, static_cast<int>(C / groups * HxW),
                                    teams,      groups};
    gradients.run<Tile::lanes, 1, 1, true>();
}
