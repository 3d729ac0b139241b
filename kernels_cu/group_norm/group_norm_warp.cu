// GroupNorm forward, strategy `warp`: one team of `lanes` lanes of a warp per group, which the team holds in registers.
//
//   x, y: (N, C, HxW). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs. A group has at most lanes * packs *
//   pack_size elements.
//   Grid: the teams take the N * groups groups in turn. A team writes y, mean and rstd of its group.
//
// Every byte of x is read once. There is no barrier and no shared memory. The strategy wins for groups of up to about
// two thousand elements. For HxW = 1, group_norm_warp_rows is used, in which a team may process several samples.
#include "group_norm/forward_registers.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_warp(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                    long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_groups<Tile::lanes>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
