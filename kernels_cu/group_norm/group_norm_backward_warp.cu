// GroupNorm backward, strategy `warp`: one team of `lanes` lanes of a warp per group, which the team holds in
// registers.
//
//   dy, x, dx: (N, C, HxW). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs of dy and of x.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. For N = 1 the kernel writes dgamma and dbeta
//   themselves.
//   Grid: the teams take the N * groups groups in turn. A team writes dx and the sums of its group.
//   Shared memory: only if parameter gradients are wanted and a group has several channels. Each team stores the parts
//   of the channels' sums, one pair each (packs of the team + channels of a group - 1).
//
// Every byte of dy and x is read once. There is no barrier of the block. The strategy wins for groups of up to about
// two thousand elements. For HxW = 1, group_norm_backward_warp_rows is used, in which a team may process several
// samples.
#include "group_norm/backward_registers.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                             gamma_t* dbeta, long long N, long long C, long long HxW, long long groups) {
    const GroupRuns runs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    runs.run<Tile::lanes>();
}
