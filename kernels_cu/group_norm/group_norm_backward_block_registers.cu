// GroupNorm backward, strategy `block` with its slab in registers (load=registers): a block per group.
//
//   dy, x, dx (N, C, HxW), also (N, 1, C); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   a thread holds Tile::packs_per_thread packs of dy and of x: a group has at most threads * packs * pack_size elements
//   sums: workspace row n of [N, C] pairs (dbeta, dgamma), or, for N = 1, dgamma and dbeta themselves
//   grid: N * groups groups, dealt out block by block; a block writes its group of dx and its part of a row
//   shared memory: the warps' sums, twice; where parameter gradients of several channels a group are wanted, and
//   HxW > 1, the parts of their sums, packs and channels of them
//
// Every byte of dy and x is read once, and goes nowhere between: no copy in shared memory is written and read again, and
// the registers hold what a multiprocessor's shared memory does not. dx waits for one barrier alone. Wins from about two
// thousand elements a group up to what the threads hold.
#include "group_norm/backward_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_backward_block_registers(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                        const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                        gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                        long long groups) {
    const GroupRuns runs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    runs.run<Tile::threads>();
}
