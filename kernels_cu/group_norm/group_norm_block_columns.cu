// GroupNorm forward, strategy `block` with channels-last groups in registers (load=registers): one block per slab of
// Tile::slab_groups whole groups.
//
//   x, y: (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A thread holds Tile::packs_per_thread packs of one column. A slab has at most as many rows as the threads of a
//   column hold packs.
//   Grid: the blocks take the N * groups / slab_groups slabs in turn. A block writes y, mean and rstd of its slab.
//   Shared memory: two rows of one pair per warp and group, for sums.
//
// Every byte of x is read once and stays in registers. The parameters are loaded together with x. Two barriers precede
// y: one for the means, one for the variances; the staged kernel, which sums each channel, needs about ten. By
// the cost model, the strategy wins while a slab fits in the registers of one block.
#include "group_norm/forward_columns.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block_columns(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean,
                             acc_t* rstd, long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_columns(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
