// GroupNorm forward, strategy `block` with its slab in registers (load=registers): a block per group.
//
//   x, y (N, C, HxW), also (N, 1, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   a thread holds Tile::packs_per_thread packs: a group has at most threads * packs * pack_size elements
//   grid: N * groups groups, dealt out block by block; a block writes its group of y and its mean and rstd
//   shared memory: the warps' sums, twice
//
// Every byte of x is read once (y waits for two barriers: the mean, then the variance), and goes nowhere between: no copy in shared memory is written and read again, and the
// registers hold what a multiprocessor's shared memory does not. Wins from about two thousand elements a group up to
// what the threads hold.
#include "group_norm/forward_runs.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block_registers(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean,
                               acc_t* rstd, long long N, long long C, long long HxW, long long groups, double eps) {
    normalise_groups<Tile::threads>(x, gamma, beta, y, mean, rstd, N, C, HxW, groups, acc_t(eps));
}
