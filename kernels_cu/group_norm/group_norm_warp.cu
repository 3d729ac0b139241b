// GroupNorm forward, strategy `warp`: a run of `lanes` lanes of a warp per group, held in registers.
//
//   x, y (N, C, HxW); gamma, beta (C) or null; mean, rstd (N, groups)
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane: a group has at most lanes * packs * pack_size elements
//   grid: N * groups groups, dealt out to teams; a team writes its group of y and its mean and rstd
//
// Every byte of x is read once. No barrier and no shared memory. Wins for groups up to about two thousand elements. Where
// HxW = 1 a team has more than one sample: group_norm_warp_rows.
#include "group_norm/forward_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_warp(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                    long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_groups<Tile::lanes>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
