// GroupNorm backward, strategy `block` with channels-last groups in registers (load=registers): a block per slab of
// Tile::slab_groups whole groups.
//
//   dy, x, dx: (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A thread holds Tile::packs_per_thread packs of dy and of x, in one column of the slab.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. If N is 1, the kernel writes dgamma and dbeta
//   themselves.
//   Grid: blocks take the N * groups / slab_groups slabs in turn. A block writes dx and the sums of its slab.
//   Shared memory: two rows of one pair per warp and group, for sums. If parameter gradients are wanted: also one pair
//   per thread and element of a pack.
//
// Every byte of dy and x is read once and stays in registers. One barrier precedes dx. By the cost model, the strategy
// wins for slabs that fit in the registers of a block, if there are at least as many slabs as multiprocessors.
#include "group_norm/backward_columns.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(column_threads))
    group_norm_backward_block_columns(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                      const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                      gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                      long long groups) {
    const GroupColumns slabs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    slabs.run();
}
