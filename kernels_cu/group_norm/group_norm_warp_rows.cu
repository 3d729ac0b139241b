// GroupNorm forward, strategy `warp`, for HxW = 1 (a channel is one element): each group is a row, as in LayerNorm
// (forward_rows.cuh).
//
//   x, y: (N, C), also (N, 1, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs. A group has at most lanes * packs *
//   pack_size elements.
//   Grid: the blocks take the `teams` teams in turn, Tile::threads / Tile::lanes teams at a time. `teams` is a multiple
//   of `groups`. A team processes one group of every (teams / groups)-th sample and writes its y, mean and rstd. It
//   loads the group's part of gamma and beta once if registers hold it, otherwise again for every sample.
//
// Every byte of x is read once. There is no barrier and no shared memory. The strategy wins for groups of up to about
// two thousand channels.
#include "partition/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_warp_rows(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                         long long N, long long C, long long HxW, long long groups, long long teams, double eps) {
    const NormalisedRows<WithMean> normalised = {
        x,     nullptr, gamma,      beta,    y, nullptr, mean, rstd, N * groups, static_cast<int>(C / groups * HxW),
        teams, groups,  acc_t(eps), acc_t(0)};
    normalised.run<Tile::lanes, 1, true>();
}
