// GroupNorm backward, strategy `block` with the slab in registers (load=registers): one block per group.
//
//   dy, x, dx: (N, C, HxW), also (N, 1, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A thread holds Tile::packs_per_thread packs of dy and of x. A group has at most threads * packs * pack_size
//   elements.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. For N = 1 the kernel writes dgamma and dbeta
//   themselves.
//   Grid: the blocks take the N * groups groups in turn. A block writes dx and the sums of its group.
//   Shared memory: two rows of one pair per warp, for sums. If parameter gradients are wanted, HxW > 1 and a group has
//   several channels: also the parts of the channels' sums, one pair each (packs of the block + channels of a group -
//   1).
//
// Every byte of dy and x is read once and stays in registers. No copy in shared memory is written and read back. The
// registers of a multiprocessor hold data for which its shared memory has no room. Only one barrier precedes dx. The
// strategy wins from about two thousand elements per group up to the capacity of the threads' registers.
#include "group_norm/backward_registers.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_backward_block_registers(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                        const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                        gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                        long long groups) {
    const GroupRuns runs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    runs.run<Tile::threads>();
}
