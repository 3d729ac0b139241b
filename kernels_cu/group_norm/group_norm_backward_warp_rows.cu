// GroupNorm backward, strategy `warp`, for HxW = 1 (a channel is one element): each group is a row, as in LayerNorm
// (backward_rows.cuh).
//
//   dy, x, dx: (N, C), also (N, 1, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs of dy and of x. The team keeps the sums of
//   its channels over all its samples in float32 (float64 for float64 data): in registers if a lane has few enough,
//   otherwise in shared memory.
//   Sums: pairs (dbeta, dgamma), stored to a workspace [rows, C]. If there is one row, the kernel writes dgamma and
//   dbeta themselves. If the number of teams per block is a multiple of `groups`, the teams of a block that process the
//   same group add their sums, and a block stores one row. Otherwise each team that has a sample stores its group's
//   part of a row, and there are at most teams / groups rows.
//   Grid: the blocks take the `teams` teams in turn, Tile::threads / Tile::lanes teams at a time. `teams` is a multiple
//   of `groups`. A team processes one group of every (teams / groups)-th sample. It loads the group's part of gamma
//   (with an activation, also of beta) once if registers hold it, otherwise again for every sample.
//   Shared memory: the sums of the channels, if registers do not hold them or while teams add theirs.
//
// Every byte of dy and x is read once, before the team writes dx. So dx may be the same array as dy or x. The only
// barriers are those for the channels' sums, before and after the loop over the samples. The strategy wins for groups
// of up to about two thousand channels.
#include "partition/backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_backward_warp_rows(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                  const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                  gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                  long long groups, long long teams) {
    const ParameterGradients parameters = {workspace, dgamma, dbeta, C};
    const RowArrays arrays = {dy, x, nullptr, mean, rstd};
    const RowGradients<WithMean> gradients = {
        arrays, gamma, beta, dx, parameters, N * groups, static_cast<int>(C / groups * HxW), teams, groups, acc_t(0)};
    gradients.run<Tile::lanes, 1, 1, true>();
}
