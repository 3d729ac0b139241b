// GroupNorm forward, strategy `warp`, where a channel is one element: LayerNorm's rows (rows.cuh), of one group each.
//
//   x, y (N, C), also (N, 1, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   a team of Tile::lanes lanes holds Tile::packs_per_thread packs a lane: a group has at most lanes * packs * pack_size elements
//   grid: `teams` teams, a multiple of `groups`, a block's worth each; a team takes a group of every teams / groups-th
//   sample, and writes it of y and its mean and rstd; it asks for its part of gamma and beta once
//
// Every byte of x is read once. No barrier and no shared memory. Wins for groups up to about two thousand channels.
#include "partition/rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(256))
    group_norm_warp_rows(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                         long long N, long long C, long long HxW, long long groups, long long teams, double eps) {
    normalise_rows<Tile::lanes, 1, true>(x, gamma, beta, y, mean, rstd, N * groups, static_cast<int>(C / groups * HxW),
                                         acc_t(eps), teams, groups);
}
