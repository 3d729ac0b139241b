// GroupNorm forward, strategy `cluster` with channels-last groups in registers (load=registers): a cluster of
// Tile::cluster blocks per slab of Tile::slab_groups whole groups.
//
//   x, y: (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A thread holds Tile::packs_per_thread packs of one column. A block holds HxW / cluster rows of the slab, rounded up.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / slab_groups slabs in turn. A block writes
//   y of its rows. The first block of the cluster writes mean and rstd of the slab's groups.
//   Shared memory: two rows of one pair per warp and group, for sums, and one pair per row and group that other blocks
//   read.
//
// Every byte of x is read once and stays in registers. Two barriers of the cluster precede y: one for the means, one for
// the variances. By the cost model, the strategy wins if there are fewer slabs than multiprocessors, or a slab does
// not fit in the registers of one block. Requires sm_90.
#include "group_norm/forward_columns.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_cluster_columns(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean,
                               acc_t* rstd, long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_columns<Tile::cluster>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
