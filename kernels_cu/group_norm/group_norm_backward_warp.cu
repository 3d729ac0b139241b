// GroupNorm backward, strategy `warp`: a run of `lanes` lanes of a warp per group, held in registers.
//
//   dy, x, dx (N, C, HxW); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane of dy and of x
//   sums: workspace row n of [N, C] pairs (dbeta, dgamma), or, for one row, the results
//   grid: N * groups groups, dealt out to teams; a team writes its group of dx and its part of a row
//   shared memory: where parameter gradients of several channels a group are wanted, the parts of their sums, per team
//   packs and channels of them
//
// Every byte of dy and x is read once. No barrier of the block. Wins for groups up to about two thousand elements. Where
// HxW = 1 a team has more than one sample: group_norm_backward_warp_rows.
#include "group_norm/backward_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                             gamma_t* dbeta, long long N, long long C, long long HxW, long long groups) {
    const GroupRuns runs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    runs.run<Tile::lanes>();
}
