// GroupNorm forward, strategy `cluster` with the slab in registers (load=registers): a cluster of Tile::cluster blocks per
// group. Each block holds a slice of the group.
//
//   x, y: (N, C, HxW), also (N, 1, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A thread holds Tile::packs_per_thread packs. A slice has at most threads * packs * pack_size elements.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups groups in turn. A block writes y of its
//   slice. The first block of the cluster writes mean and rstd of the group.
//   Shared memory: two rows of one pair per warp, for sums, and one pair per row that other blocks read.
//
// Every byte of x is read once and stays in registers. Two barriers of the cluster precede y: one for the mean, one for
// the variance. The strategy wins if there are fewer groups than multiprocessors and a slice fits in registers. Requires
// sm_90.
#include "group_norm/forward_registers.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_cluster_registers(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean,
                                 acc_t* rstd, long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_groups<Tile::threads, Tile::cluster>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
