// GroupNorm forward, strategy `block` with the slab in registers (load=registers): one block per group.
//
//   x, y: (N, C, HxW), also (N, 1, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   A thread holds Tile::packs_per_thread packs. A group has at most threads * packs * pack_size elements.
//   Grid: the blocks take the N * groups groups in turn. A block writes y, mean and rstd of its group.
//   Shared memory: two rows of one pair per warp, for sums.
//
// Every byte of x is read once and stays in registers. No copy in shared memory is written and read back. The registers
// of a multiprocessor hold data for which its shared memory has no room. Two barriers precede y: one for the mean, one
// for the variance. The strategy wins from about two thousand elements per group up to the capacity of the threads'
// registers.
#include "group_norm/forward_registers.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block_registers(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean,
                               acc_t* rstd, long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_groups<Tile::threads>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
